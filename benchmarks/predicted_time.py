"""The planner's time model against the clock: predicted and measured time of a step, as ratios to plain training.

    python benchmarks/predicted_time.py --model wrn-28-2      # measures one model, and writes the table anew
    python benchmarks/predicted_time.py --again               # predicts all anew, and measures nothing

Measured ones are medians of steps that were taken in turn, plain training among them, after three that warm up (the
second of two alike passes is recorded, the third runs from its tape), each in a process of its own.
Predicted ones use the rates of this machine as they are cached (`measuring/rates.py`), and nothing that this script
measured.
"""

import argparse
import datetime
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lean_steps import build, builtin, cpu_name
from turns import medians

import shoestring
from shoestring import Task
from shoestring.measuring import calibrate
from shoestring.measuring.calibration import load_cache
from shoestring.measuring.rates import device_rates
from shoestring.planning.options import PLAIN
from shoestring.planning.search import Search

HOME = Path(__file__).parents[1] / "docs"
GOAL = 0.15  # how far a predicted ratio may be off
NORMED: tuple[dict, ...] = (
    {"checkpoint": "no-bn"},
    {"checkpoint": "residual-2*"},
    {"precision": "fp16"},
    {"precision": "fp16", "checkpoint": "residual-2*", "microbatch": 10},
    {"nonzero": 30, "precision": "fp16", "checkpoint": "residual-2*", "microbatch": 10},
    {"nonzero": 10, "precision": "fp16", "checkpoint": "residual-2*", "microbatch": 4},
)
TOKENS: tuple[dict, ...] = (
    {"checkpoint": "residual-1"},
    {"precision": "fp16"},
    {"optimizer": "8bit"},
    {"microbatch": 2},
    {"precision": "fp16", "optimizer": "8bit", "checkpoint": "residual-1", "microbatch": 2},
    {"nonzero": 30, "precision": "fp16", "optimizer": "8bit"},
)
PAIRS = tuple(plan | ({"microbatch": 125} if "microbatch" in plan else {}) for plan in TOKENS)


def gpt() -> Task:
    """A GPT of two layers, small enough for a table to be made in minutes."""
    import zoo_models

    return zoo_models.task("gpt2")


MODELS: dict[str, tuple[int, tuple[dict, ...]]] = {
    "wrn-28-2": (100, NORMED),
    "resnet18": (8, tuple(plan | ({"microbatch": 2} if "microbatch" in plan else {}) for plan in NORMED)),
    "vit-tiny": (8, TOKENS),
    "dynamicconv-iwslt": (500, PAIRS),
    "gpt2": (8, TOKENS),
}


def task_of(model: str, size: int) -> Task:
    return gpt() if model == "gpt2" else builtin(model, size)


def lean_of(model: str, size: int, plan: dict) -> shoestring.training.apply.LeanTask:
    if model == "gpt2":
        return shoestring.apply(gpt(), shoestring.Plan(**plan))
    return build(builtin(model, size), plan)


def made(model: str, size: int, plan: dict) -> tuple[shoestring.training.apply.LeanTask, Any]:
    return lean_of(model, size, plan), task_of(model, size).batch


def measured(model: str, size: int, plans: list[dict], repeats: int) -> list[float]:
    """Median seconds of a step for each plan."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    return medians(made, [(model, size, plan) for plan in plans], repeats, clock)


def predicted(model: str, size: int, plans: Sequence[dict]) -> list[float]:
    """The planner's ratios of time to plain training."""
    search = Search(task_of(model, size), 0, device_rates(), dict(load_cache()), calibrate)
    options = [search.candidates.option(tuple(plan.items())) for plan in plans]
    return [search.time_ratio(option) for option in (PLAIN, *options)][1:]


def rows(model: str, repeats: int) -> list[dict]:
    size, plans = MODELS[model]
    clock = measured(model, size, [{}, *plans], repeats)
    return [
        {
            "plan": ", ".join(f"{k} {v}" for k, v in plan.items()),
            "predicted": foretold,
            "measured": taken / clock[0],
            "seconds": taken,
        }
        for plan, foretold, taken in zip(plans, predicted(model, size, plans), clock[1:], strict=True)
    ]


def table(found: dict[str, dict]) -> str:
    lines = ["| model | plan | predicted | measured | off |", "|---|---|---|---|---|"]
    every = [(model, row) for model, part in found.items() for row in part["rows"]]
    for model, row in every:
        off = row["predicted"] / row["measured"] - 1
        mark = "" if abs(off) <= GOAL else " **"
        size = MODELS[model][0]
        lines.append(
            f"| {model}, {size} | {row['plan']} | {row['predicted']:.2f} | {row['measured']:.2f} | {off:+.0%}{mark} |"
        )
    within = sum(abs(row["predicted"] / row["measured"] - 1) <= GOAL for _, row in every)
    where = {f"{part['where']}; {part['date']}" for part in found.values()}
    return f"""# The time model against the clock

Times of a step as ratios to plain training (eager, NCHW) of the same model. Predicted: what `plan` shows and ranks by,
from a trace and the rates of the machine (`planning/timing.py`). Measured: medians of steps taken in turn, each plan in
a process of its own. {within} of {len(every)} are within {GOAL:.0%}; ** marks the others.

Where: {"; ".join(sorted(where))}. By:
`python benchmarks/predicted_time.py --model MODEL`, one model after the other. On one thread the clock is CPU time.
The model's constants were chosen with these rows in sight: the table shows how well it fits them, not how well it
predicts others.

{chr(10).join(lines)}

What is off, as far as we know: sparse kernels on narrow maps with many channels (ResNet-18's 512 on 4 x 4) in
microbatches of 2, whose index is decoded for little work, are held to one layer of 1 and 8 examples; updates take no
time of their own beside what they allocate.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, nargs="*", default=[])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--again", action="store_true", help="predict the measured plans anew")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    store = HOME / "predicted_time.json"
    found = json.loads(store.read_text()) if store.exists() else {}
    for model in args.model:
        part = {"where": f"{cpu_name()}; torch {torch.__version__}", "date": str(datetime.date.today())}
        found[model] = part | {"rows": rows(model, args.repeats)}
        for row in found[model]["rows"]:
            print(
                f"{model}: predicted {row['predicted']:.2f}, measured {row['measured']:.2f}  {row['plan']}", flush=True
            )
        store.write_text(json.dumps(found, indent=1) + "\n")
    found = {model: found[model] for model in MODELS if model in found}
    for model, part in found.items() if args.again else ():
        for row, foretold in zip(part["rows"], predicted(model, *MODELS[model]), strict=True):
            row["predicted"] = foretold
    store.write_text(json.dumps(found, indent=1) + "\n")
    (HOME / "predicted_time.md").write_text(table(found))


if __name__ == "__main__":
    main()
