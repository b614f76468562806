"""The weight gradient from block averages equals expanding them and asking PyTorch, for any geometry."""

import random

import pytest
import torch
import torch.nn.functional as F

from shoestring.errors import ShoestringError
from shoestring.kernels.pooling import expand, pool, pooled_weight_gradient
from shoestring.kernels.references import pooling as reference

LAYOUTS = (torch.contiguous_format, torch.channels_last)


def draw(number):
    """A random convolution -> x's shape, the weight's, and the keywords of conv2d."""
    rng = random.Random(number)
    kernel = [rng.randint(1, 5) for _ in range(2)]
    settings = {name: tuple(rng.randint(low, high) for _ in range(2))
                for name, low, high in (("stride", 1, 3), ("padding", 0, 3), ("dilation", 1, 2))}  # fmt: skip
    reach = [d * (k - 1) + 1 for d, k in zip(settings["dilation"], kernel, strict=True)]
    size = [max(1, r - 2 * p) + rng.randint(0, 12) for r, p in zip(reach, settings["padding"], strict=True)]
    channels = rng.randint(1, 5), rng.randint(1, 6)
    return (rng.randint(1, 4), channels[0], *size), (channels[1], channels[0], *kernel), settings, rng.randint(1, 9)


def case(number, dtype, last=False):
    shape, weight_shape, settings, k = draw(number)
    torch.manual_seed(number)
    x = torch.randn(shape, dtype=dtype)
    x = x.to(memory_format=torch.channels_last) if last else x
    weight = torch.randn(weight_shape, dtype=dtype)
    grad = torch.randn_like(F.conv2d(x, weight, **settings))
    return x, weight_shape, settings, k, grad


def wanted(pooled, size, k, weight_shape, grad, settings):
    full = expand(pooled, size, k)
    assert full.shape[2:] == size
    return torch.nn.grad.conv2d_weight(full, weight_shape, grad, **settings)


@pytest.mark.parametrize("number", range(150))
def test_in_fp64_the_identity_holds_to_the_last_digits(number):
    x, shape, settings, k, grad = case(number, torch.float64, last=number % 3 == 0)
    pooled = pool(x, k)
    got = pooled_weight_gradient(grad, pooled, x.shape[2:], k, shape, **settings)
    torch.testing.assert_close(got, wanted(pooled, x.shape[2:], k, shape, grad, settings), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("number", range(150))
@pytest.mark.parametrize("scratch_bytes", [64, 2_000_000])
def test_the_compiled_kernel_gives_the_same_in_fp32_whatever_the_scratch(number, scratch_bytes):
    x, shape, settings, k, grad = case(number, torch.float32, last=number % 2 == 0)
    pooled = pool(x, k)
    got = pooled_weight_gradient(grad, pooled, x.shape[2:], k, shape, **settings, scratch_bytes=scratch_bytes)
    right = wanted(pooled.double(), x.shape[2:], k, shape, grad.double(), settings)
    torch.testing.assert_close(got.double(), right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("number", range(20))
def test_sixteen_bits_are_stored_and_sums_are_fp32(number, dtype):
    x, shape, settings, k, grad = case(number, torch.float32)
    x, grad = x.to(dtype), grad.to(dtype)
    pooled = pool(x, k)
    assert pooled.dtype == dtype
    out = torch.zeros(shape)
    pooled_weight_gradient(grad, pooled, x.shape[2:], k, shape, **settings, out=out)
    right = wanted(pooled.double(), x.shape[2:], k, shape, grad.double(), settings)
    torch.testing.assert_close(out.double(), right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 8, 20])
def test_averages_are_those_of_pytorch_and_of_what_is_there_at_the_edges(k, last):
    x = torch.randn(3, 5, 13, 11)
    x = x.to(memory_format=torch.channels_last) if last else x
    got = pool(x, k)
    assert got.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    right = torch.empty(got.shape, dtype=torch.float64)
    reference.pool(right, x.double(), k, last)
    torch.testing.assert_close(got.double(), right, rtol=1e-6, atol=1e-6)
    if k <= 11:
        inside = F.avg_pool2d(x, k)  # the blocks that are whole
        torch.testing.assert_close(got[:, :, : inside.shape[2], : inside.shape[3]], inside, rtol=1e-5, atol=1e-6)


def test_samples_with_gaps_between_them_and_single_pixels_are_averaged_too():
    tokens = torch.randn(3, 17, 6)
    grid = tokens[:, 1:].view(3, 4, 4, 6).permute(0, 3, 1, 2)  # patches of a transformer, its class token left out
    torch.testing.assert_close(pool(grid, 2), F.avg_pool2d(grid.contiguous(), 2))
    whole = torch.randn(2, 5, 3, 3).to(memory_format=torch.channels_last)
    torch.testing.assert_close(pool(whole, 4), whole.mean((2, 3), keepdim=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layouts", [(a, b) for a in LAYOUTS for b in LAYOUTS], ids=lambda pair: f"{pair}"[:60])
@pytest.mark.parametrize("shape", [(3, 70, 40, 33, 9), (2, 16, 48, 7, 40), (1, 5, 100, 64, 12)], ids=str)
@pytest.mark.parametrize("k, stride", [(2, 1), (3, 2), (4, 1)])
def test_many_channels_long_rows_and_both_layouts_of_gradient_and_averages(k, stride, shape, layouts, dtype):
    samples, inputs, outputs, height, width = shape
    torch.manual_seed(k)
    pooled = pool(torch.randn(samples, inputs, height, width).to(dtype), k).contiguous(memory_format=layouts[1])
    weight, settings = (outputs, inputs, 3, 3), {"padding": (1, 1), "stride": (stride, stride)}
    size = [(n - 1) // stride + 1 for n in (height, width)]
    grad = torch.randn(samples, outputs, *size).to(dtype).contiguous(memory_format=layouts[0])
    got = pooled_weight_gradient(grad, pooled, (height, width), k, weight, **settings, out=torch.zeros(weight))
    right = wanted(pooled.double(), (height, width), k, weight, grad.double(), settings)
    torch.testing.assert_close(got.double(), right, rtol=1e-4, atol=3e-4)


@pytest.mark.parametrize("form", LAYOUTS, ids=str)
def test_more_threads_and_less_scratch_give_the_same_bits(form):
    torch.manual_seed(0)
    pooled, grad = torch.randn(5, 24, 8, 8), torch.randn(5, 50, 16, 16).contiguous(memory_format=form)
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for scratch in (64, 2_000_000):
                found.append(
                    pooled_weight_gradient(
                        grad, pooled, (16, 16), 2, (50, 24, 3, 3), padding=(1, 1), scratch_bytes=scratch
                    )
                )
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, found[0]) for one in found)


def test_a_gradient_is_added_to_the_one_that_is_there():
    x, shape, settings, k, grad = case(3, torch.float32)
    pooled = pool(x, k)
    once = pooled_weight_gradient(grad, pooled, x.shape[2:], k, shape, **settings)
    twice = pooled_weight_gradient(grad, pooled, x.shape[2:], k, shape, **settings, out=once.clone())
    torch.testing.assert_close(twice, 2 * once)


def test_groups_are_refused():
    with pytest.raises(ShoestringError, match="in groups"):
        pooled_weight_gradient(
            torch.zeros(1, 4, 4, 4), torch.zeros(1, 4, 2, 2), (4, 4), 2, (4, 1, 3, 3), padding=(1, 1)
        )
