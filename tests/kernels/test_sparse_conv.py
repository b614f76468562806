"""Sparse convolution equals the dense one with the same weight, forward and in both gradients."""

import weakref

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from shoestring.errors import ShoestringError
from shoestring.kernels.references import sparse_conv as reference_sparse
from shoestring.kernels.sparse_conv import (
    sparse_conv2d_forward,
    sparse_conv2d_input_gradient,
    sparse_conv2d_weight_gradient,
)
from shoestring.kernels.sparse_index import encode
from shoestring.passes.saved_tensors import storing
from shoestring.passes.sparse_layers import SparseConvolution, sparse_convolution

quick = settings(max_examples=60, deadline=None, derandomize=True)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def weight(shape, density, dtype=torch.float32, seed=0, empty_rows=()):
    """Random nonzeros of a weight of this shape -> (values, index)."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(shape, generator=generator) < density
    mask[list(empty_rows)] = False
    positions = mask.flatten().nonzero().flatten()
    return torch.randn(positions.numel(), generator=generator).to(dtype), encode(positions, mask.numel())


def close(actual, expected, dtype):
    """Within the rounding of the storage type, relative to the largest entry."""
    assert actual.dtype == dtype and actual.shape == expected.shape
    if expected.numel():
        error = (actual.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
        assert error < TOLERANCE[dtype], f"relative error {error:.2e}"


def check(x, values, index, out, geometry, scale=None, shift=None):
    """Forward and both gradients of the kernels against the references in FP64."""
    dtype, wide = x.dtype, lambda t: None if t is None else t.double()
    coefficients, wide_coefficients = (scale, shift), (wide(scale), wide(shift))
    y = sparse_conv2d_forward(x, values, index, out, *geometry, *coefficients)
    close(y, reference_sparse.conv2d(wide(x), wide(values), index, out, *geometry, *wide_coefficients), dtype)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    size = list(x.shape)
    dx = sparse_conv2d_input_gradient(dy, values, index, size, *geometry)
    whole = (0, x.shape[1])
    close(dx, reference_sparse.conv2d_input_gradient(wide(dy), wide(values), index, size, *geometry, *whole), dtype)
    for first in range(x.shape[1])[:: max(1, x.shape[1] // 3)]:  # a few channels at a time have the same bits
        some = first, min(x.shape[1], first + 3)
        part = sparse_conv2d_input_gradient(dy, values, index, size, *geometry, channels=some)
        assert torch.equal(part, dx[:, slice(*some)])
    expected = torch.zeros_like(wide(values))
    reference_sparse.conv2d_weight_gradient(expected, wide(x), wide(dy), index, *geometry, *wide_coefficients, False)
    gradient = torch.empty_like(values)
    sparse_conv2d_weight_gradient(x, dy, index, *geometry, *coefficients, out=gradient)
    close(gradient, expected, dtype)


pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))


@quick
@given(
    batch=st.integers(1, 4),
    channels=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    height=st.integers(1, 20),
    width=st.sampled_from([1, 3, 7, 8, 9, 16, 23, 32, 33, 47, 64, 70]),
    kernel=st.sampled_from([(3, 3), (1, 1), (5, 5), (2, 3), (3, 1), (1, 4)]),
    stride=pairs,
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    dilation=pairs,
    density=st.sampled_from([0.05, 0.3, 1]),
    dtype=st.sampled_from(list(TOLERANCE)),
    threads=st.integers(1, 3),
)
def test_any_geometry_gives_what_the_dense_weight_gives(
    batch, channels, height, width, kernel, stride, padding, dilation, density, dtype, threads
):
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    assume(height + 2 * padding[0] >= spans[0] and width + 2 * padding[1] >= spans[1])
    torch.set_num_threads(threads)
    inside, out = channels
    values, index = weight((out, inside, *kernel), density, dtype)
    x = torch.randn(batch, inside, height, width, generator=torch.Generator().manual_seed(2)).to(dtype)
    check(x, values, index, out, (list(kernel), list(stride), list(padding), list(dilation)))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "inside, out, size, stride", [(16, 32, 32, 1), (32, 64, 32, 2), (64, 64, 16, 1), (128, 128, 8, 1)]
)
@pytest.mark.parametrize("density", [0.1, 0.5])
def test_the_layers_of_a_wide_resnet(inside, out, size, stride, density, dtype, threads):
    torch.set_num_threads(threads)
    values, index = weight((out, inside, 3, 3), density, dtype, empty_rows=(0, 5, out - 1))
    x = torch.randn(3, inside, size, size).to(dtype)
    check(x, values, index, out, ([3, 3], [stride, stride], [1, 1], [1, 1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("stride", [1, 2])
def test_batch_norm_and_relu_are_applied_while_the_map_is_read(dtype, stride):
    values, index = weight((8, 6, 3, 3), 0.4, dtype)
    x, scale, shift = torch.randn(2, 6, 11, 16).to(dtype), torch.randn(6), torch.randn(6)
    check(x, values, index, 8, ([3, 3], [stride, stride], [1, 1], [1, 1]), scale, shift)


def test_a_map_of_many_bands_and_blocks():
    values, index = weight((70, 60, 3, 3), 0.6)
    x = torch.randn(2, 60, 61, 64)
    check(x, values, index, 70, ([3, 3], [1, 1], [1, 1], [1, 1]))


@pytest.mark.parametrize("density", [0.02, 0.95])
def test_a_line_may_have_more_positions_than_21_bits_count(density):
    values, index = weight((2, 240_000, 3, 3), density)
    check(torch.randn(1, 240_000, 1, 2), values, index, 2, ([3, 3], [1, 1], [1, 1], [1, 1]))


def test_a_convolution_whose_scratch_32_bits_cannot_count_is_refused_before_anything_is_allocated():
    with FakeTensorMode():
        x, index = torch.empty(1, 300_000, 8, 4096), torch.empty(10, dtype=torch.uint8)
        with pytest.raises(ShoestringError, match=r"is too large.*leave this layer dense"):
            sparse_conv2d_forward(x, torch.empty(10), index, 2, 3, 1, 1)


def test_an_empty_batch_gives_an_empty_map_and_no_gradient():
    values, index = weight((5, 4, 3, 3), 0.3)
    check(torch.randn(0, 4, 8, 8), values, index, 5, ([3, 3], [2, 2], [1, 1], [1, 1]))
    x, dy, gradient = torch.randn(0, 4, 8, 8), torch.randn(0, 5, 8, 8), torch.ones_like(values)
    assert not sparse_conv2d_weight_gradient(x, dy, index, 3, 1, 1, out=gradient).any()


def test_a_weight_without_nonzeros_gives_zeros():
    values, index = weight((4, 3, 3, 3), 0)
    check(torch.randn(2, 3, 8, 8), values, index, 4, ([3, 3], [2, 2], [1, 1], [1, 1]))


def test_an_input_that_is_not_contiguous_is_read_in_its_own_order():
    values, index = weight((5, 4, 3, 3), 0.3)
    x = torch.randn(3, 9, 8, 4).permute(0, 3, 1, 2)
    check(x, values, index, 5, ([3, 3], [1, 1], [1, 1], [1, 1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_weight_gradient_can_be_added_to_one_that_exists(dtype):
    values, index = weight((8, 4, 3, 3), 0.3, dtype)
    x, dy = torch.randn(2, 4, 8, 8).to(dtype), torch.randn(2, 8, 8, 8).to(dtype)
    both = sparse_conv2d_weight_gradient(x, dy, index, 3, 1, 1, out=torch.empty_like(values))
    first = sparse_conv2d_weight_gradient(x[:1], dy[:1], index, 3, 1, 1, out=torch.empty_like(values))
    sparse_conv2d_weight_gradient(x[1:], dy[1:], index, 3, 1, 1, out=first, accumulate=True)
    close(first, both.double(), dtype)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_weight_gradient_is_the_same_to_the_bit_on_every_run(threads):
    torch.set_num_threads(threads)
    values, index = weight((32, 16, 3, 3), 0.3)
    x, dy = torch.randn(7, 16, 32, 32), torch.randn(7, 32, 32, 32)
    first = sparse_conv2d_weight_gradient(x, dy, index, 3, 1, 1, out=torch.empty_like(values))
    for _ in range(3):
        again = sparse_conv2d_weight_gradient(x, dy, index, 3, 1, 1, out=torch.empty_like(values))
        assert torch.equal(first, again)


def layer(x, values, index, out, kernel, stride, padding):
    """What a sparse layer calls, with gradients."""
    geometry = (kernel, kernel), (stride, stride), (padding, padding), (1, 1)
    product = SparseConvolution(values.detach(), index, None, x.shape[1], out, geometry)
    return sparse_convolution(x, values, None, product)


def test_autograd_gives_the_gradients_of_the_dense_weight():
    values, index = weight((3, 2, 3, 3), 0.4, torch.float64)
    x = torch.randn(2, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    values.requires_grad_()
    for _ in range(5):
        dense = functional.conv2d(x, reference_sparse.densify(values, index, [3, 2, 3, 3]), None, 2, 1)
        ours = layer(x, values, index, 3, 3, 2, 1)
        dy = torch.randn(ours.shape, dtype=torch.float64)
        expected = torch.autograd.grad(dense, (x, values), dy)
        torch.testing.assert_close((ours, *torch.autograd.grad(ours, (x, values), dy)), (dense, *expected))


def test_backward_drops_the_input_before_it_makes_the_input_gradient():
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "input_gradient" in str(function):
                alive.extend(reference() is not None for reference in made)
            return function(*args, **(kwargs or {}))

    class Copied:
        def __init__(self, tensor):
            self.tensor = tensor

        def take(self):
            tensor = self.tensor.clone()
            made.append(weakref.ref(tensor))
            return tensor

    alive, made = [], []
    values, index = weight((6, 4, 3, 3), 0.4)
    x = torch.randn(2, 4, 8, 8, requires_grad=True)
    with storing(Copied):
        y = layer(x, values.requires_grad_(), index, 6, 3, 1, 1)
    with Watch():
        y.sum().backward()
    assert alive == [False]


def test_backward_adds_to_a_gradient_that_is_there():
    values, index = weight((6, 4, 3, 3), 0.4)
    values.requires_grad_()
    x = torch.randn(2, 4, 8, 8)
    layer(x, values, index, 6, 3, 1, 1).sum().backward()
    expected = values.grad + 1
    values.grad = buffer = torch.ones_like(values)
    layer(x, values, index, 6, 3, 1, 1).sum().backward()
    assert values.grad is buffer
    assert torch.allclose(buffer, expected, atol=1e-5)


@pytest.mark.parametrize("index_bytes", [36, 20], ids=["bitmap", "gaps"])
def test_fp64_can_be_traced_though_it_runs_the_reference(index_bytes):
    with FakeTensorMode():
        x, values = torch.empty(2, 4, 16, 16, dtype=torch.float64), torch.empty(15, dtype=torch.float64)
        index, gradient = torch.empty(index_bytes, dtype=torch.uint8), torch.empty(15, dtype=torch.float64)
        y = sparse_conv2d_forward(x, values, index, 8, 3, 2, 1)
        assert y.shape == (2, 8, 8, 8) and y.dtype == torch.float64
        assert sparse_conv2d_input_gradient(y, values, index, x.shape, 3, 2, 1).shape == x.shape
        assert sparse_conv2d_weight_gradient(x, y, index, 3, 2, 1, out=gradient).shape == (15,)


def test_the_fake_makes_the_shapes_and_the_scratch_of_the_kernel():
    values, index = weight((8, 4, 3, 3), 0.3)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(2, 4, 16, 16)
        y = sparse_conv2d_forward(x, values, index, 8, 3, 2, 1)
        dx = sparse_conv2d_input_gradient(y, values, index, x.shape, 3, 2, 1)
    assert y.shape == (2, 8, 8, 8) and dx.shape == x.shape


@pytest.mark.parametrize("change", [{"out_channels": 2}, {"kernel": 9}, {"stride": 0}, {"padding": -1}])
def test_a_geometry_that_cannot_be_is_refused(change):
    values, index = weight((8, 4, 3, 3), 1)
    arguments = {"out_channels": 8, "kernel": 3, "padding": 1, "stride": 1} | change
    with pytest.raises(ShoestringError):
        sparse_conv2d_forward(torch.randn(2, 4, 6, 6), values, index, **arguments)
