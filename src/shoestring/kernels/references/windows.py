"""Reference implementation of the window kernels (csrc/windows.cpp), for any device."""

from collections.abc import Sequence

import torch
from torch import Tensor


def places(indices: Tensor, width: int, sizes: Sequence[int]) -> Tensor:
    rows, columns = _corners(indices, sizes)
    y, x = indices.div(width, rounding_mode="floor") - rows, indices % width - columns
    return ((y // sizes[6]) * sizes[1] + x // sizes[7]).to(torch.uint8)


def indices(places: Tensor, width: int, sizes: Sequence[int]) -> Tensor:
    rows, columns = _corners(places, sizes)
    place = places.long()
    y, x = place.div(sizes[1], rounding_mode="floor"), place % sizes[1]
    return (rows + y * sizes[6]) * width + columns + x * sizes[7]


def _corners(like: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The first pixel of each window, which may lie in the padding."""
    height, width = like.shape[-2:]
    rows = torch.arange(height, device=like.device) * sizes[2] - sizes[4]
    columns = torch.arange(width, device=like.device) * sizes[3] - sizes[5]
    return rows[:, None], columns
