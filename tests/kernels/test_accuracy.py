"""Every compiled kernel in FP32 is as exact as PyTorch: its error against FP64 is at most twice PyTorch's in FP32.

The error of a tensor is the root of the mean square of its elements' errors, over sizes at which that is no accident.
PyTorch's own convolutions differ by a factor of two between its layouts, as they sum in another order; ours sum in one
order, and are held against the layout of PyTorch's that errs more.
"""

from random import Random

import pytest
import torch
import torch.nn.functional as F
from fuzz import nonzeros, tensor, windows

from shoestring.kernels.conv import conv_forward, conv_input_gradient, conv_weight_gradient
from shoestring.kernels.dynamic_convolution import (
    dynamic_convolution_forward,
    dynamic_convolution_input_gradient,
    dynamic_convolution_kernel_gradient,
)
from shoestring.kernels.gradients import squared_norm
from shoestring.kernels.moments import new_moment
from shoestring.kernels.norm import batch_norm_apply, batch_norm_backward, batch_norm_fold, batch_norm_statistics
from shoestring.kernels.sparse_conv import (
    sparse_conv2d_forward,
    sparse_conv2d_input_gradient,
    sparse_conv2d_weight_gradient,
)
from shoestring.kernels.sparse_embedding import sparse_embedding_gradient
from shoestring.kernels.sparse_index import decode
from shoestring.kernels.sparse_linear import (
    sparse_linear_forward,
    sparse_linear_input_gradient,
    sparse_linear_weight_gradient,
)
from shoestring.kernels.update import adam_update, sgd_update

LAYOUTS = [torch.contiguous_format, torch.channels_last]


def error(got, exact):
    return (got.double() - exact).square().mean().sqrt().item()


def assert_as_exact(got, plain, exact):
    """Ours, PyTorch's FP32 and PyTorch's FP64, each a tuple of tensors."""
    for ours, torchs, wanted in zip(got, plain, exact, strict=True):
        assert ours.dtype == torch.float32 and wanted.dtype == torch.float64
        worst = max(error(one, wanted) for one in (torchs if isinstance(torchs, tuple) else (torchs,)))
        assert 0 < error(ours, wanted) <= 2 * worst


def differentiate(function, inputs, grad_y, dtype):
    """PyTorch's result and gradients in a precision."""
    inputs = [v.detach().to(dtype).requires_grad_() for v in inputs]
    y = function(*inputs)
    return (y.detach(), *torch.autograd.grad(y, inputs, grad_y.to(dtype)))


def both(function, inputs, grad_y):
    return (differentiate(function, inputs, grad_y, dtype) for dtype in (torch.float32, torch.float64))


def both_layouts(function, x, weight, grad_y):
    """`both`, where each of PyTorch's FP32 results is the pair of those in its two layouts."""
    torchs, exact = both(function, (x.contiguous(), weight), grad_y.contiguous())
    last = [v.contiguous(memory_format=torch.channels_last) for v in (x, weight, grad_y)]
    others, _ = both(function, last[:2], last[2])
    return tuple(zip(torchs, others, strict=True)), exact


def maps(layout, *shapes):
    draw = Random(0)
    return [tensor(draw, *shape).contiguous(memory_format=layout) for shape in shapes]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stride, groups", [(1, 1), (2, 1), (1, 4)])
