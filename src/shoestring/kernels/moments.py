"""A moment of an optimizer in few bytes: FP32, BF16, or FP16 or 8 bits with one scale a block of 256 values.

    moment = new_moment(weight, "8bit")          # zeros, 1.02 bytes per parameter
    values = read_moment(moment)                 # in FP32
    write_moment(moment, values)

8 bits hold the fourth root of a value over the largest of its block. Second moments are kept as their root in
FP16 and in 8 bits, which takes half the range, so that none becomes zero while its first moment does not; and they
are rounded by chance, for in one step they change by less than the spacing, and rounded to nearest they would not
move. docs/techniques/optimizer.md has the measured errors behind these choices.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .calls import Launch, forms
from .core import core
from .define import define
from .references import moments as reference_moments
from .references.moments import BLOCK, flat, parts

FORMS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "8bit": torch.int8}
SCALED = ("fp16", "8bit")


class Moment(NamedTuple):
    """`values` has the weight's shape and strides; `scales` is there for FP16 and 8 bits, one a block."""

    values: Tensor
    scales: Tensor | None = None


def _bits(launch: Launch, bits: Tensor, start: int, stream: int, noise: Sequence[int]) -> None:
    launch(core.random_bits, bits, bits.numel(), start // BLOCK, stream, *noise)


def _reference_bits(bits: Tensor, start: int, stream: int, noise: Sequence[int]) -> None:
    part = slice(start, start + bits.numel())
    bits.copy_(reference_moments.random_bits(reference_moments.key_of(noise), stream, part, bits.device))


_bits_op = define(
    "random_bits(Tensor(a!) bits, int start, int stream, int[] noise) -> ()",
    **forms(_bits, _reference_bits),
    idle=3,
)


def random_bits(noise: Sequence[int], stream: int, part: slice, device: torch.device) -> Tensor:
    """(seed, number of the tensor, number of the update) and a part -> 16 random bits for each of its elements."""
    bits = torch.empty(part.stop - part.start, dtype=torch.int32, device=device)
    _bits_op(bits, part.start, stream, noise)
    return bits


def blocks_of(numel: int) -> int:
    return -(-numel // BLOCK)


def new_moment(weight: Tensor, form: str, positive: bool = False, scales: int | None = None) -> Moment:
    """A weight and a form -> its moment, all zeros; FP64 weights have FP64 moments in place of FP32. `scales`: how many
    to make, if more than there are blocks."""
    dtype = torch.uint8 if form == "8bit" and positive else FORMS[form]
    if form == "fp32":
        dtype = torch.promote_types(weight.dtype, dtype)
    values = torch.zeros_like(weight, dtype=dtype, requires_grad=False)
    if form not in SCALED:
        return Moment(values)
    count = blocks_of(weight.numel()) if scales is None else scales
    return Moment(values, torch.zeros(count, device=weight.device))


def read_moment(moment: Moment) -> Tensor:
    """A moment -> its values in FP32 (the root of a second moment if that is stored)."""
    values = moment.values
    wide = torch.promote_types(values.dtype, torch.float32)
    out = torch.empty_like(values, dtype=wide)
    for part in parts(values.numel()):
        flat(out)[part] = reference_moments.widen(flat(values), moment.scales, part, wide)
    return out


def write_moment(moment: Moment, numbers: Tensor) -> None:
    """Keeps numbers as `read_moment` gives them, rounded to nearest."""
    values, scales = moment
    numbers = torch.empty_like(values, dtype=numbers.dtype).copy_(numbers)
    for part in parts(values.numel()):
        reference_moments.narrow(flat(values), scales, part, flat(numbers)[part])
