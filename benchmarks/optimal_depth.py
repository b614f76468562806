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
from shoestring.reporting.figures import figure_file, round_bytes
from shoestring.reporting.palette import ACCENT, FAINT, INK, MUTED
from shoestring.units import format_bytes

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
    depths, plain, lean = zip(*rows, strict=True)
    title = "Activations of a plain chain by depth, with and without checkpointing"
    about = "; ".join(f"{depth} layers: {a / 1e6:.1f} MB, optimal {b / 1e6:.1f} MB" for depth, a, b in rows)
    with figure_file(path, 6.4, 4.2, title, f"{about}.") as figure:
        figure.text(0.02, 0.95, "Activations at the peak of a plain chain", size=12, weight="bold", va="center")
        axes = figure.add_axes((0.1, 0.12, 0.66, 0.76))
        root = [lean[0] * (depth / depths[0]) ** 0.5 for depth in depths]
        for name, sizes, line, colour, lift in (
            ("as it is", plain, "o-", MUTED, 0),
            ("square root\nof the depth", root, ":", INK, 12),
            ("checkpoint optimal", lean, "o-", ACCENT, -6),
        ):
            axes.loglog(depths, sizes, line, color=colour)
            last = format_bytes(sizes[-1], 3) if line != ":" else ""
            place = {"textcoords": "offset points", "va": "center", "color": colour, "size": 9}
            axes.annotate(f"{name}\n{last}".strip(), (depths[-1], sizes[-1]), (9, lift), **place)
        axes.set(xlabel="layers")
        axes.minorticks_off()
        axes.set_xticks(depths, [f"{depth:,}" for depth in depths])
        axes.yaxis.set_major_formatter(lambda size, _: round_bytes(size))
        axes.yaxis.grid(True, color=FAINT, lw=0.7)
        axes.tick_params(length=0)


if __name__ == "__main__":
    main()
