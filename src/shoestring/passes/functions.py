"""Autograd functions that save less than PyTorch's own: convolution, linear, batch norm, ReLU, dropout.

Each stores its input through `saved_tensors.store`, before it computes, and takes it back once. Convolution and linear
make the weight's gradient first, free the input, and only then make the input's gradient. Batch norm saves its input
and two numbers per channel: its output and the ReLU's are never saved; the mask is recomputed from x.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import ShoestringError
from ..kernels.bitmask import pack_bits, positive_bits, unpack_bits, where_bits
from ..kernels.calls import in_memory_order, layout
from ..kernels.norm import batch_norm_apply, batch_norm_backward, batch_norm_fold
from ..kernels.windows import Window, window_indices, window_places
from .owned import is_owned, told_if_owned
from .saved_tensors import SECOND_BACKWARD, OneUse, Stored, StoredInput, is_lossy, samples_at_a_time, store


class Statistics(NamedTuple):
    """Mean and inverse standard deviation per channel of a batch; `shared` if only some of its samples are at hand."""

    mean: Tensor
    invstd: Tensor
    shared: "Shared | None" = None


class Shared(Protocol):
    """A batch norm of whose batch only some samples are at hand (sweeps.py)."""

    @property
    def is_last(self) -> bool:
        """Whether the weights' gradients are wanted already."""
        ...

    def backward(self, grad: Tensor, x: Tensor, gamma: Any, beta: Any, relu: bool, out: Tensor | None) -> tuple: ...


class Product(Protocol):
    """A layer that is linear in its input and its weight, dense or sparse. With a `prologue`, a scale and a shift per
    channel, the layer reads relu(x scale + shift) in place of x, and that feature map is never stored."""

    def forward(self, x: Tensor, prologue: tuple[Tensor, Tensor] | None) -> Tensor: ...

    def weight_gradient(self, grad: Tensor, x: Tensor, prologue: tuple[Tensor, Tensor] | None) -> Tensor: ...

    def input_gradient(self, grad: Tensor, shape: torch.Size) -> Tensor: ...

    def channels_at_a_time(self, x: Tensor) -> int:
        """Of how many channels of x to make the gradient at once where that saves memory."""
        ...

    def channels_gradient(self, grad: Tensor, shape: torch.Size, first: int, last: int) -> Tensor:
        """The input's gradient for these channels, if `channels_at_a_time` are not all."""
        ...

    def bias_gradient(self, grad: Tensor) -> Tensor: ...

    def read(self, x: Tensor) -> Tensor:
        """What the weight's gradient reads of x, which is all that is stored; most layers read all of it."""
        ...

    def reading(self) -> "Product":
        """The layer that has this weight and reads all of what `read` gives."""
        ...


def take_stored(ctx: Any) -> Stored:
    """Moves what a function stored out of `ctx`, so that the caller holds the last reference."""
    kept, ctx.kept = ctx.kept, None
    if kept is None:
        raise ShoestringError(SECOND_BACKWARD)
    return kept.opened() if isinstance(kept, OneUse) else kept


def _take(ctx: Any) -> Tensor:
    return take_stored(ctx).take()


def _weight_gradient(ctx: Any, grad: Tensor) -> Tensor:
    """From the stored input, as it is stored if that can be."""
    kept, layer = take_stored(ctx), ctx.product.reading()
    if isinstance(kept, StoredInput):
        return kept.weight_gradient(layer, grad)
    return layer.weight_gradient(grad, kept.take(), None)


