"""Time of a rewiring beside that of training steps: what share of a run's time the default schedule spends on it.

python benchmarks/rewiring.py                                   # WRN-28-2 at 30, 20 and 10% nonzero
python benchmarks/rewiring.py --model wrn-28-10 --nonzero 10 --threads 1
"""

import argparse
import statistics
import time

import torch
from torch import nn

import shoestring
from shoestring.models import materialise
from shoestring.techniques import sparsity
from shoestring.techniques.sparsity.rewiring import sparse_layers

UPDATES = 100_000  # of the paper's run


def seconds_of(run, repeats: int) -> float:
    """Median seconds of a call, the first left out."""
    taken = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def compare(model: str, batch: int, nonzero: float, method: str, repeats: int) -> None:
    task = shoestring.builtin(model, batch=batch, device="meta")
    lean = shoestring.apply(sparsity.apply(task, sparsity.Settings(nonzero, method)), shoestring.Plan())
    materialise(lean.model)
    (hook,) = lean.task.after_update

    def rewire() -> int:
        for layer in sparse_layers(lean.model):  # as if trained: what has been grown is no longer zero
            nn.init.normal_(layer.values, std=0.05)
        return hook.rewire(lean.model, lean.stepper.optimizer)

    def only_draw() -> None:
        for layer in sparse_layers(lean.model):
            nn.init.normal_(layer.values, std=0.05)

    step = seconds_of(lambda: lean.step(task.batch), repeats)
    rewiring = seconds_of(rewire, 3 * repeats) - seconds_of(only_draw, 3 * repeats)
    times = sum(hook.schedule.is_due(update, UPDATES) for update in range(1, UPDATES + 1))
    share = times * rewiring / (UPDATES * step)
    print(
        f"{model} {nonzero:g}% {method}: step {1000 * step:.0f} ms, rewiring {1000 * rewiring:.1f} ms, "
        f"{times} times in {UPDATES:,} updates: {100 * share:.3f}% of training",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="wrn-28-2")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--nonzero", type=float, nargs="+", default=[30, 20, 10])
    parser.add_argument("--methods", nargs="+", default=["dsr", "set"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for nonzero in args.nonzero:
        for method in args.methods:
            compare(args.model, args.batch, nonzero, method, args.repeats)


if __name__ == "__main__":
    main()
