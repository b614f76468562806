"""The dense kernels beside PyTorch's: time and, under the heap meter, the bytes that a call makes beside its result.

    python benchmarks/kernels_dense.py --threads 1 2    # all families; or some: norm conv pooled linear dynamic
    heapmeter python benchmarks/kernels_dense.py --scratch

Contenders of a row take turns; a figure is the least of several repeats. On one thread it is CPU time, which other
processes do not lengthen; on more threads it is wall time, which they do.
"""

import argparse
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from shoestring.kernels import conv, dynamic_convolution, linear, norm, pooling
from shoestring.measuring import heap
from shoestring.models.dynamicconv import by_head
from shoestring.models.dynamicconv import dynamic_convolution as band_convolution

Row = tuple[str, dict[str, Callable]]
LAYOUTS = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}


def norm_rows() -> Iterator[Row]:
    """Batch norm + ReLU forward, and backward into a gradient that is there."""
    for shape in ((100, 32, 32, 32), (10, 32, 32, 32), (100, 128, 8, 8)):
        for name, layout in LAYOUTS.items():
            x, g = (torch.randn(shape).contiguous(memory_format=layout) for _ in range(2))
            gamma, beta = torch.rand(shape[1]), torch.randn(shape[1])
            halves = x.half(), g.half(), gamma, beta
            yield (
                f"norm+relu forward {shape} {name}",
                {
                    "torch": lambda x=x, w=gamma, b=beta: F.batch_norm(x, None, None, w, b, True).relu_(),
                    "fp32": lambda x=x, w=gamma, b=beta: norm_forward(x, w, b),
                    "fp16": lambda h=halves: norm_forward(h[0], *h[2:]),
                },
            )
            mean, variance = norm.batch_norm_statistics(x)
            statistics = mean, (variance + 1e-5).rsqrt(), gamma, beta
            y = norm_forward(x, gamma, beta)
            yield (
                f"norm+relu backward {shape} {name}",
                {
                    "torch": lambda x=x, g=g, y=y, s=statistics: torch_norm_backward(x, g, y, *s[:3]),
                    "fp32": lambda x=x, g=g, s=statistics: norm.batch_norm_backward(g, x, *s, True, out=g),
                    "fp16": lambda h=halves, s=statistics: norm.batch_norm_backward(h[1], h[0], *s, True, out=h[1]),
                },
            )


def norm_forward(x, gamma, beta):
    mean, variance = norm.batch_norm_statistics(x)
    return norm.batch_norm_apply(x, *norm.batch_norm_fold(mean, (variance + 1e-5).rsqrt(), gamma, beta), True)


def torch_norm_backward(x, g, y, mean, invstd, gamma):
    g = torch.ops.aten.threshold_backward(g, y, 0)
    return torch.ops.aten.native_batch_norm_backward(g, x, gamma, None, None, mean, invstd, True, 1e-5, [True] * 3)


def conv_rows(batches=(100, 10)) -> Iterator[Row]:
    """WRN-28-2's convolutions."""
    shapes = [(3, 16, 32, 1), (16, 32, 32, 1), (32, 32, 32, 1), (32, 64, 32, 2), (64, 64, 16, 1), (128, 128, 8, 1)]
    for batch in batches:
        for inside, outside, size, stride in shapes:
            for name, layout in LAYOUTS.items():
                x = torch.randn(batch, inside, size, size).contiguous(memory_format=layout)
                w = torch.randn(outside, inside, 3, 3)
                g = torch.randn_like(F.conv2d(x, w, None, stride, 1))
                yield from conv_three(f"{batch} {inside}-{outside} {size}/{stride} {name}", x, w, g, stride, layout)


def pooled_rows() -> Iterator[Row]:
    """Weight gradients from averages (`pool2`, `pool4`) beside those from whole maps: WRN-28-2, ResNet-18."""
    for batch, channels, size in (
        (100, 32, 32),
        (100, 64, 16),
        (100, 128, 8),
        (32, 64, 56),
        (32, 128, 28),
        (32, 256, 14),
    ):
        x, g = (torch.randn(batch, channels, size, size) for _ in range(2))
        w, contenders = (channels, channels, 3, 3), {}
        for name, layout in LAYOUTS.items():
            laid, grad = (tensor.contiguous(memory_format=layout) for tensor in (x, g))
            contenders[f"torch {name}"] = whole_weight_gradient(x, g, w, layout)
            for k in (2, 4):
                settings = (grad, pooling.pool(laid, k), (size, size), k, w, (1, 1), (1, 1))
                contenders[f"pool{k} {name}"] = lambda settings=settings: pooling.pooled_weight_gradient(*settings)
        yield f"pooled weight gradient {batch} {channels}-{channels} {size}", contenders


def whole_weight_gradient(x, g, shape, layout) -> Callable:
    x, g, w = (tensor.contiguous(memory_format=layout) for tensor in (x, g, torch.zeros(shape)))
    settings = [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False]
    return lambda: torch.ops.aten.convolution_backward(g, x, w, None, *settings)


