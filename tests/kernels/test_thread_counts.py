"""How many threads there are changes the time that a kernel takes, and no bit of what it gives (docs/threads.md)."""

import math

import fuzz
import pytest
import torch

from shoestring import Plan, apply, builtin
from shoestring.kernels.bitmask import pack_bits, unpack_bits
from shoestring.kernels.conv import conv_forward, conv_input_gradient, conv_weight_gradient
from shoestring.kernels.core import name as core
from shoestring.kernels.dynamic_convolution import (
    dynamic_convolution_forward,
    dynamic_convolution_input_gradient,
    dynamic_convolution_kernel_gradient,
)
from shoestring.kernels.gradients import squared_norm
from shoestring.kernels.linear import linear_forward, linear_input_gradient, linear_weight_gradient
from shoestring.kernels.norm import batch_norm_apply, batch_norm_backward, batch_norm_statistics
from shoestring.kernels.pooling import expand, pool
from shoestring.kernels.quantise import quantise
from shoestring.kernels.sparse_conv import (
    sparse_conv2d_forward,
    sparse_conv2d_input_gradient,
    sparse_conv2d_weight_gradient,
)
from shoestring.kernels.sparse_embedding import sparse_embedding_forward, sparse_embedding_gradient
from shoestring.kernels.sparse_linear import (
    sparse_linear_forward,
    sparse_linear_input_gradient,
    sparse_linear_weight_gradient,
)

pytestmark = pytest.mark.skipif(core == "torch", reason="needs the compiled core")


def tensor(*shape, dtype=torch.float32):
    return fuzz.tensor(fuzz.random.Random(math.prod(shape)), *shape, dtype=dtype)


def filled(write, values, *arguments, **options):
    out = torch.zeros(values.numel())
    write(*arguments, out=out, **options)
    return out


def calls():
    """Every kernel that threads share, by name."""
    x, w, y = tensor(5, 24, 13, 17), tensor(33, 24, 3, 3), tensor(5, 33, 13, 17)
    geometry = (1, 1), (1, 1), (1, 1)
    _, values, index = fuzz.nonzeros(fuzz.random.Random(7), (33, 24, 3, 3), torch.float32)
    rows, wide, tall = tensor(130, 65), tensor(130, 200), tensor(200, 65)
    half = {name: t.half() for name, t in (("rows", rows), ("wide", wide), ("tall", tall))}
    _, flat, places = fuzz.nonzeros(fuzz.random.Random(9), (200, 65), torch.float32)
    ids = torch.arange(400).remainder(200)
    heads, kernels = tensor(3, 20, 4, 16), tensor(3, 20, 4, 7)
    mean, variance = tensor(24), tensor(24).abs() + 1
    long = tensor(50_000)
    return {
        "conv_forward": lambda: conv_forward(x, w, None, *geometry, 1),
        "conv_input_gradient": lambda: conv_input_gradient(y, w, x.shape, *geometry, 1),
        "conv_weight_gradient": lambda: conv_weight_gradient(y, x, w.shape, *geometry, 1),
        "sparse_conv2d_forward": lambda: sparse_conv2d_forward(x, values, index, 33, (3, 3), *geometry),
        "sparse_conv2d_input_gradient": lambda: sparse_conv2d_input_gradient(
            y, values, index, list(x.shape), (3, 3), *geometry
        ),
        "sparse_conv2d_weight_gradient": lambda: filled(
            sparse_conv2d_weight_gradient, values, x, y, index, (3, 3), *geometry
        ),
        "linear_forward": lambda: linear_forward(half["rows"], half["tall"], None),
        "linear_input_gradient": lambda: linear_input_gradient(half["wide"], half["tall"]),
        "linear_weight_gradient": lambda: linear_weight_gradient(half["wide"], half["rows"]),
        "sparse_linear_forward": lambda: sparse_linear_forward(rows, flat, places, 200),
        "sparse_linear_input_gradient": lambda: sparse_linear_input_gradient(wide, flat, places, 65),
        "sparse_linear_weight_gradient": lambda: filled(sparse_linear_weight_gradient, flat, rows, wide, places),
        "sparse_embedding_forward": lambda: sparse_embedding_forward(ids, flat, places, 200, 65),
        "sparse_embedding_gradient": lambda: filled(
            sparse_embedding_gradient, flat, ids, tensor(400, 65), places, 200, 65
        ),
        "dynamic_convolution_forward": lambda: dynamic_convolution_forward(heads, kernels, 3),
        "dynamic_convolution_input_gradient": lambda: dynamic_convolution_input_gradient(heads, kernels, 3),
        "dynamic_convolution_kernel_gradient": lambda: dynamic_convolution_kernel_gradient(heads, heads, 7, 3),
        "batch_norm_statistics": lambda: torch.stack(batch_norm_statistics(x)),
        "batch_norm_apply": lambda: batch_norm_apply(x, mean, variance, True),
        "batch_norm_backward": lambda: torch.cat(
            [part.flatten() for part in batch_norm_backward(x, x.flip(0), mean, variance, mean, mean, True, None)]
        ),
        "squared_norm": lambda: torch.tensor(squared_norm(long), dtype=torch.float64),
        "pack_bits": lambda: pack_bits(long > 0),
        "unpack_bits": lambda: unpack_bits(pack_bits(long > 0), long.numel()),
        "quantise": lambda: torch.cat([part.float().flatten() for part in quantise(long.view(50, 1000), 4, (1, 2))]),
        "pool": lambda: pool(x, 2),
        "expand": lambda: expand(pool(x, 2), (13, 17), 2),
    }  # fmt: skip


def in_threads(act):
    """The results of a function in 1, 2, 3 and 4 threads."""
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            yield act()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", calls())
def test_a_kernel_gives_the_same_bits_in_any_number_of_threads(name):
    first, *others = in_threads(calls()[name])
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("plan", [
    Plan(precision="fp16"),
    Plan(nonzero=30, precision="bf16", optimizer="8bit", checkpoint="residual-1*", microbatch=4),
])  # fmt: skip
def test_a_network_in_16_bits_trains_to_the_same_bits_in_any_number_of_threads(plan):
    def trained():
        torch.manual_seed(0)
        small = builtin("wrn-10-0.5", batch=8)
        lean = apply(small, plan)
        images = tensor(*small.batch[0].shape)
        for _ in range(2):
            lean.step((images, *small.batch[1:]))
        return [parameter.detach().clone() for parameter in lean.model.parameters()]

    first, *others = in_threads(trained)
    for other in others:
        assert all(torch.equal(one, again) for one, again in zip(first, other, strict=True))
