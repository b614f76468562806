"""1-bit masks, 8 elements per byte: `pack_bits(mask)` and `unpack_bits(bits, numel)`, `positive_bits(x)` for what ReLU
lets pass, and `where_bits(out, x, bits)` for the gradient that passes."""

import torch
from torch import Tensor

from .calls import Launch, code, forms, require_contiguous, require_same
from .core import core, threads
from .define import define
from .references import bitmask as reference


def _pack(mask: Tensor) -> Tensor:
    mask = mask.contiguous()
    if mask.dtype not in (torch.bool, torch.uint8):
        mask = mask != 0
    bits = torch.empty(-(-mask.numel() // 8), dtype=torch.uint8)
    core.pack_bits(mask.data_ptr(), bits.data_ptr(), mask.numel(), threads())
    return bits


def _unpack(bits: Tensor, numel: int) -> Tensor:
    mask = torch.empty(numel, dtype=torch.bool)
    core.unpack_bits(bits.contiguous().data_ptr(), mask.data_ptr(), numel, threads())
    return mask


pack_bits = define(
    "pack_bits(Tensor mask) -> Tensor",
    reference=reference.pack_bits,
    fake=lambda mask: mask.new_empty(-(-mask.numel() // 8), dtype=torch.uint8),
    compiled=_pack,
)
unpack_bits = define(
    "unpack_bits(Tensor bits, int numel) -> Tensor",
    reference=reference.unpack_bits,
    fake=lambda bits, numel: bits.new_empty(numel, dtype=torch.bool),
    compiled=_unpack,
)


def _positive(launch: Launch, x: Tensor) -> Tensor:
    bits = x.new_empty(-(-x.numel() // 8), dtype=torch.uint8)
    launch(core.positive_bits, x, code(x), bits, x.numel(), threads())
    return bits


def _where(launch: Launch, out: Tensor, x: Tensor, bits: Tensor) -> None:
    launch(core.where_bits, x, bits, out, x.element_size(), x.numel(), threads())


_positive_op = define("positive_bits(Tensor x) -> Tensor", **forms(_positive, reference.positive_bits))
_where_op = define("where_bits(Tensor(a!) out, Tensor x, Tensor bits) -> ()", **forms(_where, reference.where_bits))


def positive_bits(x: Tensor) -> Tensor:
    """Packed bits, in the order of x's elements, of where x is not <= 0, a NaN included."""
    return _positive_op(x) if x.is_contiguous() else pack_bits((x <= 0).logical_not_())


def where_bits(out: Tensor, x: Tensor, bits: Tensor) -> None:
    """Writes the elements of x that have a bit to `out`, and zero for the others, whatever they are; `out` may be x."""
    require_same("where_bits", x, out=out)
    require_contiguous("where_bits", x=x, out=out, bits=bits)
    _where_op(out, x, bits)
