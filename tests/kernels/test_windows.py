"""A byte per window tells where its maximum was, exactly."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from shoestring.errors import ShoestringError
from shoestring.kernels.references import windows as reference
from shoestring.kernels.windows import Window, window_indices, window_places

WINDOWS = [
    Window((k, j), (s, 2), (p, min(p, j // 2)), (d, 1), ceil)
    for k, j, s, p, d, ceil in itertools.product((2, 3), (1, 3, 4), (1, 3), (0, 1), (1, 2), (False, True))
    if p <= k // 2
]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("last", [False, True])
def test_indices_come_back_as_they_were(window, last):
    x = torch.randn(2, 3, 11, 13)
    x = x.to(memory_format=torch.channels_last) if last else x
    _, indices = F.max_pool2d(x, *window, return_indices=True)
    places = window_places(indices, x.shape, window)
    assert places.dtype == torch.uint8
    assert torch.equal(window_indices(places, x.shape, window), indices)
    sizes = [number for pair in window[:4] for number in pair]
    assert torch.equal(places, reference.places(indices.contiguous(), 13, sizes))
    assert torch.equal(reference.indices(places, 13, sizes), indices)


def test_a_window_of_more_than_256_pixels_is_refused():
    window = Window((17, 17), (1, 1), (0, 0), (1, 1))
    with pytest.raises(ShoestringError, match="more than 256 pixels"):
        window_places(torch.zeros(1, 1, 4, 4, dtype=torch.int64), torch.Size((1, 1, 20, 20)), window)
