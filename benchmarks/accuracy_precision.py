"""Quality of 16-bit training beside FP32: a small WRN on CIFAR-10, a small DynamicConv Transformer on multi30k.

    python benchmarks/accuracy_precision.py --data /work/shared/data             # trains what is not there yet
    python benchmarks/accuracy_precision.py --report docs/accuracy_precision.md  # writes what is there as a table

Each run that ends adds a line to the results file; a script that was stopped goes on from there. For one seed, all
precisions start from the same weights (rounded to their 16 bits) and read the same batches.
"""

import argparse
import statistics
import time
from functools import cache

import torch
from accuracy_runs import Runs, cifar, command_line, mean_and_spread, train_or_report

import shoestring
from shoestring.data import open_pairs, token_batches
from shoestring.models import materialise
from shoestring.models.dynamicconv import DynamicConvTransformer, Settings
from shoestring.models.translation import count_target_tokens, translation_loss
from shoestring.tokens import PAD
from shoestring.training.apply import LeanTask, apply
from shoestring.training.evaluate import accuracy, evaluating, mean_loss, within
from shoestring.training.events import Updated
from shoestring.training.loop import train
from shoestring.training.schedules import InverseSqrt, mostafa_wang
from shoestring.training.translate import bleu, translate

PRECISIONS = ("fp32", "fp16", "bf16")
LAST = 50  # updates, whose mean is the final training loss


def settings_of(args: argparse.Namespace) -> dict:
    """What must be the same for results to stand in one table."""
    return {name: value for name, value in vars(args).items() if name not in ("data", "seeds", "results", "report")}


def plan(precision: str) -> shoestring.Plan:
    return shoestring.Plan() if precision == "fp32" else shoestring.Plan(precision=precision)


# -- the two tasks -----------------------------------------------------------------------------------------------
def images(precision: str, seed: int, args: argparse.Namespace) -> dict:
    """Trains the WRN -> its test accuracy in percent."""
    data = cifar(f"{args.data}/cifar-10-batches-bin", args.batch, args.side, seed)
    task = shoestring.builtin(args.model, batch=args.batch, device="meta", image=args.side)
    task = task.with_(loss=data.loss, batch=data.train.read(0, 0), optimizer=shoestring.SGD(0.1, 0.9, True, 5e-4))
    materialise(task.model, seed=seed)
    lean = apply(task, plan(precision))
    told = trained(lean, data.train, args.updates, mostafa_wang(args.updates), seed)
    return told | {"test accuracy, %": accuracy(lean.task, data.test, data.prepare)(lean.model)}


def pairs(precision: str, seed: int, args: argparse.Namespace) -> dict:
    """Trains the Transformer -> its validation loss, and BLEU of greedy translations of the test sentences."""
    corpus = open_once(f"{args.data}/multi30k.de-en", vocabulary=args.vocabulary)
    kernels = tuple(args.kernels)
    sizes = Settings(
        len(corpus.source), len(corpus.target), args.width, 2 * args.width, 4, kernels, kernels, args.dropout
    )
    torch.manual_seed(seed)
    data = token_batches(corpus.train, args.tokens, seed=seed, longest=100)
    valid = token_batches(corpus.valid, args.tokens, longest=100)
    task = shoestring.Task(
        DynamicConvTransformer(sizes),
        translation_loss,
        data.read(0, 0),
        shoestring.Adam(args.lr, (0.9, 0.98), weight_decay=1e-4),
        items=count_target_tokens,
        padding=PAD,
        split=iter,
    )
    lean = apply(task, plan(precision))
    told = trained(lean, data, args.translation_updates, InverseSqrt(args.translation_updates, args.warmup), seed)
    return told | {
        "validation loss": mean_loss(lean.task, valid)(lean.model),
        "test BLEU": test_bleu(lean, corpus),
    }


def test_bleu(lean: LeanTask, corpus) -> float:
    with evaluating(lean.model), within(lean.task, lean.model):
        texts = translate(lean.model, corpus.test.source, corpus.target, beams=1)
    return bleu(texts, list(corpus.test.references.texts()))


def trained(lean: LeanTask, data, updates: int, schedule, seed: int) -> dict:
    """Trains -> the mean loss of the last updates, the loss scale at the end, the seconds."""
    losses: list[float] = []

    def listen(event) -> None:
        if isinstance(event, Updated):
            losses.append(event.loss)

    start = time.perf_counter()
    train(lean, data, updates=updates, schedule=schedule, seed=seed, listeners=[listen])
    scale = lean.stepper.scale
    return {
        "training loss": statistics.mean(losses[-LAST:]),
        "skipped updates": len(losses) - scale.updates if scale else 0,
        "loss scale at the end": scale.value if scale else None,
        "seconds": time.perf_counter() - start,
    }


