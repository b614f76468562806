"""`shoestring bench MODEL`: measures plain PyTorch and the lean run, interleaved: the savings and their cost."""

import argparse
import statistics
import time
from typing import TYPE_CHECKING, Any

from .baselines import Baseline, baselines
from .model import add_model, load_task, users_code
from .options import WrongUsage, add_techniques, add_threads, command, given, print_json, techniques_of, whole_number
from .plan import add_budget, add_risk, make_plan

if TYPE_CHECKING:
    from ..planning.plan import Plan
    from ..task import Task
    from ..training.apply import LeanTask

EXAMPLES = (
    "wrn-28-2 --batch 100 --checkpoint 'residual-2*' --microbatch 10",
    "wrn-28-2 --batch 100 --budget 90MB --json",
    "wrn-28-2 --batch 100 --precision fp16 --compile",
)


def add(subparsers: Any) -> None:
    parser = command(subparsers, "bench", run, "measure the lean run beside plain PyTorch", EXAMPLES)
    add_model(parser)
    add_techniques(parser)
    add_budget(parser, "; alone it is planned for, and named techniques are held to it")
    add_risk(parser)
    parser.add_argument(
        "--steps", type=whole_number(1, 1000), default=5, metavar="N", help="timed steps of each (default: 5)"
    )
    parser.add_argument("--compile", action="store_true", help="beside torch.compile too, which takes minutes")
    add_threads(parser)


def run(args: argparse.Namespace) -> int:
    import torch

    if args.threads:
        torch.set_num_threads(args.threads)
    with users_code(args.model):
        data = measure(args)
    if args.json:
        print_json(data)
    else:
        show(data)
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments -> all runs: predicted and measured peak, seconds per step, and the ratios of the lean one to the
    faster eager layout of plain PyTorch."""
    from ..planning.plan import Plan
    from ..training.apply import lean_task

    sizes = given(args, "batch", "tokens")
    techniques = techniques_of(args)
    if not args.budget and not techniques:
        raise WrongUsage("there is nothing to compare: name techniques (see --help), or a --budget")
    blank = load_task(args.model, sizes, device="meta")
    plan = make_plan(blank, args) if args.budget else Plan(**techniques)
    changed = load_task(args.model, sizes, device="meta")  # one of its own: a user's model is changed in place
    plain = baselines(blank.model, args.compile)
    runs = {name: (Plan(), way) for name, way in plain.items()} | {"lean": (plan, Baseline("Shoestring"))}
    rows: dict[str, dict[str, Any]] = {name: {"settings": plan.techniques()} for name, (plan, _) in runs.items()}
    rows["baseline"] |= predict(blank)
    rows["lean"] |= predict(lean_task(changed, plan))
    for name, (own, way) in runs.items():
        rows[name]["words"] = way.words
        rows[name]["measured_peak_bytes"] = measured_peak(load_task(args.model, sizes, device="meta"), own, way)
    for name, seconds in times(args, sizes, runs).items():
        rows[name]["seconds_per_step"] = seconds
    best = min((name for name, way in plain.items() if way.eager), key=lambda name: rows[name]["seconds_per_step"])
    fastest, lean = rows[best], rows["lean"]
    return {
        "task": blank.name,
        **rows,
        "runs": list(rows),
        "best_eager": best,
        "memory_ratio": fastest["measured_peak_bytes"] / lean["measured_peak_bytes"],
        "time_ratio": lean["seconds_per_step"] / fastest["seconds_per_step"],
        "predicted_peak_bytes": lean["predicted_peak_bytes"],
        "measured_peak_bytes": lean["measured_peak_bytes"],
    }


def predict(task: "Task") -> dict[str, Any]:
    from ..measuring import calibrated
    from ..profiling import profile

    return {"predicted_peak_bytes": calibrated(lambda table: profile(task, table, brief=True)).peak_bytes}


def build(task: "Task", plan: "Plan", way: Baseline) -> "LeanTask":
    """A task on the meta device -> the lean task with weights, built straight into its lean form, and warm."""
    from ..models import materialise
    from ..training.apply import apply

    lean = apply(task, plan)
    materialise(lean.model)
    way.change(lean)
    for _ in range(way.warm_up):
        lean.step(way.lay_out(task.batch))
    return lean


MOST_STEPS = 40  # until FP16 has found its loss scale; it skips the updates before


def measured_peak(task: "Task", plan: "Plan", way: Baseline) -> int:
    """The peak of steps until two updates were made, model, optimizer and batch included, as the allocator meter reads
    it: as a run is measured. Who built the model does not matter."""
    from ..errors import Diverged
    from ..measuring.allocator import measure_allocator
    from ..structure import tensors

    lean, batch = build(task, plan, way), way.lay_out(task.batch)
    wanted = lean.stepper.updates + 2

    def two_updates() -> None:
        for _ in range(MOST_STEPS):
            lean.step(batch)
            if lean.stepper.updates == wanted:
                return
        raise Diverged(f"of {MOST_STEPS} updates the loss scale skipped all but {lean.stepper.updates}: use bf16")

    return measure_allocator(two_updates, [*lean.held(), *tensors(batch)]).peak_bytes


def times(args: argparse.Namespace, sizes: dict, runs: dict[str, tuple["Plan", Baseline]]) -> dict[str, float]:
    """Median seconds per step of each run; their steps alternate, so that all see the same load."""
    leans = {name: build(load_task(args.model, sizes, device="meta"), *run) for name, run in runs.items()}
    batch = load_task(args.model, sizes, device="meta").batch
    batches = {name: way.lay_out(batch) for name, (_, way) in runs.items()}
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(args.steps + 1):
        for name, lean in leans.items():
            start = time.perf_counter()
            lean.step(batches[name])
            if number:  # the first is the warm-up
                taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def show(data: dict[str, Any]) -> None:
    """Prints all runs and the ratios."""
    from ..techniques.words import described
    from ..units import format_bytes

    for name in data["runs"]:
        row = data[name]
        predicted = [f"predicted {format_bytes(row[key])}" for key in ("predicted_peak_bytes",) if key in row]
        figures = *predicted, f"measured {format_bytes(row['measured_peak_bytes'])}"
        print(f"{name:13} {described(row['settings'].items()) or row['words']}")
        print(f"              {', '.join(figures)}, {row['seconds_per_step']:.3f} s per step")
    print("              (the tensors of a step: model, gradients, optimizer, activations and the batch, in all)")
    beside = "" if data["best_eager"] == "baseline" else f", beside {data['best_eager']}, the faster layout here"
    print(f"{data['memory_ratio']:.1f}x less memory, {data['time_ratio']:.2f}x the time{beside}")
