"""Random calls of every compiled kernel against PyTorch in FP64: sizes, layouts, dtypes, threads and empty batches.

A case is a function of its family and number alone. Run as a script, it checks many of them, as the test under
AddressSanitizer does:

    python tests/kernels/fuzz.py --cases 200 --first 0 conv sparse_conv

An element may be off by the rounding of its storage, and by that of an FP32 sum of its terms: epsilon times the sum
of their magnitudes times the root of their number, as errors of either sign add up.
"""

import argparse
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from shoestring.kernels.bitmask import pack_bits, unpack_bits
from shoestring.kernels.conv import conv_forward, conv_input_gradient, conv_weight_gradient
from shoestring.kernels.dynamic_convolution import (
    dynamic_convolution_forward,
    dynamic_convolution_input_gradient,
    dynamic_convolution_kernel_gradient,
)
from shoestring.kernels.gradients import all_finite, squared_norm
from shoestring.kernels.linear import linear_forward, linear_input_gradient, linear_weight_gradient
from shoestring.kernels.moments import Moment, new_moment
from shoestring.kernels.norm import batch_norm_apply, batch_norm_backward, batch_norm_fold, batch_norm_statistics
from shoestring.kernels.references import update as reference_update
from shoestring.kernels.sparse_conv import (
    sparse_conv2d_forward,
    sparse_conv2d_input_gradient,
    sparse_conv2d_weight_gradient,
)
from shoestring.kernels.sparse_embedding import sparse_embedding_forward, sparse_embedding_gradient
from shoestring.kernels.sparse_index import decode, encode, from_bitmap, to_bitmap, validate
from shoestring.kernels.sparse_linear import (
    sparse_linear_forward,
    sparse_linear_input_gradient,
    sparse_linear_weight_gradient,
)
from shoestring.kernels.update import adam_update, sgd_update

DTYPES = [torch.float32, torch.float32, torch.float16, torch.bfloat16]
EPSILON = torch.finfo(torch.float32).eps
FENCE = 4096  # elements: as far as a stray write may go and be seen
# Next to what fills a vector, two or eight, of any core.
WIDTHS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 33, 40, 63, 64, 65, 96, 100, 128, 129]
DENSITIES = [0, 0.02, 0.1, 0.3, 0.9, 1]
Draw = random.Random


def within(what: str, got: Tensor, wanted: Tensor, magnitude: Tensor, terms: int) -> None:
    """Asserts that each element is off by no more than the rounding of `terms` products and of the storage."""
    assert got.shape == wanted.shape, f"{what}: {tuple(got.shape)} in place of {tuple(wanted.shape)}"
    storage = torch.finfo(got.dtype)
    sums = (2 + math.sqrt(terms) / 2) * EPSILON * magnitude
    allowed = sums + storage.eps * (wanted.abs() + sums) + storage.tiny * storage.eps
    over = ((got.double() - wanted).abs() / allowed).nan_to_num(nan=math.inf)
    assert over.numel() == 0 or over.max() <= 1, f"{what}: {over.max():.2f} times what rounding explains"