open_once = cache(open_pairs)
TASKS = {"CIFAR-10": images, "multi30k": pairs}
QUALITIES = {"CIFAR-10": ("test accuracy, %",), "multi30k": ("validation loss", "test BLEU")}


# -- the study ---------------------------------------------------------------------------------------------------
def study(args: argparse.Namespace) -> None:
    runs = Runs(args.results, settings_of(args))
    wanted = [
        {"seed": seed, "task": task, "precision": precision}
        for seed in range(args.seeds)
        for task in TASKS
        for precision in PRECISIONS
    ]
    wanted.sort(key=lambda run: run["precision"] == "bf16")  # last, if there is no time for all
    for run in runs.missing(wanted):
        runs.add(run | TASKS[run["task"]](run["precision"], run["seed"], args))


# -- the table ---------------------------------------------------------------------------------------------------
def table(records: list[dict], task: str) -> list[str]:
    names = (*QUALITIES[task], "training loss", "skipped updates")
    lines = [f"| precision | {' | '.join(names)} | seeds |", "|---" * (len(names) + 2) + "|"]
    for precision in PRECISIONS:
        mine = [r for r in records if (r["task"], r["precision"]) == (task, precision)]
        if mine:
            lines.append(f"| {precision} | {' | '.join(summary(mine, name) for name in names)} | {len(mine)} |")
    return lines


def summary(records: list[dict], name: str) -> str:
    """Mean and standard deviation over seeds; of skipped updates the mean alone."""
    values = [record[name] for record in records]
    if name == "skipped updates":
        return f"{statistics.mean(values):.0f}"
    return mean_and_spread(values, digits=3 if "loss" in name else 2)


def differences(records: list[dict], task: str) -> list[str]:
    """16 bits less FP32 on the same seed, for the first quality of a task."""
    name, lines = QUALITIES[task][0], []
    found = {(r["precision"], r["seed"]): r[name] for r in records if r["task"] == task}
    for precision in PRECISIONS[1:]:
        seeds = [seed for form, seed in found if form == precision and ("fp32", seed) in found]
        told = ", ".join(f"{found[precision, seed] - found['fp32', seed]:+.3f}" for seed in seeds)
        lines += [f"{precision} less fp32, {name}, seed by seed: {told}.", ""] if told else []
    return lines


def report(args: argparse.Namespace) -> str:
    records = Runs(args.results, settings_of(args))()
    settings = ", ".join(f"{name} {value}" for name, value in settings_of(args).items())
    parts = [
        "# Quality of 16-bit training, measured",
        "",
        "Weights, gradients, optimizer state and activations in 16 bits, no FP32 copy, beside FP32: the same seeds,",
        "the same first weights, the same batches. Mean ± standard deviation over seeds.",
        f"Made by `benchmarks/accuracy_precision.py` with: {settings}.",
        f"The training loss is the mean of the last {LAST} updates.",
        "",
        f"## CIFAR-10: {args.model} on images averaged to {args.side} x {args.side}",
        "SGD with Nesterov momentum 0.9, weight decay 5e-4, learning rate 0.1, divided by 5 after 30, 60 and 80%.",
        "",
        *table(records, "CIFAR-10"),
        "",
        *differences(records, "CIFAR-10"),
        "## multi30k, German to English: a small DynamicConv Transformer",
        f"Width {args.width}, kernels {args.kernels} in encoder and decoder, {args.tokens:,} tokens per update, Adam",
        f"(0.9, 0.98) at {args.lr:g} with a warm-up and the inverse square root; smoothed labels in both losses; BLEU",
        "of greedy translations. The runs are short: the losses are what is compared, not the state of the art.",
        "",
        *table(records, "multi30k"),
        "",
        *differences(records, "multi30k"),
    ]
    return "\n".join(parts)


def main() -> None:
    parser = command_line(__doc__.splitlines()[0], "runs/accuracy_precision.jsonl")
    parser.add_argument("--model", default="wrn-10-1")
    parser.add_argument("--updates", type=int, default=600)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--kernels", type=int, nargs="+", default=[3, 7])
    parser.add_argument("--vocabulary", type=int, default=2000)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=float, default=0.15)
    parser.add_argument("--translation-updates", type=int, default=350)
    train_or_report(parser.parse_args(), study, report)


if __name__ == "__main__":
    main()
