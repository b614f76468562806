"""How an update reads tensors as FP32 and writes them back in their format, in PyTorch and part by part.

A part is a slice of the values in the order of memory; it begins at a multiple of BLOCK. The formats and the
random bits are those of csrc/moments.h and csrc/threefry.h.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

BLOCK = 256  # values that share a scale
CHUNK = 256 * BLOCK  # values that are widened at a time
_WORD = 0xFFFFFFFF
_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)


# -- random bits ----------------------------------------------------------------------------------------------
def threefry(key: Sequence[Any], counter: Sequence[Any]) -> tuple[Any, Any]:
    """Two words of key, two of counter (numbers or int64 tensors) -> two random words: Threefry-2x32, 13 rounds."""
    keys = (key[0], key[1], 0x1BD11BDA ^ key[0] ^ key[1])
    a, b = (counter[0] + keys[0]) & _WORD, (counter[1] + keys[1]) & _WORD
    for number in range(13):
        bits = _ROTATIONS[number % 8]
        a = (a + b) & _WORD
        b = ((b << bits) & _WORD | b >> (32 - bits)) ^ a
        if number % 4 == 3:
            turn = number // 4 + 1
            a, b = (a + keys[turn % 3]) & _WORD, (b + keys[(turn + 1) % 3] + turn) & _WORD
    return a, b


def key_of(noise: Sequence[int]) -> tuple[int, int]:
    """(seed, number of the tensor, number of the update) -> the key of this update's random bits."""
    seed, number, update = noise
    return threefry((seed & _WORD, seed >> 32 & _WORD), (number & _WORD, update & _WORD))


def random_bits(key: Sequence[int], stream: int, part: slice, device: torch.device) -> Tensor:
    """16 random bits for each element of a part: an eighth of each block from each half of a word, and an eighth from
    its complement."""
    eighth, count = BLOCK // 8, part.stop - part.start
    first = part.start // 8
    counters = torch.arange(first, first + -(-count // BLOCK) * eighth, device=device)
    a, b = threefry(key, (counters, stream))
    halves = torch.stack([a & 0xFFFF, a >> 16, b & 0xFFFF, b >> 16])
    eighths = torch.cat([halves, 0xFFFF - halves]).view(8, -1, eighth)
    return eighths.transpose(0, 1).reshape(-1)[:count].int()


# -- parts ----------------------------------------------------------------------------------------------------
def flat(x: Tensor) -> Tensor:
    """A tensor without gaps -> its values in the order of memory."""
    return x.detach().as_strided((x.numel(),), (1,))


def parts(numel: int) -> list[slice]:
    return [slice(begin, min(begin + CHUNK, numel)) for begin in range(0, numel, CHUNK)]


def widen(values: Tensor, scales: Tensor | None, part: slice, wide: torch.dtype) -> Tensor:
    """A part of flat values -> the numbers that they stand for."""
    numbers = values[part].to(wide)
    if scales is None:
        return numbers
    if not values.is_floating_point():
        root = numbers / _levels(values)
        numbers = root * root * root * root.abs()
    return numbers * _spread(scales, part)


def narrow(values: Tensor, scales: Tensor | None, part: slice, numbers: Tensor, noise: Tensor | None = None) -> None:
    """Writes numbers to a part of flat values, rounded to nearest, or stochastically if there is noise."""
    if scales is not None:
        blocks = torch.nn.functional.pad(numbers, (0, -numbers.numel() % BLOCK)).view(-1, BLOCK)
        scales[_blocks(part)] = _scale_for(values.dtype, blocks.abs().amax(1).float())
        numbers = (numbers / _spread(scales, part)).nan_to_num(0.0, 0.0, 0.0)
    if not values.is_floating_point():
        return _encode(values, part, numbers, noise)
    if noise is not None and values.dtype in (torch.float16, torch.bfloat16):
        numbers = _dither(numbers.float(), noise, 13 if values.dtype == torch.float16 else 16)
    values[part] = numbers.to(values.dtype)


def _scale_for(dtype: torch.dtype, most: Tensor) -> Tensor:
    """The largest magnitude of each block -> its scale: itself in 8 bits, in FP16 the power of two that brings it just
    under 2^15."""
    if dtype != torch.float16:
        return torch.where(most < torch.finfo(torch.float32).tiny, 0, most)
    _, exponent = torch.frexp(most)
    scale = torch.ldexp(torch.ones_like(most), (exponent - 15).clamp(min=-126))
    return torch.where(most.isfinite(), torch.where(most == 0, 1.0, scale), most)


def _dither(numbers: Tensor, noise: Tensor, dropped: int) -> Tensor:
    """Stochastic rounding: adds random bits below the last bit that stays, and truncates."""
    bits = numbers.view(torch.int32) + (noise >> (16 - dropped))
    return torch.where(numbers.isnan(), numbers, (bits >> dropped << dropped).view(torch.float32))


def _encode(values: Tensor, part: slice, numbers: Tensor, noise: Tensor | None) -> None:
    """Numbers between -1 and 1 -> their codes."""
    levels, ratio = _levels(values), numbers.abs()
    shift = 0.5 if noise is None else noise * 2.0**-16
    codes = (levels * ratio.sqrt().sqrt() + shift).clamp(max=levels).floor()
    if levels == 127:
        values[part] = codes.copysign(numbers).to(values.dtype)
    else:  # no second moment becomes zero that was not: it would divide by nothing
        values[part] = codes.maximum((ratio > 0).to(codes.dtype)).to(values.dtype)


def _levels(values: Tensor) -> int:
    return 127 if values.dtype == torch.int8 else 255


def _blocks(part: slice) -> slice:
    return slice(part.start // BLOCK, -(-part.stop // BLOCK))


def _spread(scales: Tensor, part: slice) -> Tensor:
    """The scale of each element of a part."""
    return scales[_blocks(part)].repeat_interleave(BLOCK)[: part.stop - part.start]
