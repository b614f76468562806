"""Which positions of a weight are nonzero: drawn, pruned and grown on a bitmap, a tile of positions at a time.

A bitmap has one bit a position; values are a flat tensor of the nonzeros in the order of their positions. Nothing
of the size of the dense weight is made: scratch is a tile, whatever the layer. This is NumPy's work, since tiles are
too small for several threads; weights on other devices are copied to the host, a layer at a time.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ...errors import ShoestringError
from ...kernels.sparse_index import bitmap_bytes

TILE = 16_384  # positions, a multiple of 8 so that a tile is whole bytes of the bitmap, and below 2**16
MOST_POSITIONS = 10**9  # of a layer: the limit of NumPy's hypergeometric draws
NOWHERE = range(0)
INFINITY = 0x7F800000  # its bits in FP32, whose positive numbers are in the order of their bits
Bits = np.ndarray  # bytes, as in kernels/sparse_index.py
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def generator_from(seeds: torch.Generator | None) -> np.random.Generator:
    """A NumPy generator that follows from the state of PyTorch's (the global one by default), which moves on."""
    return np.random.default_rng(int(torch.randint(2**63 - 1, (), generator=seeds)))


def check_size(name: str, numel: int) -> None:
    if numel > MOST_POSITIONS:
        raise ShoestringError(
            f"{name} has {numel:,} weights, more than the {MOST_POSITIONS:,} of a layer that can be made sparse: "
            "leave it out"
        )


def empty_bitmap(numel: int) -> Bits:
    return np.zeros(bitmap_bytes(numel), np.uint8)


# -- where ------------------------------------------------------------------------------------------------------
def grow(bits: Bits, numel: int, count: int, random: np.random.Generator, never: range = NOWHERE) -> None:
    """Sets `count` more bits, each set of free positions outside `never` as likely as any other; in place.

    How many fall into each tile is drawn first (a multivariate hypergeometric number), then where in the tile.
    """
    free = [_count(_free(bits, start, stop, never)) for start, stop in _tiles(numel)]
    assert count <= sum(free), f"{count} new nonzeros do not fit into {sum(free)} free positions"
    shares = random.multivariate_hypergeometric(free, count)
    for (start, stop), share in zip(_tiles(numel), shares, strict=True):
        if share:
            places = np.flatnonzero(_free(bits, start, stop, never)).astype(np.uint16)  # in place of eight bytes each
            mask = _mask(bits, start, stop)
            mask[random.choice(places, share, replace=False, shuffle=False)] = True
            _write(bits, start, stop, mask)


def prune(bits: Bits, numel: int, values: Tensor, count: int) -> None:
    """Clears the bits of the `count` smallest magnitudes, of equal ones the first, and makes those zero; in place."""
    threshold = threshold_of(values, count)
    tied = _next_lower(threshold)
    ties = count - (values.numel() - count_from(values, tied))
    read = 0
    for start, stop in _tiles(numel):
        mask = _mask(bits, start, stop)
        places = np.flatnonzero(mask)
        piece = values[read : read + len(places)]
        small = _below(piece, tied)
        equal = np.flatnonzero(_below(piece, threshold) & ~small)[:ties]
        small[equal] = True
        piece.masked_fill_(torch.from_numpy(small).to(piece.device), 0)
        mask[places[small]] = False
        _write(bits, start, stop, mask)
        read, ties = read + len(places), ties - len(equal)


def largest(dense: Tensor, count: int, never: range = NOWHERE) -> Bits:
    """A flat dense weight -> the bitmap of its `count` largest magnitudes; of equal ones, the first."""
    bits = empty_bitmap(dense.numel())
    threshold = threshold_of(dense, dense.numel() - count)
    tied = _next_lower(threshold)
    ties = count - count_from(dense, threshold)
    for start, stop in _tiles(dense.numel()):
        piece = dense[start:stop]
        mask = ~_below(piece, threshold)
        equal = _free(bits, start, stop, never) & ~mask & ~_below(piece, tied)
        mask[np.flatnonzero(equal)[:ties]] = True
        ties -= min(ties, _count(equal))
        _write(bits, start, stop, mask)
    return bits


