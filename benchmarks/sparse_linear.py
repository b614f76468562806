"""Times sparse linear layers and embeddings, forward and gradients, beside PyTorch's dense ones, interleaved.

    python benchmarks/sparse_linear.py --threads 1 2

Linear layers of the DynamicConv Transformer (tokens x in x out) and its embedding (rows x width). A figure is the
median time as a ratio of dense FP32.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from sparse_convolution import interleaved

from shoestring.kernels.sparse_embedding import sparse_embedding_forward, sparse_embedding_gradient
from shoestring.kernels.sparse_index import encode
from shoestring.kernels.sparse_linear import (
    sparse_linear_forward,
    sparse_linear_input_gradient,
    sparse_linear_weight_gradient,
)

LINEAR = ((500, 512, 1024), (500, 1024, 512), (2000, 512, 512), (100, 512, 2048))
EMBEDDING = (10_000, 512)
DENSITIES = (0.5, 0.3, 0.2, 0.1)


def nonzeros(weight: torch.Tensor, density: float, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    order = torch.randperm(weight.numel(), generator=generator)
    positions = order[: round(weight.numel() * density)].sort().values
    return weight.view(-1)[positions].contiguous(), encode(positions, weight.numel())


def linear(tokens: int, width: int, rows: int) -> dict[str, Callable]:
    generator = torch.Generator().manual_seed(0)
    sizes = (tokens, width), (tokens, rows), (rows, width)
    x, dy, weight = (torch.randn(size, generator=generator) for size in sizes)

    def dense() -> None:
        F.linear(x, weight), dy @ weight, dy.t() @ x

    runs: dict[str, Callable] = {"dense": dense}
    for density in DENSITIES:
        for name, form in (("fp32", torch.float32), ("fp16", torch.float16)):
            values, index = nonzeros(weight.to(form), density, generator)
            runs[f"{density:.0%} {name}"] = sparse_linear_passes(x.to(form), dy.to(form), values, index)
    return runs


def sparse_linear_passes(x, dy, values, index) -> Callable:
    gradient = torch.empty_like(values)

    def run() -> None:
        sparse_linear_forward(x, values, index, dy.shape[1])
        sparse_linear_input_gradient(dy, values, index, x.shape[1])
        sparse_linear_weight_gradient(x, dy, index, out=gradient)

    return run


def embedding(tokens: int, rows: int, width: int) -> dict[str, Callable]:
    generator = torch.Generator().manual_seed(0)
    table, ids = torch.randn(rows, width, generator=generator), torch.randint(rows, (tokens,), generator=generator)
    dy = torch.randn(tokens, width, generator=generator)

    def dense() -> None:
        F.embedding(ids, table)
        torch.ops.aten.embedding_dense_backward(dy, ids, rows, -1, False)

    runs: dict[str, Callable] = {"dense": dense}
    for density in DENSITIES:
        values, index = nonzeros(table, density, generator)
        runs[f"{density:.0%} fp32"] = sparse_embedding_passes(ids, dy, values, index, (rows, width))
    return runs


def sparse_embedding_passes(ids, dy, values, index, shape) -> Callable:
    gradient = torch.empty_like(values)

    def run() -> None:
        sparse_embedding_forward(ids, values, index, *shape)
        sparse_embedding_gradient(ids, dy, index, *shape, out=gradient)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    works = {f"linear {' x '.join(map(str, sizes))}": linear(*sizes) for sizes in LINEAR}
    works[f"embedding {EMBEDDING[0]} x {EMBEDDING[1]}, 500 tokens"] = embedding(500, *EMBEDDING)
    for threads in args.threads:
        torch.set_num_threads(threads)
        for name, runs in works.items():
            taken = interleaved(runs, args.repeats, time.perf_counter)
            found = {run: statistics.median(seconds) for run, seconds in taken.items()}
            ratios = ", ".join(f"{k} {v / found['dense']:.2f}" for k, v in found.items() if k != "dense")
            print(f"{threads} threads, {name}: dense {found['dense'] * 1000:.1f} ms; {ratios}", flush=True)


if __name__ == "__main__":
    main()
