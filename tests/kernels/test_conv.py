"""Dense convolutions with bounded scratch agree with PyTorch's in any geometry, layout and storage."""

import pytest
import torch
import torch.nn.functional as F
from fuzz import fenced
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from shoestring.errors import ShoestringError
from shoestring.kernels.conv import (
    PACKED_BYTES,
    SCRATCH_BYTES,
    THREAD_BYTES,
    conv_forward,
    conv_input_gradient,
    conv_weight_gradient,
)
from shoestring.kernels.core import core, threads
from shoestring.kernels.define import scratch_of
from shoestring.kernels.references import conv as reference_conv

# batch, in, out, (height, width), kernel, stride, padding, dilation, groups
GEOMETRIES = [
    (2, 32, 32, (8, 8), 3, 1, 1, 1, 1),
    (3, 3, 16, (9, 11), 3, 1, 1, 1, 1),
    (2, 16, 40, (11, 7), 3, 2, 1, 1, 1),
    (2, 8, 12, (10, 10), 5, 2, 2, 1, 2),
    (1, 6, 6, (12, 9), 3, 1, 2, 2, 1),
    (2, 5, 7, (7, 7), 1, 2, 0, 1, 1),
    (2, 6, 12, (13, 13), 3, 3, 0, 2, 3),
    (1, 4, 4, (6, 5), (1, 3), (2, 1), (0, 2), (1, 1), 4),
    (2, 3, 2, (1, 1), 3, 4, 1, 1, 1),
]
DEPTHWISE = [
    (2, 40, 40, (11, 9), 7, 1, 3, 1, 40),
    (2, 69, 69, (9, 12), 3, 2, 1, 1, 69),
    (1, 5, 5, (12, 10), (3, 5), (2, 1), (0, 2), (2, 1), 5),
    (3, 32, 32, (6, 6), 4, 3, 2, 1, 32),
]  # more channels than a vector has, and fewer; a part of one at the end
GEOMETRIES += DEPTHWISE
LAYOUTS = [torch.contiguous_format, torch.channels_last]


def make(geometry, layout=torch.contiguous_format, dtype=torch.float32, seed=0):
    """x, weight, bias, the gradient of y, and the settings of a geometry."""
    batch, inside, outside, size, kernel, stride, padding, dilation, groups = geometry
    kernel = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, inside, *size, generator=generator)
    weight = torch.randn(outside, inside // groups, *kernel, generator=generator)
    bias = torch.randn(outside, generator=generator)
    options = (stride, padding, dilation, groups)
    grad_y = torch.randn(F.conv2d(x, weight, None, *options).shape, generator=generator)
    maps = (v.to(dtype).contiguous(memory_format=layout) for v in (x, grad_y))
    return (*maps, weight.to(dtype), bias, options)


def plain(x, weight, bias, grad_y, options):
    """PyTorch's convolution in FP64: y and the gradients of x and weight."""
    x, weight = (v.detach().double().requires_grad_() for v in (x, weight))
    y = F.conv2d(x, weight, bias.double(), *options)
    return (y, *torch.autograd.grad(y, (x, weight), grad_y.double()))


def ours(x, weight, bias, grad_y, options, **scratch):
    return (
        conv_forward(x, weight, bias, *options, **scratch),
        conv_input_gradient(grad_y, weight, x.shape, *options, **scratch),
        conv_weight_gradient(grad_y, x, weight.shape, *options, **scratch),
    )


def assert_close(got, wanted, tolerance, most=None):
    """`most`: the sums of the terms' magnitudes, where terms may cancel; else the largest number stands for them."""
    for a, b, size in zip(got, wanted, most or wanted, strict=True):
        assert a.shape == b.shape
        assert (a.double() - b.double()).abs().max() <= tolerance * size.double().abs().max().clamp(min=1e-3)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def some_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_all_three_agree_with_pytorch(geometry, layout, some_threads):
    x, grad_y, weight, bias, options = make(geometry, layout)
    got = ours(x, weight, bias, grad_y, options)
    assert_close(got, plain(x, weight, bias, grad_y, options), 2e-6)
    if min(x.shape[1:] + grad_y.shape[1:]) > 1:
        assert got[0].is_contiguous(memory_format=layout) and got[1].is_contiguous(memory_format=layout)


@pytest.mark.parametrize("scratch_bytes", [0, 20_000, 10_000_000])
@pytest.mark.parametrize("geometry", GEOMETRIES[:5] + DEPTHWISE[:2])
def test_the_size_of_the_scratch_does_not_change_the_result(geometry, scratch_bytes):
    x, grad_y, weight, bias, options = make(geometry)
    wanted = ours(x, weight, bias, grad_y, options)
    got = ours(x, weight, bias, grad_y, options, scratch_bytes=scratch_bytes)
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])
    assert_close(got[2:], wanted[2:], 1e-6)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("geometry", GEOMETRIES[:4] + DEPTHWISE[:2])
