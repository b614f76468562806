"""The index of a sparse weight: the positions of its nonzeros in row-major order, as one uint8 tensor.

The smaller of a bitmap (1 bit a position) and gaps (a byte a nonzero: the zeros skipped before it; 255 skips
255 zeros and is no nonzero). Gaps are used only where they are strictly shorter: the length tells which.
Weight, gradient and momentum are flat tensors of values in this order, and share the index.

    index = encode(positions, numel)
    positions = decode(index, numel)
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import ShoestringError
from .core import core
from .references import bitmask as reference
from .references import sparse_conv as reference_sparse

_LIMIT = 2**31 - 1


def bitmap_bytes(numel: int) -> int:
    return -(-numel // 8)


def _compiled(tensor: Tensor) -> bool:
    return core is not None and tensor.device.type == "cpu"


def from_bitmap(bits: Tensor, numel: int) -> Tensor:
    """A bitmap of `numel` positions (see `pack_bits`) -> the index: the bitmap itself, or gaps if shorter."""
    if bits.dtype != torch.uint8 or bits.dim() != 1 or bits.numel() != bitmap_bytes(numel):
        raise ShoestringError(
            f"a bitmap of {numel} positions is {bitmap_bytes(numel)} bytes, "
            f"not {bits.dtype} {tuple(bits.shape)}: pass what pack_bits makes"
        )
    if not _compiled(bits):
        gaps = reference_sparse.gaps(reference.unpack_bits(bits, numel).nonzero().flatten())
        return gaps if gaps.numel() < bits.numel() else bits
    bits = bits.contiguous()
    size = core.count_gap_bytes(bits.data_ptr(), numel)
    if size >= bits.numel():
        return bits
    gaps = torch.empty(size, dtype=torch.uint8)
    core.gaps_from_bitmap(bits.data_ptr(), numel, gaps.data_ptr())
    return gaps


def to_bitmap(index: Tensor, numel: int) -> Tensor:
    """An index -> a new bitmap of its `numel` positions, which may be changed and given to `from_bitmap`."""
    if not _compiled(index):
        mask = torch.zeros(numel, dtype=torch.bool, device=index.device)
        mask[reference_sparse.positions(index, numel)] = True
        return reference.pack_bits(mask)
    bits = torch.empty(bitmap_bytes(numel), dtype=torch.uint8)
    core.bitmap_from_index(index.data_ptr(), index.numel(), numel, bits.data_ptr())
    return bits


def encode(positions: Tensor, numel: int) -> Tensor:
    """Rising positions in [0, numel) -> the index."""
    _check_positions(positions, numel)
    if not _compiled(positions):
        mask = torch.zeros(numel, dtype=torch.bool, device=positions.device)
        mask[positions.long()] = True
        return from_bitmap(reference.pack_bits(mask), numel)
    positions = positions.to(torch.int32).contiguous()
    bits = torch.zeros(bitmap_bytes(numel), dtype=torch.uint8)
    core.set_bits(positions.data_ptr(), positions.numel(), bits.data_ptr())
    return from_bitmap(bits, numel)


def _check_positions(positions: Tensor, numel: int) -> None:
    _check_size(numel)
    if positions.is_floating_point() or positions.dim() != 1:
        raise ShoestringError(f"positions are a vector of integers, not {positions.dtype} {positions.shape}")
    if bool(((positions < 0) | (positions >= numel)).any()):
        raise ShoestringError(f"positions reach outside the weight's {numel}: each must be in [0, {numel})")
    if bool((positions.diff() <= 0).any()):
        raise ShoestringError("positions are unsorted or occur twice: pass each once, in rising order")


def _check_size(numel: int) -> None:
    if not 0 <= numel <= _LIMIT:
        raise ShoestringError(f"a sparse weight of {numel} positions is too large: the limit is {_LIMIT}")


def require_countable(what: str, scratch: Sequence[int], weight: Sequence[int], source: Sequence[int]) -> None:
    """Refuses sizes that the compiled kernels cannot count in 32 bits: their scratch is then -1."""
    if min(scratch) < 0:
        raise ShoestringError(
            f"a sparse {what} of weight {tuple(weight)} over {tuple(source)} is too large: the kernels count within "
            "4 GiB of scratch, and 2 million positions of a channel; leave this layer dense"
        )


def decode(index: Tensor, numel: int, start: int = 0, stop: int | None = None) -> Tensor:
    """An index -> the positions in [start, stop), int32, rising: of a whole layer, or of a piece of it."""
    stop = numel if stop is None else min(stop, numel)
    start = min(start, stop)
    if not _compiled(index):
        positions = reference_sparse.positions(index, numel)
        return positions[(positions >= start) & (positions < stop)].to(torch.int32)
    where = (index.data_ptr(), index.numel(), numel, start, stop)
    positions = torch.empty(core.count_nonzeros(*where), dtype=torch.int32)
    core.decode_index(*where, positions.data_ptr())
    return positions


def validate(index: Tensor, numel: int, count: int) -> None:
    """Refuses an index that is damaged or does not hold `count` nonzeros of `numel` positions."""
    if index.dtype != torch.uint8 or index.dim() != 1 or not index.is_contiguous():
        raise ShoestringError(f"a sparse index is a vector of bytes, not {index.dtype} {tuple(index.shape)}")
    _check_size(numel)
    found = _count(index, numel)
    if found < 0:
        raise ShoestringError(
            f"the sparse index of {index.numel()} bytes leads beyond the weight's {numel} positions: "
            "it is damaged or of another shape; load the matching save"
        )
    if found != count:
        raise ShoestringError(
            f"the sparse index holds {found} nonzeros but there are {count} values: "
            "it is damaged, or belongs to another density; load the matching save"
        )


def _count(index: Tensor, numel: int) -> int:
    """The number of nonzeros, or -1 if the index is damaged."""
    if _compiled(index):
        return core.check_index(index.data_ptr(), index.numel(), numel)
    if index.numel() > bitmap_bytes(numel):
        return -1
    if index.numel() == bitmap_bytes(numel):
        beyond = numel % 8 and int(index[-1]) >> numel % 8
        return -1 if beyond else int(reference.unpack_bits(index, numel).sum())
    positions = reference_sparse.positions(index, numel)
    open_end = index.numel() and int(index[-1]) == reference_sparse.ESCAPE
    outside = positions.numel() and int(positions[-1]) >= numel
    return -1 if open_end or outside else positions.numel()