def test_dense_convolution(layout, stride, groups):
    side = 24 // stride
    x, weight, grad_y = maps(layout, (4, 32, 24, 24), (48, 32 // groups, 3, 3), (4, 48, side, side))
    weight, settings = weight.contiguous(), (stride, 1, 1, groups)
    got = (
        conv_forward(x, weight, None, *settings),
        conv_input_gradient(grad_y, weight, x.shape, *settings),
        conv_weight_gradient(grad_y, x, weight.shape, *settings),
    )
    assert_as_exact(got, *both_layouts(lambda x, w: F.conv2d(x, w, None, *settings), x, weight, grad_y))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dense_convolution_of_a_norm_and_relu_that_are_not_stored(layout):
    x, weight, grad_y = maps(layout, (4, 32, 24, 24), (48, 32, 3, 3), (4, 48, 24, 24))
    weight = weight.contiguous()
    scale, shift = tensor(Random(1), 32), tensor(Random(2), 32)

    def plain(x, w):
        return F.conv2d((x * scale.to(x).view(1, -1, 1, 1) + shift.to(x).view(1, -1, 1, 1)).relu(), w, padding=1)

    options = {"padding": 1, "scale": scale, "shift": shift, "relu": True}
    got = conv_forward(x, weight, **options), conv_weight_gradient(grad_y, x, weight.shape, **options)
    torchs, exact = ((y, grad_w) for y, _, grad_w in both_layouts(plain, x, weight, grad_y))
    assert_as_exact(got, torchs, exact)


@pytest.mark.parametrize("stride, density", [(1, 0.3), (2, 0.3), (1, 0.05)])
def test_sparse_convolution(stride, density):
    draw, side = Random(0), 24 // stride
    weight, values, index = sparse(draw, (48, 32, 3, 3), density)
    x, grad_y = tensor(draw, 4, 32, 24, 24), tensor(draw, 4, 48, side, side)
    got = (
        sparse_conv2d_forward(x, values, index, 48, 3, stride, 1),
        sparse_conv2d_input_gradient(grad_y, values, index, x.shape, 3, stride, 1),
        sparse_conv2d_weight_gradient(x, grad_y, index, 3, stride, 1, out=torch.empty_like(values)),
    )
    results = both(lambda x, w: F.conv2d(x, w, None, stride, 1), (x, weight), grad_y)
    assert_as_exact(got, *(at_nonzeros(result, index) for result in results))


def sparse(draw, shape, density):
    class Fixed(Random):
        def choice(self, _):
            return density

    return nonzeros(Fixed(draw.random()), shape, torch.float32)


def at_nonzeros(result, index):
    y, grad_x, grad_w = result
    return y, grad_x, grad_w.flatten()[decode(index, grad_w.numel()).long()]


@pytest.mark.parametrize("density", [0.3, 0.05])
def test_sparse_linear(density):
    draw = Random(0)
    weight, values, index = sparse(draw, (200, 300), density)
    x, grad_y = tensor(draw, 130, 300), tensor(draw, 130, 200)
    got = (
        sparse_linear_forward(x, values, index, 200),
        sparse_linear_input_gradient(grad_y, values, index, 300),
        sparse_linear_weight_gradient(x, grad_y, index, out=torch.empty_like(values)),
    )
    assert_as_exact(got, *(at_nonzeros(result, index) for result in both(F.linear, (x, weight), grad_y)))


def test_sparse_embedding():
    draw = Random(0)
    weight, values, index = sparse(draw, (40, 64), 0.3)
    ids, grad_y = torch.arange(2000) * 7919 % 40, tensor(draw, 2000, 64)
    got = sparse_embedding_gradient(ids, grad_y, index, 40, 64, out=torch.empty_like(values))
    results = both(lambda w: F.embedding(ids, w), (weight,), grad_y)
    places = decode(index, weight.numel()).long()
    assert_as_exact([got], *([grad_w.flatten()[places]] for _, grad_w in results))


def test_dynamic_convolution():
    draw = Random(0)
    x, grad_y = (tensor(draw, 3, 40, 4, 64) for _ in range(2))
    kernels = tensor(draw, 3, 40, 4, 7)
    got = (
        dynamic_convolution_forward(x, kernels, 3),
        dynamic_convolution_input_gradient(grad_y, kernels, 3),
        dynamic_convolution_kernel_gradient(grad_y, x, 7, 3),
    )
    given = [[v.detach().to(dtype) for v in (x, kernels, grad_y)] for dtype in (torch.float32, torch.float64)]
    assert_as_exact(got, *(windows(*tensors, 3) for tensors in given))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mean", [0.0, 3.0])
@pytest.mark.parametrize("relu", [False, True])
def test_batch_norm(layout, mean, relu):
    x, grad_y = maps(layout, (8, 64, 16, 16), (8, 64, 16, 16))
    x, gamma, beta = x + mean, tensor(Random(1), 64), tensor(Random(2), 64)
    grad_y = torch.where(x.double().sub(mean).abs() < 1e-3, 0, grad_y)

    def plain(x, gamma, beta):
        y = F.batch_norm(x, None, None, gamma, beta, True)
        return y.relu() if relu else y

    torchs, exact = both(plain, (x, gamma, beta), grad_y)
    statistics = batch_norm_statistics(x)
    invstd = (statistics[1] + 1e-5).rsqrt()
    y = batch_norm_apply(x, *batch_norm_fold(statistics[0], invstd, gamma, beta), relu)
    got = batch_norm_backward(grad_y, x, statistics[0], invstd, gamma, beta, relu)
    assert_as_exact((y, *got), torchs, exact)
    wanted = [torch.var_mean(x.to(dtype), (0, 2, 3), correction=0)[::-1] for dtype in (torch.float32, torch.float64)]
    assert_as_exact(statistics, *wanted)


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}])
def test_sgd(settings):
    ours, torchs, exact = stepped(lambda p: torch.optim.SGD(p, lr=0.1, foreach=False, **settings))
    mu = settings.get("momentum", 0.0)
    momentum = new_moment(ours[0], "fp32") if mu else None
    rest = {"nesterov": settings.get("nesterov", False), "weight_decay": settings.get("weight_decay", 0.0)}
    for gradient in ours[1:]:
        sgd_update(ours[0], gradient, momentum, lr=0.1, mu=mu, **rest)
    assert_as_exact([ours[0]], [torchs], [exact])


@pytest.mark.parametrize("decoupled", [False, True])
def test_adam(decoupled):
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    ours, torchs, exact = stepped(lambda p: kind(p, lr=0.1, weight_decay=0.1, foreach=False))
    moments = new_moment(ours[0], "fp32"), new_moment(ours[0], "fp32", positive=True)
    for step, gradient in enumerate(ours[1:], 1):
        adam_update(ours[0], gradient, *moments, step=step, lr=0.1, weight_decay=0.1, decoupled=decoupled)
    assert_as_exact([ours[0]], [torchs], [exact])


def stepped(optimizer):
    """A weight and five gradients, and the weight after PyTorch's five updates in FP32 and in FP64."""
    draw = Random(0)
    given = [tensor(draw, 5000) for _ in range(6)]
    results = []
    for dtype in (torch.float32, torch.float64):
        weight = torch.nn.Parameter(given[0].to(dtype))
        taken = optimizer([weight])
        for gradient in given[1:]:
            weight.grad = gradient.to(dtype)
            taken.step()
        results.append(weight.detach())
    return given, *results


def test_the_norm_of_a_gradient():
    x = tensor(Random(0), 300_001)
    exact, plain = x.double().square().sum().item(), x.square().sum().item()
    assert abs(squared_norm(x) - exact) <= 2 * abs(plain - exact)
