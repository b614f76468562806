"""Accuracy of sparse networks beside dense ones of the same memory: the paper's Figure 8 in small, on CIFAR-10.

    python benchmarks/accuracy_sparsity.py --data /work/shared/data            # trains what is not there yet
    python benchmarks/accuracy_sparsity.py --report docs/accuracy_sparsity.md  # writes what is there as a table

Each run that ends adds a line to the results file; a script that was stopped goes on from there. Memory is that of a
training step in the setting of the paper's Figure 8 as far as it is built (residual-2*, microbatches of 10), predicted;
narrower networks are those whose memory is nearest to a sparse one's. Training itself runs whole batches, without
checkpoints, for speed: they would change the numbers only through batch norm's statistics of a microbatch.
"""

import argparse
import time
from functools import cache

import torch
from accuracy_runs import Runs, cifar, command_line, mean_and_spread, train_or_report
from lean_steps import cpu_name

import shoestring
from shoestring.models import materialise
from shoestring.techniques import sparsity
from shoestring.training.apply import lean_task
from shoestring.training.evaluate import accuracy
from shoestring.training.loop import train
from shoestring.training.schedules import mostafa_wang

MEMORY_PLAN = shoestring.Plan(checkpoint="residual-2*", microbatch=10)
MEMORY_BATCH = 20
WIDTHS = [round(0.4 + 0.05 * step, 2) for step in range(12)]


def settings_of(args: argparse.Namespace) -> dict:
    """What must be the same for results to stand in one table."""
    names = ("base", "shallow", "side", "batch", "updates", "lr", "frequency")
    return {name: getattr(args, name) for name in names}


# -- the networks ------------------------------------------------------------------------------------------------
def networks(args: argparse.Namespace) -> dict[str, dict]:
    """Name -> the model, and what makes it sparse."""
    found: dict[str, dict] = {"dense": {"model": args.base}}
    for nonzero in args.nonzero:
        for method in ("dsr", "static"):
            found[f"{method} {nonzero:g}%"] = {"model": args.base, "nonzero": nonzero, "method": method}
    for nonzero in args.nonzero:
        model = narrow(args.base, args.side, nonzero)
        found[f"narrow: {model}"] = {"model": model}
    found[f"shallow: {args.shallow}"] = {"model": args.shallow}
    return found


def make(network: dict, side: int, batch: int, updates: int = 100_000, frequency: float = 1, seed: int = 0):
    task = shoestring.builtin(network["model"], batch=batch, device="meta", image=side)
    if "nonzero" not in network:
        return task
    often = frequency * sparsity.CONVOLUTIONAL[network["nonzero"]][1]
    how = sparsity.Settings(
        network["nonzero"], network["method"], frequency_multiplier=often, updates=updates, seed=seed
    )
    return sparsity.apply(task, how)


@cache
def memory_bytes(model: str, side: int, nonzero: float | None = None) -> int:
    """The predicted peak of a training step in the setting of the table."""
    network = {"model": model} | ({"nonzero": nonzero, "method": "static"} if nonzero else {})
    return shoestring.profile(lean_task(make(network, side, MEMORY_BATCH), MEMORY_PLAN), calibrate=False).peak_bytes


def narrow(base: str, side: int, nonzero: float) -> str:
    """The narrower network whose memory is nearest to that of the sparse one."""
    depth = base.split("-")[1]
    wanted = memory_bytes(base, side, nonzero)
    return min((f"wrn-{depth}-{w}" for w in WIDTHS), key=lambda model: abs(memory_bytes(model, side) - wanted))


# -- the study ---------------------------------------------------------------------------------------------------
def trained(network: dict, seed: int, args: argparse.Namespace) -> dict:
    """Trains one network -> its test accuracy and time."""
    data = cifar(args.data, args.batch, args.side, seed)
    task = make(network, args.side, args.batch, args.updates, args.frequency, seed)
    task = task.with_(loss=data.loss, batch=data.train.read(0, 0), optimizer=shoestring.SGD(args.lr, 0.9, True, 5e-4))
    materialise(task.model, seed=seed)
    start = time.perf_counter()
    train(task, data.train, updates=args.updates, schedule=mostafa_wang(args.updates), seed=seed)
    seconds = time.perf_counter() - start
    return {"accuracy": accuracy(task, data.test, data.prepare)(task.model), "seconds": seconds}


def study(args: argparse.Namespace) -> None:
    runs, found = Runs(args.results, settings_of(args)), networks(args)
    for run in runs.missing({"seed": seed, "name": name} for seed in range(args.seeds) for name in found):
        network = found[run["name"]]
        memory = memory_bytes(network["model"], args.side, network.get("nonzero"))
        runs.add(run | {"memory_bytes": memory} | trained(network, run["seed"], args))


# -- the table ---------------------------------------------------------------------------------------------------
def report(args: argparse.Namespace) -> str:
    records = Runs(args.results, settings_of(args))()
    rows = []
    for name in dict.fromkeys(record["name"] for record in records):
        mine = [record for record in records if record["name"] == name]
        found = [record["accuracy"] for record in mine]
        memory = mine[0]["memory_bytes"] / 1e6
        rows.append(f"| {name} | {memory:.2f} | {mean_and_spread(found, digits=2)} | {len(found)} |")
    settings = ", ".join(f"{name} {value}" for name, value in settings_of(args).items())
    return "\n".join(
        [
            "# Accuracy of sparse training, measured",
            "",
            f"CIFAR-10, made by `benchmarks/accuracy_sparsity.py` with: {settings}.",
            "SGD with Nesterov momentum 0.9 and weight decay 5e-4, learning rate divided by 5 after 30, 60 and 80% of",
            "the run. `frequency` is how many times as often as in the paper it is rewired; `side` is the pixels to",
            "which images were averaged down. Accuracy is the mean and standard deviation over seeds.",
            f"Memory is the predicted peak of a training step of {MEMORY_BATCH} images, FP32, residual-2*,",
            "microbatches of 10, without the scratch inside PyTorch's operators.",
            f"Trained on: {cpu_name()}; torch {torch.__version__}.",
            "",
            "| network | MB | test accuracy, % | seeds |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> None:
    parser = command_line(__doc__.splitlines()[0], "runs/accuracy_sparsity.jsonl")
    parser.add_argument("--base", default="wrn-16-1")
    parser.add_argument("--shallow", default="wrn-10-1")
    parser.add_argument("--nonzero", type=float, nargs="+", default=[30, 20, 10])
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--frequency", type=float, default=8, help="rewirings: times those of the paper")
    train_or_report(parser.parse_args(), study, report)


if __name__ == "__main__":
    main()