class LeanProduct(torch.autograd.Function):
    """product(x): saves x for the weight's gradient only, and frees it after."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: Product, kept: Any) -> Tensor:
        ctx.product, ctx.kept, ctx.shape = product, kept, x.shape
        y = product.forward(x, None)
        # A linear layer of tokens returns a view of a matrix, which autograd does not allow to be changed in place.
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        weight = _weight_gradient(ctx, grad) if wants_weight else None
        bias = ctx.product.bias_gradient(grad) if wants_bias else None
        x = ctx.product.input_gradient(grad, ctx.shape) if wants_x else None
        return x, weight, bias, None, None


def _relu_mask(x: Tensor, fold: tuple[Tensor, Tensor]) -> Tensor:
    """One bit per element: where relu(norm(x)) lets pass. A few samples at a time, if these fill whole bytes."""
    count = samples_at_a_time(x.shape, x.dtype) if x[0].numel() % 8 == 0 else len(x)
    return torch.cat([pack_bits(batch_norm_apply(part, *fold, relu=False) > 0) for part in x.split(count)])


class NormReluProduct(torch.autograd.Function):
    """product(relu(norm(x))): saves x. The feature map in between exists only piecewise, inside the kernel."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Any, beta: Any, weight: Tensor, bias: Any, statistics: Any, product: Any, kept: Any
    ) -> Tensor:
        ctx.product, ctx.kept, ctx.statistics, ctx.norm = product, kept, statistics, (gamma, beta)
        fold = batch_norm_fold(statistics.mean, statistics.invstd, gamma, beta)
        ctx.mask = _relu_mask(x, fold) if is_lossy(kept) else None  # of a lossy x it would not be the one that was
        return product.forward(x, fold)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        product, (mean, invstd, shared), (gamma, beta) = ctx.product, ctx.statistics, ctx.norm
        x, weight, bias = _take(ctx), None, None
        if shared is None or shared.is_last:
            weight = product.weight_gradient(grad, x, batch_norm_fold(mean, invstd, gamma, beta))
            bias = product.bias_gradient(grad) if ctx.needs_input_grad[4] else None
        few = product.channels_at_a_time(x)
        if few < x.shape[1] and shared is None and ctx.mask is None and x.is_contiguous() and is_owned(x):
            gradients = _over_input(product, grad, x, ctx.statistics, gamma, beta, few)
        else:
            between = product.input_gradient(grad, x.shape)
            if ctx.mask is not None:
                _where(ctx.mask, between)
            gradients = _norm_gradients(ctx.statistics, between, x, gamma, beta, ctx.mask is None, between)
        return *wanted(ctx, gradients), weight, bias, None, None, None


def _over_input(
    product: Product, grad: Tensor, x: Tensor, statistics: Statistics, gamma: Any, beta: Any, few: int
) -> tuple[Tensor, ...]:
    """The gradients of x, gamma and beta of product(relu(norm(x))), that of x written over x, a few channels at a time:
    a channel of x is read for its own gradient only, so the map between norm and product never exists whole."""
    ends = []
    for first in range(0, x.shape[1], few):
        last = min(first + few, x.shape[1])
        between = product.channels_gradient(grad, x.shape, first, last)
        mean, invstd = statistics.mean[first:last], statistics.invstd[first:last]
        scale, offset = (each if each is None else each[first:last] for each in (gamma, beta))
        part = x[:, first:last]
        ends.append(batch_norm_backward(between, part, mean, invstd, scale, offset, relu=True, out=part)[1:])
        del between  # before the next is made
    return x, *(torch.cat(parts) for parts in zip(*ends, strict=True))


class LeanNorm(torch.autograd.Function):
    """norm(x), with ReLU if asked: saves x and the statistics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Any, beta: Any, statistics: Statistics, relu: bool, kept: Any) -> Tensor:
        ctx.kept, ctx.statistics, ctx.norm, ctx.relu = kept, statistics, (gamma, beta), relu
        y = batch_norm_apply(x, *batch_norm_fold(statistics.mean, statistics.invstd, gamma, beta), relu=relu)
        ctx.mask = pack_bits(y > 0) if relu and is_lossy(kept) else None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.mask is not None:
            grad = torch.where(unpack_bits(ctx.mask, grad.numel()).view(grad.shape), grad, 0)
        relu = ctx.relu and ctx.mask is None
        gamma, beta = ctx.norm
        gradients = _norm_gradients(ctx.statistics, grad, _take(ctx), gamma, beta, relu, None)
        return *wanted(ctx, gradients), None, None, None


def _norm_gradients(
    statistics: Statistics, grad: Tensor, x: Tensor, gamma: Any, beta: Any, relu: bool, out: Tensor | None
) -> tuple:
    if statistics.shared is not None:
        return statistics.shared.backward(grad, x, gamma, beta, relu, out)
    return batch_norm_backward(grad, x, statistics.mean, statistics.invstd, gamma, beta, relu, out=out)


def wanted(ctx: Any, gradients: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """The gradients of x, gamma and beta that are needed: a norm may have no parameters."""
    needs = ctx.needs_input_grad[:3]
    return tuple(gradient if need else None for gradient, need in zip(gradients, needs, strict=True))


class LeanRelu(torch.autograd.Function):
    """relu(x): saves one bit per element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Any, form: torch.memory_format) -> Tensor:
        ctx.kept, ctx.form = kept, form
        return x.clamp_min(0)

    @staticmethod
    @told_if_owned
    def backward(ctx: Any, grad: Tensor, owned: bool) -> Any:
        form = ctx.form
        if not grad.is_contiguous(memory_format=form):
            if form == torch.contiguous_format:
                return _where(_take(ctx), grad if owned else grad.clone()), None, None
            grad, owned = grad.contiguous(memory_format=form), True
        x = grad if owned else torch.empty_like(grad)
        where_bits(in_memory_order(x, form), in_memory_order(grad, form), _take(ctx))
        return x, None, None


