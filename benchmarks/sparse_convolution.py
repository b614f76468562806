"""Times the 3x3 convolutions of WRN-28-2, forward and both gradients, sparse beside dense, interleaved.

    python benchmarks/sparse_convolution.py --batches 10 100 --threads 1 2

Contenders: PyTorch's dense convolution (NCHW, and channels_last beside it), dense with a mask on weight and
gradient, torch.sparse (CSR on unfolded maps, gradient sampled at the nonzeros), ours in FP32 and in FP16
storage. A figure is the sum over the 24 layers of each layer's median time, as a ratio of dense NCHW; in
brackets the same of the best times, which a busy machine disturbs less. With one thread, --cpu-time counts
the process's own time only.
"""

import argparse
import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import conv2d, fold, unfold

from shoestring.kernels import sparse_conv
from shoestring.kernels.sparse_index import encode


@dataclass(frozen=True)
class Layer:
    inside: int
    out: int
    size: int
    stride: int
    count: int  # how often WRN-28-2 has it


LAYERS = (
    Layer(16, 32, 32, 1, 1),
    Layer(32, 32, 32, 1, 7),
    Layer(32, 64, 32, 2, 1),
    Layer(64, 64, 16, 1, 7),
    Layer(64, 128, 16, 2, 1),
    Layer(128, 128, 8, 1, 7),
)
Passes = Callable[[], None]  # forward, and both gradients


def dense(x: Tensor, weight: Tensor, dy: Tensor, stride: int, mask: Tensor | None = None) -> Passes:
    def run() -> None:
        used = weight if mask is None else weight * mask
        conv2d(x, used, None, stride, 1)
        gradients = torch.ops.aten.convolution_backward(
            dy, x, used, [0], [stride] * 2, [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
        )
        if mask is not None:
            gradients[1].mul_(mask)

    return run


def sparse(x: Tensor, weight: Tensor, dy: Tensor, stride: int, positions: Tensor) -> Passes:
    values, index = weight.view(-1)[positions].contiguous(), encode(positions, weight.numel())
    gradient, out = torch.empty_like(values), weight.shape[0]
    geometry = (3, 3), (stride, stride), (1, 1), (1, 1)

    def run() -> None:  # as a layer does
        sparse_conv.sparse_conv2d_forward(x, values, index, out, *geometry)
        sparse_conv.sparse_conv2d_weight_gradient(x, dy, index, *geometry, out=gradient)
        sparse_conv.sparse_conv2d_input_gradient(dy, values, index, x.shape, *geometry)

    return run


def torch_csr(x: Tensor, weight: Tensor, dy: Tensor, stride: int) -> Passes:
    matrix = weight.view(weight.shape[0], -1).to_sparse_csr()
    columns = weight.view(weight.shape[0], -1).t().to_sparse_csr()
    flat_dy = dy.transpose(0, 1).reshape(dy.shape[1], -1)

    def run() -> None:
        unfolded = unfold(x, 3, padding=1, stride=stride).transpose(0, 1).reshape(matrix.shape[1], -1)
        matrix @ unfolded
        torch.sparse.sampled_addmm(matrix, flat_dy, unfolded.t(), beta=0)
        folded = (columns @ flat_dy).view(matrix.shape[1], x.shape[0], -1).transpose(0, 1)
        fold(folded, x.shape[2:], 3, padding=1, stride=stride)

    return run


def contenders(layer: Layer, batch: int, densities: list[float], csr: bool) -> dict[str, Passes]:
    """A layer -> its contenders, by name; what depends on the density has it behind a blank."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, layer.inside, layer.size, layer.size, generator=generator)
    dy_size = layer.size // layer.stride
    dy = torch.randn(batch, layer.out, dy_size, dy_size, generator=generator)
    weight = torch.randn(layer.out, layer.inside, 3, 3, generator=generator) * 0.05
    last = [t.to(memory_format=torch.channels_last) for t in (x, weight, dy)]
    found = {"dense NCHW": dense(x, weight, dy, layer.stride), "channels_last": dense(*last, layer.stride)}
    for density in densities:
        order = torch.randperm(weight.numel(), generator=generator)
        positions = order[: round(weight.numel() * density)].sort().values
        mask = torch.zeros(weight.numel()).index_fill_(0, positions, 1).view_as(weight)
        found[f"masked {density}"] = dense(x, weight, dy, layer.stride, mask)
        if csr:
            found[f"torch.sparse {density}"] = torch_csr(x, weight * mask, dy, layer.stride)
        found[f"ours {density}"] = sparse(x, weight, dy, layer.stride, positions)
        found[f"ours-fp16 {density}"] = sparse(x.half(), weight.half(), dy.half(), layer.stride, positions)
    return found


def interleaved(runs: dict[str, Passes], repeats: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            start = clock()
            run()
            if repeat:  # the first warms up
                seconds[name].append(clock() - start)
    return seconds


def keep_memory() -> None:
    """Freed memory stays with the process: page faults of fresh memory are timed for no contender."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        trim_threshold, mmap_threshold = -1, -3
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(mmap_threshold, 2**25)  # the largest that is accepted


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--densities", type=float, nargs="+", default=[0.5, 0.3, 0.2, 0.1])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--csr", action="store_true", help="time torch.sparse too: slow, and large")
    parser.add_argument("--cpu-time", action="store_true", help="for a busy machine: CPU seconds, one thread")
    arguments = parser.parse_args()
    keep_memory()
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for batch in arguments.batches:
            report(threads, batch, arguments)


def report(threads: int, batch: int, arguments: argparse.Namespace) -> None:
    medians: dict[str, float] = {}
    best: dict[str, float] = {}
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    for layer in LAYERS:
        runs = contenders(layer, batch, arguments.densities, arguments.csr)
        for name, seconds in interleaved(runs, arguments.repeats, clock).items():
            medians[name] = medians.get(name, 0) + layer.count * median(seconds)
            best[name] = best.get(name, 0) + layer.count * min(seconds)
    base, best_base = medians["dense NCHW"], best["dense NCHW"]

    def cell(name: str) -> str:
        return f"{medians[name] / base:.3f} ({best[name] / best_base:.3f})"

    print(
        f"\n{threads} threads, batch {batch}: dense NCHW {base * 1e3:.1f} ms (best {best_base * 1e3:.1f}), "
        f"channels_last {cell('channels_last')}"
    )
    kinds = ["masked", *(["torch.sparse"] if arguments.csr else []), "ours", "ours-fp16"]
    print(f"{'nonzero':>8}" + "".join(f"{kind:>18}" for kind in kinds))
    for density in arguments.densities:
        print(f"{density:>8.0%}" + "".join(f"{cell(f'{kind} {density}'):>18}" for kind in kinds), flush=True)


if __name__ == "__main__":
    main()