def conv_three(what, x, w, g, stride, layout) -> Iterator[Row]:
    laid = w.contiguous(memory_format=layout)
    settings = {"stride": stride, "padding": 1}
    half_x, half_w, half_g, sums = x.half(), w.half(), g.half(), torch.zeros_like(w)

    def backward(*mask):
        pair = [stride, stride], [1, 1], [1, 1], False, [0, 0], 1
        return torch.ops.aten.convolution_backward(g, x, laid, None, *pair, [*mask, False])

    yield (
        f"conv forward {what}",
        {
            "torch": lambda: F.conv2d(x, laid, None, stride, 1),
            "fp32": lambda: conv.conv_forward(x, w, **settings),
            "fp16": lambda: conv.conv_forward(half_x, half_w, **settings),
        },
    )
    yield (
        f"conv input gradient {what}",
        {
            "torch": lambda: backward(True, False),
            "fp32": lambda: conv.conv_input_gradient(g, w, x.shape, **settings),
            "fp16": lambda: conv.conv_input_gradient(half_g, half_w, x.shape, **settings),
        },
    )
    yield (
        f"conv weight gradient {what}",
        {
            "torch": lambda: backward(False, True),
            "fp32": lambda: conv.conv_weight_gradient(g, x, w.shape, **settings, out=sums),
            "fp16": lambda: conv.conv_weight_gradient(half_g, half_x, w.shape, **settings, out=sums),
        },
    )


def linear_rows() -> Iterator[Row]:
    """The products of the DynamicConv Transformer; FP32 ones stay PyTorch's."""
    for tokens, inside, outside in ((250, 512, 1024), (250, 1024, 512), (250, 512, 6632), (4000, 512, 1024)):
        x, w, g = torch.randn(tokens, inside), torch.randn(outside, inside), torch.randn(tokens, outside)
        halves = x.half(), w.half(), g.half(), torch.zeros(outside, inside).half()
        what = f"{tokens} x {inside} x {outside}"
        yield (
            f"linear forward {what}",
            {
                "torch": lambda x=x, w=w: x @ w.t(),
                "fp16": lambda h=halves: linear.linear_forward(h[0], h[1]),
            },
        )
        yield (
            f"linear input gradient {what}",
            {
                "torch": lambda g=g, w=w: g @ w,
                "fp16": lambda h=halves: linear.linear_input_gradient(h[2], h[1]),
            },
        )
        yield (
            f"linear weight gradient {what}",
            {
                "torch": lambda g=g, x=x: g.t() @ x,
                "fp16": lambda h=halves: linear.linear_weight_gradient(h[2], h[0], out=h[3]),
            },
        )


def dynamic_rows() -> Iterator[Row]:
    """Forward and both gradients, beside the model's band matrix."""
    for batch, length, size in ((10, 25, 7), (10, 25, 31), (16, 250, 31)):
        x, kernels = torch.randn(batch, length, 4, 128), torch.randn(batch, length, 4, size).softmax(3)
        halves = x.half(), kernels.half()
        yield (
            f"dynamic convolution {batch} x {length}, kernel {size}",
            {
                "torch": lambda x=x, k=kernels: band_step(x, k),
                "fp32": lambda x=x, k=kernels: dynamic_step(x, k),
                "fp16": lambda h=halves: dynamic_step(*h),
            },
        )


def band_step(x, kernels):
    x, kernels = x.detach().requires_grad_(), kernels.detach().requires_grad_()
    band_convolution(by_head(x), by_head(kernels), kernels.shape[3] // 2).sum().backward()


def dynamic_step(x, kernels):
    size, d = kernels.shape[3], dynamic_convolution
    y = d.dynamic_convolution_forward(x, kernels, size // 2)
    d.dynamic_convolution_input_gradient(y, kernels, size // 2)
    d.dynamic_convolution_kernel_gradient(y, x, size, size // 2)


FAMILIES = {"norm": norm_rows, "conv": conv_rows, "pooled": pooled_rows, "linear": linear_rows, "dynamic": dynamic_rows}


def milliseconds(contenders: dict[str, Callable], repeats: int) -> dict[str, float]:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    least = dict.fromkeys(contenders, float("inf"))
    for turn in range(repeats + 1):
        for name, run in contenders.items():
            start = clock()
            run()
            if turn:  # the first turn warms up
                least[name] = min(least[name], clock() - start)
    return {name: 1e3 * seconds for name, seconds in least.items()}


def scratch_bytes(run: Callable) -> int:
    """What a call allocates at its peak, beside the results that are left when it ends."""
    run()
    before = heap.live()
    heap.reset()
    result = run()
    kept = heap.live() - before
    del result
    return heap.peak() - before - kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", default=list(FAMILIES), help=", ".join(FAMILIES))
    parser.add_argument("--threads", type=int, nargs="*", default=[1])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scratch", action="store_true", help="bytes beside the result, under the heap meter")
    given = parser.parse_args()
    if given.scratch and not heap.is_preloaded():
        parser.error("--scratch reads the heap meter: run `heapmeter python benchmarks/kernels_dense.py --scratch`")
    for threads in given.threads:
        torch.set_num_threads(threads)
        for family in given.families:
            for what, contenders in FAMILIES[family]():
                if given.scratch:
                    figures = {name: f"{scratch_bytes(run):,} bytes" for name, run in contenders.items()}
                else:
                    figures = {n: f"{ms:.3f} ms" for n, ms in milliseconds(contenders, given.repeats).items()}
                print(f"{threads} threads  {what}: ", "  ".join(f"{n} {v}" for n, v in figures.items()), flush=True)


if __name__ == "__main__":
    main()
