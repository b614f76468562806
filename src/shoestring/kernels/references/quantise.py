"""Reference implementation of the quantisation kernels (csrc/quantise.cpp), for any device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .moments import threefry

GROUP = 256
_WORD = 0xFFFFFFFF


def row_bytes(length: int, bits: int) -> int:
    whole, rest = divmod(length, GROUP)
    return whole * (GROUP * bits // 8) + -(-rest * bits // 8)


def quantise(x: Tensor, bits: int, key: Sequence[int]) -> tuple[Tensor, Tensor]:
    rows, length = x.shape
    groups = -(-length // GROUP)
    codes = x.new_empty(rows, row_bytes(length, bits), dtype=torch.uint8)
    ranges = x.new_empty(rows, groups, 2, dtype=torch.bfloat16)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    for group in range(groups):
        part = wide[:, group * GROUP : (group + 1) * GROUP]
        low, high = _below(part.amin(1)), _above(part.amax(1))
        finite = part.isfinite().all(1) & low.isfinite() & high.isfinite() & (high - low).isfinite()
        ranges[:, group, 0] = torch.where(finite, low, torch.nan)
        ranges[:, group, 1] = torch.where(finite, high, torch.nan)
        step = torch.where(finite, high - low, 0).to(wide.dtype) / (2**bits - 1)
        inverse = torch.where(step > 0, 1 / step, 0)
        number = torch.arange(rows, device=x.device) * groups + group
        places = torch.where(finite[:, None], (part - low.to(wide.dtype)[:, None]) * inverse[:, None], 0)
        chosen = (places + _uniform(number, part.shape[1], key).to(wide.dtype)).floor().clamp(0, 2**bits - 1)
        start = group * (GROUP * bits // 8)
        packed = _pack(chosen.to(torch.uint8), bits)
        codes[:, start : start + packed.shape[1]] = packed
    return codes, ranges


def dequantise(out: Tensor, codes: Tensor, ranges: Tensor, bits: int) -> None:
    wide = torch.promote_types(out.dtype, torch.float32)
    for group in range(ranges.shape[1]):
        part = out[:, group * GROUP : (group + 1) * GROUP]
        start = group * (GROUP * bits // 8)
        low, high = ranges[:, group].to(wide).unbind(1)
        step = (high - low) / (2**bits - 1)
        values = _unpack(codes[:, start : start + -(-part.shape[1] * bits // 8)], part.shape[1], bits)
        part.copy_(low[:, None] + values.to(wide) * step[:, None])


def _below(x: Tensor) -> Tensor:
    """The largest BF16 numbers that are not above x, in FP32."""
    near = x.to(torch.bfloat16)
    return torch.where(near.to(x.dtype) > x, _neighbour(near, -torch.inf), near).float()


def _above(x: Tensor) -> Tensor:
    near = x.to(torch.bfloat16)
    return torch.where(near.to(x.dtype) < x, _neighbour(near, torch.inf), near).float()


def _neighbour(x: Tensor, towards: float) -> Tensor:
    return torch.nextafter(x, torch.full_like(x, towards))


def _uniform(number: Tensor, count: int, key: Sequence[int]) -> Tensor:
    """A random number in (0, 1) for each of `count` elements of the groups with these numbers."""
    quarter = -(-count // 4)
    counter = number[:, None] * (GROUP // 4) + torch.arange(quarter, device=number.device)
    first, second = threefry(key, (counter & _WORD, counter >> 32))
    halves = torch.cat([first & 0xFFFF, first >> 16, second & 0xFFFF, second >> 16], 1)[:, :count]
    return (halves.float() + 0.5) / 65536


def _pack(values: Tensor, bits: int) -> Tensor:
    per_byte = 8 // bits
    width = -(-values.shape[1] // per_byte)
    padded = torch.nn.functional.pad(values, (0, width * per_byte - values.shape[1])).view(len(values), per_byte, width)
    shifts = torch.arange(per_byte, device=values.device, dtype=torch.uint8) * bits
    return (padded << shifts[:, None]).sum(1, dtype=torch.uint8)


def _unpack(packed: Tensor, count: int, bits: int) -> Tensor:
    shifts = torch.arange(8 // bits, device=packed.device, dtype=torch.uint8) * bits
    return ((packed[:, None, :] >> shifts[:, None]) & (2**bits - 1)).flatten(1)[:, :count]
