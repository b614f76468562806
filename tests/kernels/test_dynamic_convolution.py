"""Dynamic convolution agrees with the band matrix that the model multiplies by, in any storage."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shoestring.errors import ShoestringError
from shoestring.kernels.dynamic_convolution import (
    dynamic_convolution_forward,
    dynamic_convolution_input_gradient,
    dynamic_convolution_kernel_gradient,
)
from shoestring.kernels.references import dynamic_convolution as reference_dynamic
from shoestring.models.dynamicconv import by_head, dynamic_convolution

STEP = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# batch, length, heads, channels, size, left
SHAPES = [(2, 9, 3, 8, 3, 1), (1, 40, 2, 70, 7, 6), (3, 5, 4, 5, 31, 30), (2, 1, 1, 1, 3, 1), (1, 12, 2, 128, 4, 0)]


def make(shape, dtype=torch.float32):
    batch, length, heads, channels, size, _ = shape
    generator = torch.Generator().manual_seed(0)
    ends = (channels, size, channels)
    return [torch.randn(batch, length, heads, end, generator=generator).to(dtype) for end in ends]


def ours(x, kernels, grad_y, left):
    return (
        dynamic_convolution_forward(x, kernels, left),
        dynamic_convolution_input_gradient(grad_y, kernels, left),
        dynamic_convolution_kernel_gradient(grad_y, x, kernels.shape[3], left),
    )


def plain(x, kernels, grad_y, left):
    """The model's band matrix and autograd, in FP64."""
    x, kernels = (v.detach().double().requires_grad_() for v in (x, kernels))
    out = dynamic_convolution(by_head(x), by_head(kernels), left)
    out = out.unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)
    return (out, *torch.autograd.grad(out, (x, kernels), grad_y.double()))


def assert_close(got, wanted, tolerance):
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape
        assert (a.double() - b.double()).abs().max() <= tolerance * b.double().abs().max()


@pytest.mark.parametrize("dtype", STEP)
@pytest.mark.parametrize("shape", SHAPES)
def test_all_three_agree_with_the_band_matrix(shape, dtype):
    tensors = make(shape, dtype)
    got = ours(*tensors, shape[-1])
    assert all(v.dtype == dtype for v in got)
    assert_close(got, plain(*tensors, shape[-1]), STEP[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_compiled_kernels_equal_their_references(shape, dtype):
    x, kernels, grad_y = make(shape, dtype)
    left, size = shape[-1], shape[-2]
    twins = (
        reference_dynamic.forward(x, kernels, left),
        reference_dynamic.input_gradient(grad_y, kernels, left),
        reference_dynamic.kernel_gradient(grad_y, x, size, left),
    )
    assert_close(ours(x, kernels, grad_y, left), twins, STEP[dtype])


def test_results_do_not_depend_on_the_number_of_threads():
    tensors, before, results = make((4, 60, 4, 64, 15, 7)), torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        results.append(ours(*tensors, 7))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_views_are_read_in_their_own_order():
    x, kernels, grad_y = (v.transpose(1, 2).contiguous().transpose(1, 2) for v in make(SHAPES[1]))
    assert not x.is_contiguous()
    assert_close(ours(x, kernels, grad_y, 6), plain(x, kernels, grad_y, 6), STEP[torch.float32])


def test_nan_reaches_those_that_read_it_and_no_other():
    x, kernels, _ = make((1, 20, 1, 8, 3, 1))
    x[0, 10] = torch.nan
    out = dynamic_convolution_forward(x, kernels, 1)
    assert out.isnan().any(3).flatten().nonzero().flatten().tolist() == [9, 10, 11]
    huge = torch.full((1, 4, 1, 8), 6e4).half()
    assert dynamic_convolution_forward(huge, torch.ones(1, 4, 1, 3).half(), 1).isinf().all()


def test_the_fake_gives_shapes_and_dtypes():
    with FakeTensorMode():
        x, kernels = torch.empty(2, 9, 3, 8).half(), torch.empty(2, 9, 3, 5).half()
        got = ours(x, kernels, x, 2)
    assert [tuple(v.shape) for v in got] == [(2, 9, 3, 8), (2, 9, 3, 8), (2, 9, 3, 5)]
    assert all(v.dtype == torch.float16 for v in got)


def test_what_does_not_fit_is_refused():
    x, kernels, grad_y = make(SHAPES[0])
    with pytest.raises(ShoestringError, match="one dtype"):
        dynamic_convolution_forward(x, kernels.half(), 1)
    with pytest.raises(ShoestringError, match="batch, length, heads"):
        dynamic_convolution_forward(x[:, :4], kernels, 1)
    with pytest.raises(ShoestringError, match="use 0 to 2"):
        dynamic_convolution_kernel_gradient(grad_y, x, 3, 3)
