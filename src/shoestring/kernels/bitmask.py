"""1-bit masks: `pack_bits(mask)` and `unpack_bits(bits, numel)`, 8 elements per byte."""

import torch
from torch import Tensor

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