def _where(bits: Tensor, grad: Tensor) -> Tensor:
    """Sets a gradient to 0, in place, where the mask has no bit (an infinite one times 0 is NaN). In a layout other
    than the mask's, that is unpacked to a few samples at a time, if these fill whole bytes."""
    if grad.is_contiguous():
        where_bits(grad, grad, bits)
        return grad
    whole = grad.numel() == 0 or grad.dim() == 0 or grad[0].numel() % 8
    parts = [grad] if whole else grad.split(samples_at_a_time(grad.shape, grad.dtype))
    start = 0
    for part in parts:
        stop = start + -(-part.numel() // 8)
        part.masked_fill_(unpack_bits(bits[start:stop], part.numel()).logical_not_().view(part.shape), 0)
        start = stop
    return grad


class LeanReluInPlace(torch.autograd.Function):
    """relu_(x): saves one bit per element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Any, form: torch.memory_format) -> Tensor:
        ctx.kept, ctx.form = kept, form
        ctx.mark_dirty(x)
        return x.clamp_min_(0)

    backward = LeanRelu.backward


class LeanMaxPool(torch.autograd.Function):
    """max_pool2d(x): saves the place of each maximum in its window, a byte, in place of x and 64-bit indices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, window: Window) -> Tensor:
        y, indices = torch.ops.aten.max_pool2d_with_indices(x, *window)
        ctx.kept = store(window_places(indices, x.shape, window))
        ctx.window, ctx.like = window, (x.shape, x.dtype, x.device)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        shape, dtype, device = ctx.like
        places, x = _take(ctx).view(grad.shape), torch.empty(shape, dtype=dtype, device=device)
        few = samples_at_a_time(shape, dtype)  # indices have 64 bits
        for part, place, out in zip(grad.split(few), places.split(few), x.split(few), strict=True):
            indices = window_indices(place, out.shape, ctx.window)
            out.copy_(torch.ops.aten.max_pool2d_with_indices_backward(part, out, *ctx.window, indices))
        return x, None


class LeanDropout(torch.autograd.Function):
    """dropout(x): saves one bit per element; draws the same random numbers as PyTorch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, noise: Tensor, probability: float, kept: Any) -> Tensor:
        ctx.kept, ctx.scale = kept, 1 / (1 - probability)
        return x * noise.div_(1 - probability)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        mask = unpack_bits(_take(ctx), grad.numel())
        return grad * mask.view(grad.shape) * ctx.scale, None, None, None


def lean_product(x: Tensor, weight: Tensor, bias: Tensor | None, product: Product) -> Tensor:
    """A dense or sparse convolution or linear layer that lets go of its input before it makes the input's gradient."""
    kept = store(product.read(x)) if weight.requires_grad else None
    return LeanProduct.apply(x, weight, bias, product, kept)


def norm_relu_product(
    x: Tensor, gamma: Any, beta: Any, weight: Tensor, bias: Any, statistics: Statistics, product: Product
) -> Tensor:
    """Batch norm, ReLU and a layer as one operation."""
    return NormReluProduct.apply(x, gamma, beta, weight, bias, statistics, product, store(x))


def lean_norm(x: Tensor, gamma: Any, beta: Any, statistics: Statistics, relu: bool) -> Tensor:
    """Batch norm from given statistics, with or without ReLU."""
    return LeanNorm.apply(x, gamma, beta, statistics, relu, store(x))


def lean_relu(x: Tensor) -> Tensor:
    """ReLU with a 1-bit mask; as in PyTorch, the gradient passes where x is NaN."""
    return LeanRelu.apply(x, _passing(x), layout(x))


def lean_relu_in_place(x: Tensor) -> Tensor:
    """In-place ReLU with a 1-bit mask."""
    return LeanReluInPlace.apply(x, _passing(x), layout(x))


def _passing(x: Tensor) -> Stored:
    """Where ReLU lets a gradient pass, one bit per element, in the order of memory."""
    return store(positive_bits(in_memory_order(x, layout(x))))


def lean_max_pool(x: Tensor, window: Window) -> Tensor:
    """Max-pooling of maps that saves a byte per output."""
    return LeanMaxPool.apply(x, window)


def lean_dropout(x: Tensor, probability: float) -> Tensor:
    """Dropout with a 1-bit mask."""
    noise = torch.empty_like(x).bernoulli_(1 - probability)
    return LeanDropout.apply(x, noise, probability, store(pack_bits(noise != 0)))
