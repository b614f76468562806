"""Heap peak and time of lean training steps beside plain PyTorch: WRN-28-2 or another built-in model.

    python benchmarks/lean_steps.py --heap                     # each plan in a fresh process under the heap meter
    python benchmarks/lean_steps.py --time --threads 1 2       # each in a process of its own, in turn, medians
    python benchmarks/lean_steps.py --heap --plan checkpoint=residual-2* microbatch=10

The heap figure is what the process allocates above its state after a warm-up of the same configuration, model building
included and the batch not: it is in place before. `pytorch` is what a user does to the model: channels_last,
torch.utils.checkpoint around each block, or, with --compile, torch.compile. Ratios are to the faster eager layout.
"""

import argparse
import gc
import json
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint
from turns import medians

import shoestring
import shoestring.training.apply
from shoestring.measuring import measure_heap
from shoestring.measuring.calibration import machine
from shoestring.models import materialise
from shoestring.units import format_bytes

PLANS = (
    {},
    {"pytorch": "channels_last"},
    {"pytorch": "checkpoint"},
    {"checkpoint": "no-bn"},
    {"checkpoint": "residual-1"},
    {"checkpoint": "residual-1*"},
    {"checkpoint": "residual-2"},
    {"checkpoint": "residual-2*"},
    {"checkpoint": "residual-2*", "microbatch": 10},
)
LAYOUTS = ({}, {"pytorch": "channels_last"})  # of plain eager PyTorch: the baselines
_batches: dict[tuple[str, int], tuple] = {}


def steps(model: str, size: int, plan: dict, count: int = 2) -> shoestring.training.apply.LeanTask:
    """Builds the model straight into its lean form and runs `count` steps: what the heap meter measures."""
    task = builtin(model, size)
    # The batch is made in the warm-up and stays: data is not the training's memory.
    batch = _batches.setdefault((model, size), task.batch)
    lean = build(task.with_(batch=batch), plan)
    del task  # nor is the description of the dense model
    gc.collect()  # nor what PyTorch's fake tensors left in cycles while techniques were applied; `train` does the same
    for _ in range(count):
        lean.step(batch)
    return lean


def builtin(model: str, batch: int) -> shoestring.Task:
    """A task whose model has no memory yet; a batch of sentences is counted in tokens."""
    sizes = {"tokens": batch} if model.startswith("dynamicconv") else {"batch": batch}
    return shoestring.builtin(model, device="meta", **sizes)


def build(task: shoestring.Task, plan: dict) -> shoestring.training.apply.LeanTask:
    """A task on the meta device -> the task under the plan, and as a user of PyTorch would change its model."""
    peer = plan.get("pytorch")
    lean = shoestring.apply(task, shoestring.Plan(**{word: plan[word] for word in plan if word != "pytorch"}))
    materialise(lean.model)
    if peer == "channels_last":
        lean.model.to(memory_format=torch.channels_last)
    if peer == "compile":
        lean.model.compile()
    for block in lean.model.blocks if peer == "checkpoint" else []:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return lean


def heap(model: str, batch: int, plan: dict) -> int:
    return measure_heap(f"{__file__}:steps", [model, batch, plan]).peak_bytes


def times(model: str, batch: int, plans: list[dict], repeats: int) -> list[float]:
    """Median seconds of a step for each plan, their steps in turn."""
    return medians(made, [(model, batch, plan) for plan in plans], repeats)


def made(model: str, batch: int, plan: dict) -> tuple[shoestring.training.apply.LeanTask, tuple]:
    task = builtin(model, batch)
    return build(task, plan), task.batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="wrn-28-2")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--heap", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    parser.add_argument("--compile", action="store_true", help="torch.compile too")
    parser.add_argument("--plan", nargs="+", action="append", help="FIELD=VALUE ..., may be repeated")
    args = parser.parse_args()
    plans = [dict(map(parse, plan)) for plan in args.plan] if args.plan else list(PLANS)
    plans = [*LAYOUTS, *([{"pytorch": "compile"}] if args.compile else []), *(p for p in plans if p not in LAYOUTS)]
    if args.heap:
        for plan in plans:
            print(f"{json.dumps(plan):60} heap peak {format_bytes(heap(args.model, args.batch, plan))}", flush=True)
    for threads in args.threads if args.time else []:
        torch.set_num_threads(threads)
        seconds_of = times(args.model, args.batch, plans, args.repeats)
        best = min(seconds_of[: len(LAYOUTS)])
        print(cpu_name())
        for plan, seconds in zip(plans, seconds_of, strict=True):
            print(f"{json.dumps(plan):60} {threads} threads {seconds:.3f} s  {seconds / best:.2f}x", flush=True)


def cpu_name() -> str:
    """The machine, as the tables in docs/ name it."""
    told = machine()
    return f"{told['cpu']}, {told['capability']}, {told['threads']} threads"


def parse(setting: str) -> tuple[str, str | int | float]:
    name, _, value = setting.partition("=")
    return name, int(value) if value.isdigit() else value


if __name__ == "__main__":
    main()
