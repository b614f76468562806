"""Compiled batch norm agrees with PyTorch's, whatever the layout, storage and number of threads."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from shoestring.errors import ShoestringError
from shoestring.kernels.norm import (
    batch_norm_apply,
    batch_norm_backward,
    batch_norm_fold,
    batch_norm_learn,
    batch_norm_statistics,
)
from shoestring.kernels.references import norm as reference_norm

SHAPES = [(3, 5, 7, 9), (2, 8, 4, 4), (6, 13, 1, 1), (9, 16), (4, 3, 33), (1, 20, 16, 16), (2, 3, 4, 5, 6)]
LAYOUTS = [torch.contiguous_format, torch.channels_last]
EPS = 1e-5


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def make_map(shape, layout=torch.contiguous_format, dtype=torch.float32, seed=0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2 + 1
    return x.to(dtype).contiguous(memory_format=layout if len(shape) == 4 else torch.contiguous_format)


def make_parameters(channels):
    generator = torch.Generator().manual_seed(7)
    return torch.rand(channels, generator=generator) + 0.5, torch.randn(channels, generator=generator)


def plain(x, gamma, beta, relu, grad_y):
    """PyTorch's own batch norm and ReLU in FP64: y and the gradients of x, gamma, beta."""
    x, gamma, beta = (v.detach().double().requires_grad_() for v in (x, gamma, beta))
    y = F.batch_norm(x, None, None, gamma, beta, True, eps=EPS)
    y = y.relu() if relu else y
    return (y, *torch.autograd.grad(y, (x, gamma, beta), grad_y.double()))


def ours(x, gamma, beta, relu, grad_y, **options):
    mean, variance = batch_norm_statistics(x)
    invstd = (variance + EPS).rsqrt()
    y = batch_norm_apply(x, *batch_norm_fold(mean, invstd, gamma, beta), relu)
    return (y, *batch_norm_backward(grad_y, x, mean, invstd, gamma, beta, relu, **options))


def assert_close(got, wanted, tolerance):
    for a, b in zip(got, wanted, strict=True):
        scale = b.abs().max().clamp(min=1e-3)
        assert ((a.double() - b.double()).abs().max() / scale) < tolerance


