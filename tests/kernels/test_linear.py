"""Linear layers of 16-bit tensors agree with FP64, within the scratch that they were given."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shoestring.errors import ShoestringError
from shoestring.kernels.define import scratch_of
from shoestring.kernels.linear import SCRATCH_BYTES, linear_forward, linear_input_gradient, linear_weight_gradient

STEP = {torch.float64: 1e-14, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SHAPES = [((7,), 5, 3), ((2, 9), 33, 600), ((300,), 64, 17), ((1,), 1, 1)]


def make(tokens, inputs, outputs, dtype=torch.float16):
    generator = torch.Generator().manual_seed(0)
    shapes = ((*tokens, inputs), (outputs, inputs), (outputs,), (*tokens, outputs))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def ours(x, weight, bias, grad_y, **scratch):
    return (
        linear_forward(x, weight, bias, **scratch),
        linear_input_gradient(grad_y, weight, **scratch),
        linear_weight_gradient(grad_y, x, **scratch),
    )


def plain(x, weight, bias, grad_y):
    x, weight, bias, grad_y = (v.double() for v in (x, weight, bias, grad_y))
    flat_y, flat_x = grad_y.reshape(-1, grad_y.shape[-1]), x.reshape(-1, x.shape[-1])
    return x @ weight.t() + bias, grad_y @ weight, flat_y.t() @ flat_x


def assert_close(got, wanted, tolerance):
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape
        assert (a.double() - b.double()).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize("dtype", STEP)
@pytest.mark.parametrize("shape", SHAPES)
def test_all_three_agree_with_fp64(shape, dtype):
    tensors = make(*shape, dtype)
    got = ours(*tensors)
    assert all(v.dtype == dtype for v in got)
    assert_close(got, plain(*tensors), STEP[dtype])


@pytest.mark.parametrize("scratch_bytes", [0, 3_000, 50_000])
def test_the_size_of_the_scratch_changes_no_more_than_the_order_of_sums(scratch_bytes):
    tensors = make((3, 50), 40, 300)
    assert_close(ours(*tensors, scratch_bytes=scratch_bytes), plain(*tensors), STEP[torch.float16])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_weight_gradient_is_added_to_what_is_there(dtype):
    x, weight, _, grad_y = make((70,), 20, 30, dtype)
    there = torch.ones_like(weight)
    assert linear_weight_gradient(grad_y, x, out=there) is there
    assert_close([there], [plain(x, weight, weight[:, 0], grad_y)[2] + 1], STEP[dtype])


def test_a_sum_in_the_middle_of_which_fp16_would_end_is_right():
    x, grad_y = torch.full((4000, 2), 100.0).half(), torch.ones(4000, 3).half()
    x[2000:] = -100
    assert (linear_weight_gradient(grad_y, x, scratch_bytes=4_000) == 0).all()


def test_views_are_read_in_their_own_order():
    x, weight, bias, grad_y = make((40,), 24, 30)
    x, weight = x.t().contiguous().t(), weight.t().contiguous().t()
    assert_close(ours(x, weight, bias, grad_y), plain(x, weight, bias, grad_y), STEP[torch.float16])


def test_nan_and_overflow_stay_visible():
    x, weight, bias, _ = make((5,), 8, 6)
    x[2, 3] = torch.nan
    assert linear_forward(x, weight, bias).isnan().sum() == 6
    assert linear_forward(torch.full((1, 8), 6e4).half(), torch.ones(2, 8).half()).isinf().all()


def test_a_trace_sees_the_scratch_and_it_is_within_its_budget():
    for tokens, inputs, outputs in ((250, 512, 6632), (4000, 512, 1024)):
        with FakeTensorMode():
            x, weight = torch.empty(tokens, inputs).half(), torch.empty(outputs, inputs).half()
            grad_y, gradient = torch.empty(tokens, outputs).half(), torch.empty(outputs, inputs).half()
            for call in (
                lambda x=x, weight=weight: linear_forward(x, weight),
                lambda g=grad_y, weight=weight: linear_input_gradient(g, weight),
                lambda g=grad_y, x=x, gradient=gradient: linear_weight_gradient(g, x, out=gradient),
            ):
                assert 0 < scratch_of(call)[1] <= SCRATCH_BYTES


def test_shapes_that_do_not_fit_are_refused():
    x, weight, _, grad_y = make((5,), 8, 6)
    with pytest.raises(ShoestringError, match="linear_forward: 8 where 7"):
        linear_forward(x, weight[:, :7])
    with pytest.raises(ShoestringError, match="linear_input_gradient"):
        linear_input_gradient(x, weight)
    with pytest.raises(ShoestringError, match="linear_weight_gradient"):
        linear_weight_gradient(grad_y[:3], x)
    with pytest.raises(ShoestringError, match="pass this weight's gradient"):
        linear_weight_gradient(grad_y, x, out=torch.zeros(8, 6))