def held(dense: Tensor) -> Bits:
    """A flat dense weight -> the bitmap of all but its zeros; -0 is a nonzero that has this value just now."""
    bits, words = empty_bitmap(dense.numel()), _words(dense.contiguous())
    for start, stop in _tiles(dense.numel()):
        _write(bits, start, stop, words[start:stop] != 0)
    return bits


def count(bits: Bits, numel: int) -> int:
    """How many bits of a bitmap are set."""
    return sum(_count(_mask(bits, start, stop)) for start, stop in _tiles(numel))


# -- what -------------------------------------------------------------------------------------------------------
def move(values: Tensor, before: Bits, after: Bits, numel: int, count: int) -> Tensor:
    """The values at the positions of one bitmap -> those at the `count` positions of another; new ones are zero."""
    moved = torch.empty(count, dtype=values.dtype)
    source, target = _words(values), _words(moved)
    read = written = 0
    for start, stop in _tiles(numel):
        old, new = _mask(before, start, stop), _mask(after, start, stop)
        length = _count(old)
        dense = np.zeros(stop - start, source.dtype)
        dense[old] = source[read : read + length]
        piece = dense[new]
        target[written : written + len(piece)] = piece
        read, written = read + length, written + len(piece)
    return moved.to(values.device)


def gather(dense: Tensor, bits: Bits, count: int) -> Tensor:
    """A flat dense weight -> its values at the `count` positions of a bitmap."""
    values = torch.empty(count, dtype=dense.dtype)
    source, target = _words(dense), _words(values)
    written = 0
    for start, stop in _tiles(dense.numel()):
        piece = source[start:stop][_mask(bits, start, stop)]
        target[written : written + len(piece)] = piece
        written += len(piece)
    return values.to(dense.device)


def count_from(values: Tensor, threshold: float) -> int:
    """How many magnitudes are not below the threshold."""
    return values.numel() - sum(_count(_below(p, threshold)) for p in values.split(TILE))


def threshold_of(values: Tensor, count: int) -> float:
    """The least FP32 threshold that has at least `count` magnitudes below it, by bisection of its bits."""
    low, high = 0, INFINITY
    while low < high:
        middle = (low + high) // 2
        if values.numel() - count_from(values, _float(middle)) >= count:
            high = middle
        else:
            low = middle + 1
    return _float(low)


def _float(bits: int) -> float:
    return np.int32(bits).view(np.float32).item()


def _next_lower(threshold: float) -> float:
    return np.nextafter(np.float32(threshold), np.float32(0)).item()


def _below(values: Tensor, threshold: float) -> np.ndarray:
    return (values.abs().float() < threshold).cpu().numpy()


def _words(tensor: Tensor) -> np.ndarray:
    """A tensor of any type as integers of the same size, which can be moved like the numbers they stand for."""
    return tensor.detach().cpu().view(_WORDS[tensor.element_size()]).numpy()


# -- tiles ------------------------------------------------------------------------------------------------------
def _tiles(numel: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + TILE, numel)) for start in range(0, numel, TILE))


def _mask(bits: Bits, start: int, stop: int) -> np.ndarray:
    piece = bits[start // 8 : -(-stop // 8)]
    return np.unpackbits(piece, count=stop - start, bitorder="little").view(bool)


def _free(bits: Bits, start: int, stop: int, never: range) -> np.ndarray:
    free = ~_mask(bits, start, stop)
    free[max(0, never.start - start) : max(0, never.stop - start)] = False
    return free


def _count(mask: np.ndarray) -> int:
    return int(np.count_nonzero(mask))


def _write(bits: Bits, start: int, stop: int, mask: np.ndarray) -> None:
    bits[start // 8 : -(-stop // 8)] = np.packbits(mask, bitorder="little")