@pytest.mark.parametrize("momentum", [0.1, 0.5, 0.9, 1.0, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_running_statistics_are_learned_as_in_pytorch(dtype, momentum):
    x, running = make_map((3, 13, 6, 7)), [torch.linspace(-1, 1, 13).to(dtype), torch.linspace(1, 2, 13).to(dtype)]
    wanted = [each.double() for each in running]
    F.batch_norm(x.double(), *wanted, training=True, momentum=momentum, eps=EPS)
    mean, variance = batch_norm_statistics(x)
    invstd = batch_norm_learn(mean, variance, *running, momentum, EPS, 3 * 6 * 7)
    assert_close([invstd], [(variance.double() + EPS).rsqrt()], 1e-6)
    assert_close(running, wanted, 4 * torch.finfo(dtype).eps + 1e-6)
    assert all(each.dtype == dtype for each in running)


def test_running_statistics_may_be_missing_or_anywhere():
    mean, variance = batch_norm_statistics(make_map((3, 13, 6, 7)))
    spread, dense = torch.ones(2, 26)[:, ::2], torch.ones(2, 13)
    results = [batch_norm_learn(mean, variance, *running, 0.1, EPS, 126) for running in ((None, None), spread, dense)]
    assert torch.equal(results[0], results[2]) and torch.allclose(results[1], results[2])
    assert torch.allclose(spread, dense) and not torch.equal(dense, torch.ones(2, 13))


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_and_backward_agree_with_pytorch(shape, layout, relu, threads):
    x, grad_y = make_map(shape, layout), make_map(shape, layout, seed=1)
    gamma, beta = make_parameters(shape[1])
    got = ours(x, gamma, beta, relu, grad_y)
    assert got[0].stride() == x.stride() and got[1].stride() == x.stride()
    assert_close(got, plain(x, gamma, beta, relu, grad_y), 1e-5)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_16_bit_maps_lose_only_the_rounding_of_their_storage(dtype, tolerance, layout, threads):
    x, grad_y = make_map((5, 13, 6, 7), layout, dtype), make_map((5, 13, 6, 7), layout, dtype, seed=1)
    gamma, beta = make_parameters(13)
    got, wanted = ours(x, gamma, beta, True, grad_y), plain(x, gamma, beta, True, grad_y)
    assert got[0].dtype == dtype and got[2].dtype == torch.float32
    assert_close(got[:2], wanted[:2], tolerance)
    assert_close(got[2:], wanted[2:], 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_the_compiled_kernels_equal_their_references(dtype):
    x, grad_y, add = (make_map((4, 6, 5, 5), dtype=dtype, seed=s) for s in range(3))
    gamma, beta = make_parameters(6)
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}.get(dtype, 1e-5)
    mean, variance = batch_norm_statistics(x)
    assert_close((mean, variance), reference_norm.statistics(x), 1e-5)
    coefficients = batch_norm_fold(mean, variance, gamma, beta)
    assert_close(coefficients, reference_norm.fold(mean, variance, gamma, beta), 1e-6)
    y, grad_x = torch.empty_like(x), torch.empty_like(x)
    reference_norm.apply(y, x, *coefficients, True)
    assert_close([batch_norm_apply(x, *coefficients, True)], [y], tolerance)
    rest = reference_norm.backward(grad_x, grad_y, x, mean, variance, gamma, beta, True, add)
    got = batch_norm_backward(grad_y, x, mean, variance, gamma, beta, True, add)
    assert_close(got[:1], [grad_x], tolerance)
    assert_close(got[1:], rest, 1e-5)


def test_fp64_maps_keep_fp64():
    x, grad_y = make_map((3, 4, 5, 5)).double(), make_map((3, 4, 5, 5), seed=1).double()
    gamma, beta = (v.double() for v in make_parameters(4))
    assert_close(ours(x, gamma, beta, True, grad_y), plain(x, gamma, beta, True, grad_y), 1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_can_be_written_over_the_output_gradient(layout):
    x, grad_y, add = (make_map((3, 5, 6, 6), layout, seed=s) for s in range(3))
    gamma, beta = make_parameters(5)
    separate = ours(x, gamma, beta, True, grad_y, add=add)
    bare = ours(x, gamma, beta, True, grad_y)
    assert_close([separate[1]], [bare[1] + add], 1e-6)
    mine = grad_y.clone(memory_format=torch.preserve_format)
    in_place = ours(x, gamma, beta, True, mine, add=add, out=mine)
    assert in_place[1] is mine
    assert all(torch.equal(a, b) for a, b in zip(separate, in_place, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(5, 13, 6, 7), (1, 13, 6, 7), (3, 13, 40)])
def test_the_gradient_of_some_channels_can_be_written_over_them(shape, dtype, threads):
    """As if these channels were a map of their own; the others are not touched."""
    x, few = make_map(shape, torch.contiguous_format, dtype), slice(4, 9)
    grad_y = make_map((shape[0], 5, *shape[2:]), torch.contiguous_format, dtype, seed=1)
    gamma, beta = make_parameters(5)
    mean, variance = batch_norm_statistics(x[:, few].contiguous())
    call = mean, (variance + EPS).rsqrt(), gamma.to(mean), beta.to(mean), True
    wanted = batch_norm_backward(grad_y, x[:, few].contiguous(), *call)
    whole = x.clone()
    part = whole[:, few]
    got = batch_norm_backward(grad_y, part, *call, out=part)
    assert all(map(torch.equal, got, wanted))
    assert torch.equal(whole[:, :4], x[:, :4]) and torch.equal(whole[:, 9:], x[:, 9:])


def test_other_gaps_are_not_written_into():
    x, grad_y = torch.randn(2, 3, 4, 8)[..., ::2], torch.randn(2, 3, 4, 4)
    with pytest.raises(ShoestringError, match="with gaps"):
        batch_norm_backward(grad_y, x, *torch.ones(2, 3), out=x)


def test_a_map_is_made_in_place():
    x = make_map((3, 5, 6, 6))
    scale, shift = make_parameters(5)
    wanted = batch_norm_apply(x, scale, shift, True)
    assert batch_norm_apply(x, scale, shift, True, out=x) is x
    assert torch.equal(x, wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_do_not_depend_on_the_number_of_threads(layout):
    x, grad_y = make_map((7, 24, 17, 17), layout), make_map((7, 24, 17, 17), layout, seed=1)
    before, results = torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        results.append(ours(x, *make_parameters(24), True, grad_y))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_statistics_of_a_map_far_from_zero_keep_their_digits():
    x = make_map((50, 4, 8, 8)) + torch.tensor([0.0, 1e3, -3e4, 1e5]).view(1, 4, 1, 1)
    x[0] += 0.5  # the first sample is not like the others
    variance, mean = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    got_mean, got_variance = batch_norm_statistics(x)
    assert torch.allclose(got_mean.double(), mean, rtol=1e-6)
    assert torch.allclose(got_variance.double(), variance, rtol=1e-5)


@pytest.mark.parametrize("outlier", [0.0, 1e4, -1e6])
@pytest.mark.parametrize("where", ["the first pixels", "the first sample", "the last pixels", "here and there"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_outliers_anywhere_cost_the_other_values_no_digits(layout, where, outlier):
    x = make_map((20, 3, 16, 16)) * torch.tensor([0.1, 1.0, 10.0]).view(1, 3, 1, 1)
    x += torch.tensor([100.0, 1e3, -1e4]).view(1, 3, 1, 1)
    place = {
        "the first pixels": (0, slice(None), slice(1)),
        "the first sample": (0,),
        "the last pixels": (-1, slice(None), -1),
        "here and there": (slice(None, None, 7), slice(None), 3, slice(None, None, 5)),
    }[where]
    x[place] = outlier
    x = x.contiguous(memory_format=layout)
    variance, mean = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    got_mean, got_variance = batch_norm_statistics(x)
    assert torch.allclose(got_mean.double(), mean, rtol=2e-7)
    assert torch.allclose(got_variance.double(), variance, rtol=2e-6)


@pytest.mark.parametrize("shape", [(1, 4), (1, 4, 1), (1, 4, 1, 1), (1, 4, 1, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_one_value_per_channel_has_no_variance_and_is_refused_as_pytorch_refuses_it(shape, dtype):
    x = torch.randn(shape).to(dtype)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        F.batch_norm(x, None, None, training=True)
    with pytest.raises(ValueError, match="more than 1 value per channel") as told:
        batch_norm_statistics(x)
    assert isinstance(told.value, ShoestringError)


def test_maps_with_gaps_are_read_in_their_own_order():
    wide, grads = make_map((3, 5, 6, 12)), make_map((3, 5, 12, 6), seed=1)
    x, grad_y = wide[..., ::2], grads.transpose(2, 3)[..., ::2]
    gamma, beta = make_parameters(5)
    assert_close(ours(x, gamma, beta, True, grad_y), plain(x, gamma, beta, True, grad_y), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("order", [(0, 2, 1), (2, 1, 0), (1, 0, 2)], ids=str)
def test_maps_whose_dimensions_were_permuted_are_normalised(order, dtype):
    """Tokens (batch, length, channels) are transposed for BatchNorm1d: such a map lies dense in no layout of ours."""
    x = make_map((5, 6, 7), dtype=dtype).permute(order)
    gamma, beta = (parameter.to(dtype) for parameter in make_parameters(x.shape[1]))
    grad_y = torch.randn(x.shape, dtype=dtype)
    assert_close(ours(x, gamma, beta, True, grad_y), plain(x, gamma, beta, True, grad_y), 2e-6)


def test_layouts_of_gradient_and_map_may_differ():
    x, grad_y = make_map((3, 5, 6, 6), torch.channels_last), make_map((3, 5, 6, 6), seed=1)
    gamma, beta = make_parameters(5)
    assert_close(ours(x, gamma, beta, True, grad_y), plain(x, gamma, beta, True, grad_y), 1e-5)
    in_place = grad_y.clone()
    got = ours(x, gamma, beta, True, in_place, out=in_place)
    assert_close(got, plain(x, gamma, beta, True, grad_y), 1e-5)


def test_norms_without_parameters_scale_by_the_deviation_alone():
    x, grad_y = make_map((3, 5, 6, 6)), make_map((3, 5, 6, 6), seed=1)
    got = ours(x, None, None, False, grad_y)
    assert_close(got, plain(x, torch.ones(5), torch.zeros(5), False, grad_y), 1e-5)


def test_nan_and_overflow_stay_visible():
    x = make_map((2, 3, 5, 5))
    x[0, 1, 2, 2] = torch.nan
    mean, variance = batch_norm_statistics(x)
    assert mean.isnan().tolist() == variance.isnan().tolist() == [False, True, False]
    y = batch_norm_apply(x, torch.ones(3), torch.zeros(3), relu=True)
    assert y.isnan().sum() == 1 and y[0, 1, 2, 2].isnan()
    half = batch_norm_apply(torch.full((1, 1, 3, 3), 6e4).half(), torch.full((1,), 2.0), torch.zeros(1))
    assert half.isinf().all()


def test_the_fake_allocates_what_the_kernel_returns():
    with FakeTensorMode():
        x = torch.empty(4, 6, 5, 5, dtype=torch.float16).contiguous(memory_format=torch.channels_last)
        got = ours(x, torch.empty(6), torch.empty(6), True, x)
    assert [v.shape for v in got] == [x.shape, x.shape, (6,), (6,)]
    assert got[0].dtype == torch.float16 and got[0].stride() == x.stride() and got[2].dtype == torch.float32


def test_maps_that_do_not_fit_are_refused():
    x, v = torch.randn(2, 3, 4, 4), torch.ones(3)
    with pytest.raises(ShoestringError, match="needs values"):
        batch_norm_statistics(torch.empty(0, 3, 4, 4))
    with pytest.raises(ShoestringError, match="one shape and dtype"):
        batch_norm_backward(x.half(), x, v, v)
    with pytest.raises(ShoestringError, match="one entry per channel"):
        batch_norm_apply(x, torch.ones(4), v)
    with pytest.raises(ShoestringError, match="with gaps"):
        batch_norm_apply(x, v, v, out=torch.empty(2, 3, 4, 8)[..., ::2])