def test_16_bit_convolutions_lose_only_the_rounding_of_their_result(geometry, layout, dtype, tolerance):
    x, grad_y, weight, bias, options = make(geometry, layout, dtype)
    got = ours(x, weight, bias, grad_y, options)
    assert all(v.dtype == dtype for v in got)
    assert_close(got, plain(x, weight, bias, grad_y, options), tolerance)


def test_weights_may_be_stored_wider_than_the_maps():
    x, grad_y, weight, bias, options = make(GEOMETRIES[0], dtype=torch.float16)
    weight = weight.float()
    assert_close(ours(x, weight, bias, grad_y, options), plain(x, weight, bias, grad_y, options), 1e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_batch_norm_and_relu_may_be_passed_on_the_way_in(layout, dtype):
    x, grad_y, weight, bias, options = make(GEOMETRIES[2], layout, dtype)
    scale, shift = torch.rand(16) + 0.5, torch.randn(16)
    prologue = {"scale": scale, "shift": shift, "relu": True}
    prepared = reference_conv.prepare(x, scale, shift, True)
    y, _, grad_weight = plain(prepared, weight, bias, grad_y, options)
    got = conv_forward(x, weight, bias, *options, **prologue)
    got_weight = conv_weight_gradient(grad_y, x, weight.shape, *options, **prologue)
    assert_close((got, got_weight), (y, grad_weight), 2e-6 if dtype == torch.float32 else 1e-3)


def test_the_weight_gradient_is_added_to_what_is_there():
    x, grad_y, weight, _, options = make(GEOMETRIES[2])
    gradient = conv_weight_gradient(grad_y, x, weight.shape, *options)
    there = torch.ones_like(weight)
    assert conv_weight_gradient(grad_y, x, weight.shape, *options, out=there) is there
    assert_close([there], [gradient + 1], 1e-6)
    half = torch.zeros_like(weight, dtype=torch.float16)
    conv_weight_gradient(grad_y, x, weight.shape, *options, out=half)
    assert_close([half], [gradient], 1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_the_compiled_kernels_equal_their_references(dtype):
    x, grad_y, weight, bias, options = make(GEOMETRIES[2], dtype=dtype)
    pairs = ([2, 2], [1, 1], [1, 1], 1)
    twins = torch.empty_like(grad_y), torch.empty_like(x), torch.empty_like(weight)
    reference_conv.forward(twins[0], x, weight, bias, *pairs, None, None, False, 0)
    reference_conv.input_gradient(twins[1], grad_y, weight, *pairs, 0)
    reference_conv.weight_gradient(twins[2], grad_y, x, *pairs, None, None, False, False, 0)
    assert_close(ours(x, weight, bias, grad_y, options), twins, 1e-3 if dtype == torch.float16 else 2e-6)


@pytest.mark.parametrize(
    "geometry",
    [(5, 20, 36, (9, 9), 3, 1, 1, 1, 1), (3, 128, 96, (5, 7), 3, 2, 1, 1, 1), (1, 8, 8, (9, 9), 3, 1, 1, 1, 1)],
    ids=["room for two sums", "room for one", "one sample"],
)
def test_results_do_not_depend_on_the_number_of_threads(geometry):
    x, grad_y, weight, bias, options = make(geometry)
    before, results = torch.get_num_threads(), []
    for count in (1, 2, 3, 4):
        torch.set_num_threads(count)
        results.append(ours(x, weight, bias, grad_y, options))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for others in results[1:] for a, b in zip(results[0], others, strict=True))


def test_maps_with_gaps_and_mixed_layouts_are_read_in_their_own_order():
    x, grad_y, weight, bias, options = make((2, 8, 8, (6, 12), 3, 1, 1, 1, 1))
    x, grad_y = x[..., ::2], grad_y[..., ::2].contiguous(memory_format=torch.channels_last)
    weight = weight.contiguous(memory_format=torch.channels_last)
    assert_close(ours(x, weight, bias, grad_y, options), plain(x, weight, bias, grad_y, options), 2e-6)


def test_nan_and_overflow_stay_visible():
    x, _, weight, _, _ = make((1, 4, 4, (5, 5), 3, 1, 1, 1, 1))
    x[0, 1, 2, 2] = torch.nan
    got = conv_forward(x, weight, padding=1, relu=True)
    assert got[0, :, 1:4, 1:4].isnan().all() and got.isnan().sum() == 36
    huge = conv_forward(torch.full((1, 4, 3, 3), 6e4).half(), torch.ones(1, 4, 3, 3).half())
    assert huge.isinf().all()


small, size = st.integers(1, 3), st.tuples(st.integers(4, 12), st.integers(4, 12))
kernel = st.tuples(small, small)


@settings(max_examples=30, deadline=None)
@given(st.tuples(small, small, small, size, kernel, small, st.integers(0, 2), st.just(1), small))
def test_any_small_geometry_agrees_with_pytorch(geometry):
    batch, inside, outside, *rest, groups = geometry
    x, grad_y, weight, bias, options = make((batch, inside * groups, outside * groups, *rest, groups))
    tensors = x, weight, bias, grad_y
    most = plain(*(t.abs() for t in tensors), options)
    assert_close(ours(*tensors, options), plain(*tensors, options), 3e-6, most)


@pytest.mark.skipif(core is None, reason="the reference makes no scratch of ours")
def test_scratch_keeps_to_its_budget_at_every_layer_of_wrn_28_2():
    for inside, outside, size, stride in [(3, 16, 32, 1), (32, 32, 32, 1), (32, 64, 32, 2), (128, 128, 8, 1)]:
        half = size // stride
        sizes = [10, inside, size, size, outside, half, half, 3, 3, stride, stride, 1, 1, 1, 1, 1]
        assert 4 * core.conv_weight_plan(sizes, SCRATCH_BYTES, threads())[-1] <= SCRATCH_BYTES
        with FakeTensorMode():
            x, weight = torch.empty(10, inside, size, size), torch.empty(outside, inside, 3, 3)
            y, forward = scratch_of(lambda x=x, w=weight, s=stride: conv_forward(x, w, None, s, 1))
            _, back = scratch_of(lambda x=x, y=y, w=weight, s=stride: conv_input_gradient(y, w, x.shape, s, 1))
        bands = threads() * THREAD_BYTES + 1024  # what rounding up adds
        assert 0 < forward <= max(PACKED_BYTES, 2 * y.nbytes) + bands
        assert 0 < back <= max(PACKED_BYTES, 2 * x.nbytes) + bands
        assert max(forward, back) <= SCRATCH_BYTES


def test_the_fake_gives_the_shape_dtype_and_layout_of_the_result():
    x, grad_y, weight, bias, options = make(GEOMETRIES[2], torch.channels_last, torch.float16)
    real = ours(x, weight, bias, grad_y, options)
    with FakeTensorMode() as mode:
        fake = ours(*(mode.from_tensor(v) for v in (x, weight, bias, grad_y)), options)
    for a, b in zip(fake, real, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


# (height, width), kernel, stride, padding: the columns, the rows, or both of every output lie in the padding
IN_THE_PADDING = [
    ((8, 1), 1, (1, 5), (0, 2)),
    ((1, 8), 1, (5, 1), (2, 0)),
    ((2, 3), (2, 2), (11, 12), (4, 4)),
    ((1, 1), (1, 3), (19, 19), (6, 6)),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size, kernel, stride, padding", IN_THE_PADDING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_outputs_that_read_the_padding_alone_are_the_bias_and_nothing_else_is_written(
    size, kernel, stride, padding, layout, dtype, some_threads
):
    x, grad_y, weight, bias, options = make((2, 3, 8, size, kernel, stride, padding, 1, 1), layout, dtype)
    with fenced():
        y, grad_x, grad_w = ours(x, weight, bias, grad_y, options)
    assert torch.equal(y, bias.to(dtype).view(1, -1, 1, 1).expand(y.shape))
    assert not grad_x.any() and not grad_w.any()


def test_an_empty_batch_gives_an_empty_map_and_no_gradient():
    weight, x, grad_y = torch.randn(6, 4, 3, 3), torch.empty(0, 4, 9, 7), torch.empty(0, 6, 9, 7)
    assert conv_forward(x, weight, padding=1).shape == grad_y.shape
    assert conv_input_gradient(grad_y, weight, x.shape, padding=1).shape == x.shape
    assert torch.equal(conv_weight_gradient(grad_y, x, weight.shape, padding=1), torch.zeros_like(weight))
    before = torch.randn(6, 4, 3, 3)
    assert torch.equal(conv_weight_gradient(grad_y, x, weight.shape, padding=1, out=before.clone()), before)


@pytest.mark.parametrize("setting", [{"stride": 0}, {"padding": -1}, {"dilation": (1, 0)}, {"groups": 0}])
def test_settings_that_no_convolution_has_are_refused(setting):
    with pytest.raises(ShoestringError, match=r"not two integers|groups"):
        conv_forward(torch.randn(1, 4, 8, 8), torch.randn(4, 4, 3, 3), **setting)


def test_what_cannot_be_convolved_is_refused():
    x, weight = torch.randn(2, 4, 5, 5), torch.randn(6, 4, 3, 3)
    with pytest.raises(ShoestringError, match="4 dimensions"):
        conv_forward(x[0], weight)
    with pytest.raises(ShoestringError, match="check weight and groups"):
        conv_forward(x, weight, groups=2)
    with pytest.raises(ShoestringError, match="no output"):
        conv_forward(x, torch.randn(6, 4, 7, 7))
    with pytest.raises(ShoestringError, match="bias"):
        conv_forward(x, weight, torch.zeros(5))
    with pytest.raises(ShoestringError, match="grad_y"):
        conv_input_gradient(torch.randn(2, 6, 5, 5), weight, x.shape)
    with pytest.raises(ShoestringError, match="float16"):
        conv_weight_gradient(torch.randn(2, 6, 3, 3).half(), x, weight.shape)
