"""Unbiased quantisation to 8, 4 or 2 bits: `quantise(x, bits, key)` and `dequantise(codes, ranges, ...)`.

x is a matrix; each row is cut into groups of 256 elements (the last may be shorter), and each group is rounded
stochastically between its minimum and its maximum, which are stored in BF16. Of 4 bits a group of 256 takes 132 bytes,
an eighth of FP32's. `key` (two 32-bit words) decides the rounding together with an element's place, so that it is the
same with any number of threads, in a recomputation and after a resume. A group that holds a NaN or an infinity has NaN
for its range: `is_whole(ranges)` tells whether there is none.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import ShoestringError
from .calls import code, forms
from .core import core, threads
from .define import define
from .references import quantise as reference

GROUP = reference.GROUP
BITS = (8, 4, 2)
Key = tuple[int, int]


def _quantise(launch: Callable[..., None], x: Tensor, bits: int, key: list[int]) -> tuple[Tensor, Tensor]:
    rows, length = x.shape
    x = x.contiguous()
    codes = x.new_empty(rows, reference.row_bytes(length, bits), dtype=torch.uint8)
    ranges = x.new_empty(rows, -(-length // GROUP), 2, dtype=torch.bfloat16)
    launch(core.quantise, x, code(x), rows, length, bits, *key, codes, ranges, threads())
    return codes, ranges


def _dequantise(launch: Callable[..., None], out: Tensor, codes: Tensor, ranges: Tensor, bits: int) -> None:
    rows, length = out.shape
    launch(core.dequantise, codes, ranges, rows, length, bits, out, code(out), threads())


_quantise_op = define(
    "quantise(Tensor x, int bits, int[] key) -> (Tensor, Tensor)", **forms(_quantise, reference.quantise)
)
_dequantise_op = define(
    "dequantise(Tensor(a!) out, Tensor codes, Tensor ranges, int bits) -> ()",
    **forms(_dequantise, reference.dequantise),
)


def quantise(x: Tensor, bits: int, key: Key) -> tuple[Tensor, Tensor]:
    """A matrix -> its codes, one row of bytes per row, and the range of each group in BF16."""
    if bits not in BITS:
        raise ShoestringError(f"{bits} bits cannot be packed into bytes: use 8, 4 or 2")
    if x.dim() != 2 or not x.is_floating_point():
        raise ShoestringError(f"only a matrix of floats is quantised, not {x.dtype} {tuple(x.shape)}")
    return _quantise_op(x, bits, [word & 0xFFFFFFFF for word in key])


def dequantise(codes: Tensor, ranges: Tensor, length: int, bits: int, dtype: torch.dtype) -> Tensor:
    """Some rows of codes and ranges -> those rows of the matrix."""
    out = torch.empty(len(codes), length, dtype=dtype, device=codes.device)
    _dequantise_op(out, codes.contiguous(), ranges.contiguous(), bits)
    return out


def is_whole(ranges: Tensor) -> bool:
    """Whether every group was finite."""
    return bool(ranges.isfinite().all())