def tensor(draw: Draw, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(draw.getrandbits(40))
    return torch.randn(shape, generator=generator).to(dtype)


def laid_out(draw: Draw, x: Tensor) -> Tensor:
    """A map in one of its layouts, or with gaps in its memory."""
    form = draw.choice(["contiguous", "contiguous", "last", "gaps"])
    if form == "last" and x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    if form == "gaps" and x.dim() > 1:
        return torch.stack([x, x], dim=-1)[..., 0]
    return x


def nonzeros(draw: Draw, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A random sparse weight: dense in FP64, its values, its index."""
    mask = (tensor(draw, *shape).sigmoid() < draw.choice(DENSITIES)).flatten()
    positions = mask.nonzero().flatten()
    values = tensor(draw, positions.numel(), dtype=dtype)
    weight = torch.zeros(mask.numel(), dtype=torch.float64)
    weight[positions] = values.double()
    return weight.view(shape), values, encode(positions, mask.numel())


# -- convolutions ---------------------------------------------------------------------------------------------
def geometry(draw: Draw) -> tuple[tuple[int, int], ...]:
    """Size, kernel, stride, padding and dilation that give an output, be it of the padding alone."""
    narrow = draw.random() < 0.3  # next to the stride and the padding
    while True:
        size = draw.randint(1, 14), draw.choice(WIDTHS)
        choices = [1, 2, 3, 3, 4, 5, 7], [1, 1, 2, 3, 5], [0, 0, 1, 1, 2, 3, 6], [1, 1, 2, 3]
        if narrow:
            size = draw.randint(1, 3), draw.randint(1, 3)
            choices = [1, 1, 2, 3], [1, 4, 5, 19], [0, 1, 4, 6], [1, 2]
        kernel, stride, padding, dilation = (tuple(draw.choice(choice) for _ in range(2)) for choice in choices)
        if all(n + 2 * p > d * (k - 1) for n, k, p, d in zip(size, kernel, padding, dilation, strict=True)):
            return size, kernel, stride, padding, dilation


def convolved(x: Tensor, weight: Tensor, grad_y: Tensor, *settings) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch's convolution of FP64 tensors: y, and the gradients of x and of the weight."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = F.conv2d(x, weight, None, *settings)
    return (y.detach(), *torch.autograd.grad(y, (x, weight), grad_y))


def prologue(draw: Draw, x: Tensor, relu: bool | None = None) -> tuple[Tensor, Tensor, dict]:
    """What a convolution reads of x, its magnitude, and the options that say so: as it is, or normed and rectified."""
    if draw.random() < 0.5:
        return x.double(), x.double().abs(), {}
    options = {"scale": tensor(draw, x.shape[1]), "shift": tensor(draw, x.shape[1])}
    scale, shift = (v.double().view(1, -1, 1, 1) for v in options.values())
    read = x.double() * scale + shift
    rectified = draw.random() < 0.5 if relu is None else relu
    options |= {} if relu else {"relu": rectified}
    return read.relu() if rectified else read, x.double().abs() * scale.abs() + shift.abs(), options


def conv(draw: Draw) -> None:
    size, kernel, *spaced = geometry(draw)
    batch, groups, dtype = draw.choice([0, 1, 1, 2, 3]), draw.choice([1, 1, 2, 3]), draw.choice(DTYPES)
    inside, outside = (draw.choice([1, 1, 2, 3, 5, 8, 17]) for _ in range(2))
    x = laid_out(draw, tensor(draw, batch, inside * groups, *size, dtype=dtype))
    weight = tensor(draw, outside * groups, inside, *kernel, dtype=draw.choice([dtype, torch.float32]))
    settings = (*spaced, groups)
    read, magnitude, options = prologue(draw, x)
    grad_y = laid_out(draw, tensor(draw, *F.conv2d(read, weight.double(), None, *settings).shape, dtype=dtype))
    y, grad_x, grad_w = convolved(read, weight.double(), grad_y.double(), *settings)
    most = convolved(magnitude, weight.double().abs(), grad_y.double().abs(), *settings)
    bias = draw.choice([None, tensor(draw, outside * groups)])
    added = 0 if bias is None else bias.double().view(1, -1, 1, 1)
    scratch = {"scratch_bytes": draw.choice([384 * 1024, 384 * 1024, 1000])}
    taps = kernel[0] * kernel[1]
    within(
        "forward", conv_forward(x, weight, bias, *settings, **options, **scratch), y + added,
        most[0] + abs(added), inside * taps + 1,
    )  # fmt: skip
    got = conv_input_gradient(grad_y, weight, x.shape, *settings, **scratch)
    within("input gradient", got, grad_x, most[1], outside * taps)
    before = draw.choice([None, tensor(draw, *weight.shape)])
    old = 0 if before is None else before.double()
    got = conv_weight_gradient(grad_y, x, weight.shape, *settings, **options, **scratch, out=before)
    within("weight gradient", got, old + grad_w, abs(old) + most[2], batch * y[0:1, 0].numel() + 1)


def sparse_conv(draw: Draw) -> None:
    size, kernel, *spaced = geometry(draw)
    batch, dtype = draw.choice([0, 1, 1, 2, 3]), draw.choice(DTYPES)
    inside, outside = (draw.choice([1, 2, 3, 5, 8, 17, 40]) for _ in range(2))
    x = laid_out(draw, tensor(draw, batch, inside, *size, dtype=dtype))
    weight, values, index = nonzeros(draw, (outside, inside, *kernel), draw.choice([dtype, torch.float32]))
    read, magnitude, options = prologue(draw, x, relu=True)
    grad_y = laid_out(draw, tensor(draw, *F.conv2d(read, weight, None, *spaced).shape, dtype=dtype))
    y, grad_x, grad_w = convolved(read, weight, grad_y.double(), *spaced)
    most = convolved(magnitude, weight.abs(), grad_y.double().abs(), *spaced)
    taps, positions = kernel[0] * kernel[1], decode(index, weight.numel()).long()
    got = sparse_conv2d_forward(x, values, index, outside, kernel, *spaced, **options)
    within("forward", got, y, most[0], inside * taps)
    got = sparse_conv2d_input_gradient(grad_y, values, index, list(x.shape), kernel, *spaced)
    within("input gradient", got, grad_x, most[1], outside * taps)
    accumulate = draw.random() < 0.5
    gradient = tensor(draw, values.numel(), dtype=values.dtype)
    old = gradient.double() if accumulate else torch.zeros_like(gradient, dtype=torch.float64)
    sparse_conv2d_weight_gradient(x, grad_y, index, kernel, *spaced, **options, out=gradient, accumulate=accumulate)
    wanted, magnitude = (old + grad_w.flatten()[positions], old.abs() + most[2].flatten()[positions])
    within("weight gradient", gradient, wanted, magnitude, batch * y[0:1, 0].numel() + 1)


# -- layers on tokens -----------------------------------------------------------------------------------------
def tokens(draw: Draw) -> tuple[int, ...]:
    count = draw.choice([0, 1, 3, 8, 9, 63, 64, 65, 130])
    return draw.choice([(count,), (count, 1), (1, count), (2, count)])


def linear_sizes(draw: Draw) -> tuple[int, int]:
    return draw.choice([1, 2, 7, 8, 33, 100, 400]), draw.choice([1, 3, 8, 9, 65, 200])


def sparse_linear(draw: Draw) -> None:
    inside, outside = linear_sizes(draw)
    batch, dtype = tokens(draw), draw.choice(DTYPES)
    weight, values, index = nonzeros(draw, (outside, inside), draw.choice([dtype, torch.float32]))
    x, dy = tensor(draw, *batch, inside, dtype=dtype), tensor(draw, *batch, outside, dtype=dtype)
    wide, wide_dy = x.double(), dy.double()
    got = sparse_linear_forward(x, values, index, outside)
    within("forward", got, wide @ weight.t(), wide.abs() @ weight.abs().t(), inside)
    got = sparse_linear_input_gradient(dy, values, index, inside)
    within("input gradient", got, wide_dy @ weight, wide_dy.abs() @ weight.abs(), outside)
    accumulate, positions = draw.random() < 0.5, decode(index, weight.numel()).long()
    gradient = tensor(draw, values.numel(), dtype=values.dtype)
    old = gradient.double() if accumulate else torch.zeros_like(gradient, dtype=torch.float64)
    sparse_linear_weight_gradient(x, dy, index, out=gradient, accumulate=accumulate)
    within("weight gradient", gradient, *gradient_at(positions, old, wide_dy, wide), math.prod(batch) + 1)


def gradient_at(positions: Tensor, old: Tensor, dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """What a weight gradient must be at some positions, and its magnitude."""
    dy, x = dy.flatten(0, -2), x.flatten(0, -2)
    return old + (dy.t() @ x).flatten()[positions], old.abs() + (dy.t().abs() @ x.abs()).flatten()[positions]


def linear(draw: Draw) -> None:
    inside, outside = linear_sizes(draw)
    batch, dtype = tokens(draw), draw.choice([torch.float16, torch.bfloat16])
    x, dy = tensor(draw, *batch, inside, dtype=dtype), tensor(draw, *batch, outside, dtype=dtype)
    weight, bias = tensor(draw, outside, inside, dtype=dtype), draw.choice([None, tensor(draw, outside, dtype=dtype)])
    wide, wide_dy, wide_w = x.double(), dy.double(), weight.double()
    added, scratch = (0 if bias is None else bias.double()), {"scratch_bytes": draw.choice([2_000_000, 3000])}
    got = linear_forward(x, weight, bias, **scratch)
    within("forward", got, wide @ wide_w.t() + added, wide.abs() @ wide_w.abs().t() + abs(added), inside + 1)
    got = linear_input_gradient(dy, weight, **scratch)
    within("input gradient", got, wide_dy @ wide_w, wide_dy.abs() @ wide_w.abs(), outside)
    before, every = draw.choice([None, tensor(draw, outside, inside)]), torch.arange(inside * outside)
    old = torch.zeros(every.numel(), dtype=torch.float64) if before is None else before.double().flatten()
    got = linear_weight_gradient(dy, x, out=before, **scratch).flatten()
    within("weight gradient", got, *gradient_at(every, old, wide_dy, wide), math.prod(batch) + 1)


def sparse_embedding(draw: Draw) -> None:
    width, rows = linear_sizes(draw)
    weight, values, index = nonzeros(draw, (rows, width), draw.choice(DTYPES))
    batch = tokens(draw)
    ids = torch.randint(rows, batch, generator=torch.Generator().manual_seed(draw.getrandbits(40)))
    ids = ids.to(draw.choice([torch.int64, torch.int32]))
    got = sparse_embedding_forward(ids, values, index, rows, width)
    assert torch.equal(got.double(), F.embedding(ids, weight))
    dy = tensor(draw, *batch, width, dtype=draw.choice(DTYPES))
    gradient, accumulate = tensor(draw, values.numel(), dtype=values.dtype), draw.random() < 0.5
    old = gradient.double() if accumulate else torch.zeros_like(gradient, dtype=torch.float64)
    sparse_embedding_gradient(ids, dy, index, rows, width, out=gradient, accumulate=accumulate)
    picked = F.one_hot(ids.long(), rows).double()
    positions = decode(index, weight.numel()).long()
    within("gradient", gradient, *gradient_at(positions, old, picked, dy.double()), math.prod(batch) + 1)


def dynamic_convolution(draw: Draw) -> None:
    batch, length, heads = draw.choice([0, 1, 2, 3]), draw.choice([1, 2, 7, 20]), draw.choice([1, 2, 4])
    channels, size, dtype = draw.choice([1, 5, 8, 16, 64, 70]), draw.choice([1, 2, 3, 7, 9, 31]), draw.choice(DTYPES)
    left = draw.randrange(size)
    x, grad_y = (tensor(draw, batch, length, heads, channels, dtype=dtype) for _ in range(2))
    kernels = tensor(draw, batch, length, heads, size, dtype=dtype)
    y, grad_x, grad_k = windows(x.double(), kernels.double(), grad_y.double(), left)
    most = windows(x.double().abs(), kernels.double().abs(), grad_y.double().abs(), left)
    within("forward", dynamic_convolution_forward(x, kernels, left), y, most[0], size)
    within("input gradient", dynamic_convolution_input_gradient(grad_y, kernels, left), grad_x, most[1], size)
    got = dynamic_convolution_kernel_gradient(grad_y, x, size, left)
    within("kernel gradient", got, grad_k, most[2], channels)


def windows(x: Tensor, kernels: Tensor, grad_y: Tensor, left: int) -> tuple[Tensor, ...]:
    """Dynamic convolution by unfolding x, in FP64: y and the gradients of x and the kernels."""
    x, kernels = x.requires_grad_(), kernels.requires_grad_()
    size = kernels.shape[-1]
    unfolded = F.pad(x, (0, 0, 0, 0, left, size - 1 - left)).unfold(1, size, 1)
    y = torch.einsum("nthck,nthk->nthc", unfolded, kernels)
    return (y.detach(), *torch.autograd.grad(y, (x, kernels), grad_y))


# -- batch norm -----------------------------------------------------------------------------------------------
def norm(draw: Draw) -> None:
    channels = draw.choice([1, 3, 8, 13, 40])
    shape = (draw.randint(2, 6), channels, *(draw.choice([1, 2, 5, 9, 17]) for _ in range(draw.randint(0, 3))))
    x = tensor(draw, *shape) * draw.choice([0.1, 1, 10]) + draw.choice([0, 3, -20, 300])
    if draw.random() < 0.3:  # outliers, where they come first
        x.view(-1)[: draw.randint(1, 20)] = draw.choice([0.0, 1e4])
    x = laid_out(draw, x.to(draw.choice(DTYPES)))
    over, across, count = [d for d in range(x.dim()) if d != 1], (1, -1, *[1] * (x.dim() - 2)), x.numel() // channels
    mean, variance = batch_norm_statistics(x)
    wanted_variance, wanted_mean = torch.var_mean(x.double(), over, correction=0)
    spread = x.double().sub(wanted_mean.view(across)).abs().mean(over)
    within("mean", mean, wanted_mean, spread + wanted_mean.abs(), 1)
    within("variance", variance, wanted_variance, wanted_variance, count)
    if not wanted_variance.min() > 1e-3:  # then what follows from its root is badly conditioned
        return
    invstd = (variance + 1e-5).rsqrt()
    gamma, beta = (draw.choice([None, tensor(draw, channels)]) for _ in range(2))
    scale, shift = batch_norm_fold(mean, invstd, gamma, beta)
    a, b, mu, inv = (v.double().view(across) for v in (scale, shift, mean, invstd))
    relu, z = draw.random() < 0.5, x.double() * a + b
    most = (x.double() * a).abs() + b.abs()
    within("apply", batch_norm_apply(x, scale, shift, relu), z.relu() if relu else z, most, 1)
    grad_y = tensor(draw, *shape, dtype=x.dtype)
    grad_y[z.abs() < 1e-4 * most] = 0  # where FP32 and FP64 may differ on the ReLU's mask
    add = draw.choice([None, tensor(draw, *shape, dtype=x.dtype)])
    got = batch_norm_backward(grad_y, x, mean, invstd, gamma, beta, relu, add)
    dz = grad_y.double() * (z > 0) if relu else grad_y.double()
    ours = [v if v is None else v.double() for v in (gamma, mean, invstd)]
    grads = torch.ops.aten.native_batch_norm_backward(
        dz, x.double(), ours[0], None, None, *ours[1:], True, 1e-5, [True, gamma is not None, True]
    )
    extra = 0 if add is None else add.double()
    n = (x.double() - mu) * inv
    sums = [v.abs().sum(over, keepdim=True) for v in (dz, dz * n)]
    magnitude = a.abs() * (dz.abs() + sums[0] / count + n.abs() * sums[1] / count) + abs(extra)
    within("input gradient", got[0], grads[0] + extra, magnitude, count)
    within("gamma's gradient", got[1], (dz * n).sum(over), sums[1].flatten(), count)
    within("beta's gradient", got[2], dz.sum(over), sums[0].flatten(), count)


# -- bits, gradients, updates ---------------------------------------------------------------------------------
def index(draw: Draw) -> None:
    numel = draw.choice([1, 7, 8, 9, 63, 64, 65, 255, 256, 1000, 5000])
    mask = tensor(draw, numel).sigmoid() < draw.choice([*DENSITIES, 0.002])
    positions, bits = mask.nonzero().flatten(), pack_bits(mask)
    made = encode(positions, numel)
    validate(made, numel, positions.numel())
    start, stop = sorted(draw.randint(0, numel) for _ in range(2))
    assert torch.equal(unpack_bits(bits, numel), mask)
    assert torch.equal(decode(made, numel).long(), positions)
    inside = positions[(positions >= start) & (positions < stop)]
    assert torch.equal(decode(made, numel, start, stop).long(), inside)
    assert torch.equal(to_bitmap(made, numel), bits) and torch.equal(from_bitmap(bits, numel), made)


def gradients(draw: Draw) -> None:
    x = tensor(draw, draw.choice([0, 1, 7, 8, 100, 2**14, 2**14 + 3, 50_000]), dtype=draw.choice(DTYPES))
    assert all_finite(x)
    assert math.isclose(squared_norm(x), float(x.double().square().sum()), rel_tol=1e-12)
    if x.numel():
        x[draw.randrange(x.numel())] = draw.choice([math.inf, -math.inf, math.nan])
        assert not all_finite(x)


def update(draw: Draw) -> None:
    dtype, form = draw.choice(DTYPES), draw.choice(["fp32", "fp16", "bf16", "8bit"])
    weight = tensor(draw, draw.choice([1, 7, 8, 255, 256, 257, 3000]), dtype=dtype)
    ours, twins = weight.clone(), weight.clone()
    grads = [tensor(draw, weight.numel(), dtype=draw.choice([dtype, torch.float32])) for _ in range(3)]
    run = draw.choice([_sgd, _adam])
    settings = {"decay": draw.choice([0.0, 0.1]), "flag": draw.random() < 0.5, "form": form}
    for step, gradient in enumerate(grads, 1):
        run(ours, gradient, step, settings, "ours")
        run(twins, gradient, step, settings, "twin")
    # Sums may be fused, so that a rounding (also one by chance) falls to the other side now and then.
    step = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}[dtype]
    slack = 0.02 if form == "8bit" else 1e-3 if form != "fp32" else 1e-6
    assert ((ours - twins).abs().double() <= slack + step * (1 + weight.abs().double())).all()


def _sgd(weight: Tensor, gradient: Tensor, step: int, settings: dict, which: str) -> None:
    momentum = settings.setdefault(which, new_moment(weight, settings["form"]))
    if which == "ours":
        sgd_update(
            weight, gradient, momentum, lr=0.01, mu=0.9, nesterov=settings["flag"],
            weight_decay=settings["decay"], factor=0.5, noise=(3, 0, step),
        )  # fmt: skip
    else:
        rest = (0.01, 0.9, settings["flag"], settings["decay"], 0.5, True, False, (3, 0, step))
        reference_update.sgd_update(weight, gradient, None, *momentum, *rest)


def _adam(weight: Tensor, gradient: Tensor, step: int, settings: dict, which: str) -> None:
    form = settings["form"]
    moments: tuple[Moment, Moment] = settings.setdefault(
        which, (new_moment(weight, form), new_moment(weight, form, positive=True))
    )
    if which == "ours":
        adam_update(
            weight, gradient, *moments, step=step, lr=0.001, weight_decay=settings["decay"],
            decoupled=settings["flag"], factor=0.5, noise=(3, 0, step),
        )  # fmt: skip
    else:
        values, scales = zip(*moments, strict=True)
        rest = (0.001, 0.9, 0.999, 1e-8, settings["decay"], settings["flag"], 0.5, step, (3, 0, step))
        reference_update.adam_update(weight, gradient, None, *values, *scales, *rest)


# -- running --------------------------------------------------------------------------------------------------
@contextmanager
def fenced() -> Iterator[None]:
    """Scratch and outputs that kernels ask for begin as NaN and lie between fences, which must stand at the end."""
    made: list[tuple[Tensor, int]] = []

    def new_empty(like: Tensor, *size, **options) -> Tensor:
        shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        between = torch.empty(shape.numel() + 2 * FENCE, dtype=options.get("dtype") or like.dtype)
        between.view(torch.uint8).fill_(255)
        made.append((between, shape.numel()))
        return between[FENCE : FENCE + shape.numel()].view(shape)

    torch.Tensor.new_empty = new_empty  # type: ignore[method-assign]
    try:
        yield
    finally:
        del torch.Tensor.new_empty
    for between, numel in made:
        fences = between[:FENCE], between[FENCE + numel :]
        assert all((fence.view(torch.uint8) == 255).all() for fence in fences), f"a write beside {numel} elements"


FAMILIES: dict[str, Callable[[Draw], None]] = {
    family.__name__: family
    for family in (
        conv, sparse_conv, sparse_linear, linear, sparse_embedding, dynamic_convolution, norm, index, gradients, update,
    )
}  # fmt: skip


def check(family: str, number: int, fences: bool = True) -> None:
    """One case; what is wrong with it is an AssertionError that names it."""
    draw = random.Random(f"{family} {number}")
    before = torch.get_num_threads()
    torch.set_num_threads(draw.choice([1, 2]))
    try:
        with fenced() if fences else nullcontext():
            FAMILIES[family](draw)
    except AssertionError as error:
        raise AssertionError(f"{family}, case {number}: {error}") from error
    finally:
        torch.set_num_threads(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", default=list(FAMILIES), help="of " + ", ".join(FAMILIES))
    parser.add_argument("--cases", type=int, default=100, help="of each family")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--unfenced", action="store_true", help="no fences: a sanitizer watches the memory itself")
    given = parser.parse_args()
    for family in given.families:
        for number in range(given.first, given.first + given.cases):
            check(family, number, fences=not given.unfenced)
        print(f"{family}: {given.cases} cases", flush=True)


if __name__ == "__main__":
    main()
