"""Activation memory of a plain chain under `optimal` checkpointing: it grows as the square root of the depth.

    python benchmarks/optimal_depth.py [--figure docs/optimal_depth.svg]

Traced on fake tensors, for 16 to 1,024 layers; the activations are what is alive at the peak besides model, gradients
and optimizer state.
"""

import argparse

import torch
from torch import nn

import shoestring
from shoestring import SGD, Plan, Task

DEPTHS = (16, 32, 64, 128, 256, 512, 1024)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def chain(depth: int, width: int = 16, batch: int = 4096) -> Task:
    """A chain whose activations are far larger than its weights."""
    with torch.device("meta"):
        model = nn.Sequential(*[Layer(width) for _ in range(depth)])
    return Task(model, lambda m, x: m(x).square().mean(), torch.empty(batch, width), SGD(), name=f"chain-{depth}")


def activation_bytes(task: Task) -> int:
    parts = shoestring.profile(task, calibrate=False).bytes_by_category
    return parts["activation"] + parts["activation_gradient"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--figure", help="where to draw it")
    args = parser.parse_args()
    rows = []
    for depth in DEPTHS:
        plain = activation_bytes(chain(depth))
        lean = activation_bytes(shoestring.apply(chain(depth), Plan(checkpoint="optimal")).task)
        rows.append((depth, plain, lean))
        print(f"{depth:5} layers: none {plain / 1e6:8.2f} MB, optimal {lean / 1e6:7.2f} MB, "
              f"optimal / sqrt(depth) {lean / depth**0.5 / 1e6:.3f} MB", flush=True)  # fmt: skip
    if args.figure:
        draw(args.figure, rows)


def draw(path: str, rows: list[tuple[int, int, int]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    depths, plain, lean = zip(*rows, strict=True)
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    axes.loglog(depths, [b / 1e6 for b in plain], "o-", label="none", color="#888888")
    axes.loglog(depths, [b / 1e6 for b in lean], "o-", label="optimal", color="#2a6f97")
    root = [lean[0] / 1e6 * (d / depths[0]) ** 0.5 for d in depths]
    axes.loglog(depths, root, ":", color="#2a6f97", label="square root of the depth")
    axes.set(xlabel="layers", ylabel="activations at the peak, MB", title="A plain chain, checkpointed")
    axes.set_xticks(depths, [str(d) for d in depths])
    axes.legend(frameon=False)
    figure.savefig(path)


if __name__ == "__main__":
    main()
