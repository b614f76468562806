"""Finiteness and length of gradients, of any type and layout, in one pass."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shoestring.kernels import gradients
from shoestring.kernels.gradients import all_finite, squared_norm

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
NUMEL = 40_003  # some strips and a tail


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 7, 16_384, NUMEL - 1])
def test_one_value_that_is_not_finite_is_found_wherever_it_is(dtype, bad, place):
    x = torch.randn(NUMEL).to(dtype)
    x[5] = torch.finfo(dtype).max  # the largest number is still a number
    assert all_finite(x)
    x[place] = bad
    assert not all_finite(x)
    assert not math.isfinite(squared_norm(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 9, NUMEL])
def test_the_norm_is_summed_in_fp64(dtype, numel):
    x = (torch.randn(numel) * 100).to(dtype)
    assert squared_norm(x) == pytest.approx(x.double().square().sum().item(), rel=1e-12)
    assert all_finite(x)


def test_squares_beyond_the_range_of_fp32_and_fp16_are_numbers():
    assert squared_norm(torch.full((10,), 1e30)) == pytest.approx(1e61)
    assert squared_norm(torch.full((1000,), 6e4).half()) == pytest.approx(3.6e12, rel=1e-3)
    assert all_finite(torch.full((10,), 1e300, dtype=torch.float64))


def test_maps_in_any_layout_are_read_where_they_lie():
    x = torch.randn(4, 6, 5, 5).contiguous(memory_format=torch.channels_last)
    for view in (x, x[:, ::2], x.transpose(1, 3)):
        assert squared_norm(view) == pytest.approx(view.double().square().sum().item())
        assert all_finite(view)
    x[0, 1, 2, 3] = math.nan
    assert not all_finite(x) and all_finite(x[:, ::2]) and not all_finite(x[:, 1::2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_compiled_kernels_equal_their_references(dtype):
    x = torch.randn(NUMEL).to(dtype)
    assert gradients._reference_squares(x) == pytest.approx(squared_norm(x), rel=1e-12)
    assert gradients._reference_finite(x)
    x[77] = math.inf
    assert not gradients._reference_finite(x)


def test_the_norm_does_not_depend_on_the_number_of_threads():
    x, before = torch.randn(1_000_000), torch.get_num_threads()
    found = []
    for count in (1, 2):
        torch.set_num_threads(count)
        found.append(squared_norm(x))
    torch.set_num_threads(before)
    assert found[0] == found[1]


def test_fakes_are_finite_and_have_a_length():
    with FakeTensorMode():
        x = torch.empty(1000, dtype=torch.float16)
        assert all_finite(x) is True and squared_norm(x) == 1.0
