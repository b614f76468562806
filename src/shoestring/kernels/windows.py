"""Where in its window a maximum was: a byte in place of a 64-bit index.

places = window_places(indices, x.shape, window)     # of max_pool2d, up to 256 pixels per window
indices = window_indices(places, x.shape, window)
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ShoestringError
from .calls import forms
from .core import core, threads
from .define import define
from .references import windows as reference

Pair = tuple[int, int]


class Window(NamedTuple):
    """The geometry of a pooling, in the order of PyTorch's operators."""

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    ceil_mode: bool = False

    def fits_a_byte(self) -> bool:
        return self.kernel[0] * self.kernel[1] <= 256


def _places(launch: Callable[..., None], indices: Tensor, width: int, sizes: list[int]) -> Tensor:
    places = indices.new_empty(indices.shape, dtype=torch.uint8)
    launch(core.window_places, indices, places, indices.numel(), *indices.shape[-2:], width, sizes, threads())
    return places


def _indices(launch: Callable[..., None], places: Tensor, width: int, sizes: list[int]) -> Tensor:
    indices = places.new_empty(places.shape, dtype=torch.int64)
    launch(core.window_indices, places, indices, places.numel(), *places.shape[-2:], width, sizes, threads())
    return indices


_places_op = define(
    "window_places(Tensor indices, int width, int[] sizes) -> Tensor", **forms(_places, reference.places)
)
_indices_op = define(
    "window_indices(Tensor places, int width, int[] sizes) -> Tensor", **forms(_indices, reference.indices)
)


def _sizes(window: Window) -> list[int]:
    return [*window.kernel, *window.stride, *window.padding, *window.dilation]


def window_places(indices: Tensor, shape: torch.Size, window: Window) -> Tensor:
    """The indices of maxima in maps of this shape -> the number of each pixel in its window."""
    if not window.fits_a_byte():
        raise ShoestringError(f"windows of {window.kernel} have more than 256 pixels: keep the indices")
    return _places_op(indices.contiguous(), shape[-1], _sizes(window))


def window_indices(places: Tensor, shape: torch.Size, window: Window) -> Tensor:
    """The inverse."""
    return _indices_op(places.contiguous(), shape[-1], _sizes(window))
