"""Where the time of a lean step in small microbatches goes: kernels, PyTorch's operators, and the code around them.

    python benchmarks/where_time_goes.py --threads 1 2     # a table for docs/techniques/microbatch.md

WRN-28-2, minibatch 100. A step runs by the code of modules, modes, hooks and autograd, as it did before there were
tapes, and from its tape. The calls on the tape are then clocked one by one: by the code the same operators run, so that
what the steps take beside them is that code, or the loop over the tape. Medians of several steps.
"""

import argparse
import inspect
import time
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from lean_steps import cpu_name
from readme_table import SIXTY
from turns import WARM_UPS

import shoestring

PLANS = (
    {"nonzero": 30, **SIXTY},
    {"nonzero": 20, **SIXTY, "microbatch": 4},
    {"nonzero": 10, **SIXTY, "microbatch": 4},
)
FAMILIES = {"sparse_": "sparse convolutions", "conv_": "dense convolutions", "batch_norm_": "batch norm"}
OPERATORS = "PyTorch's operators"


def family(function: Callable) -> str:
    """Which kernels a call on a tape belongs to, by the name of the compiled function that it launches."""
    variables = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    name = getattr(variables.get("kernel"), "__name__", "")
    return next((words for start, words in FAMILIES.items() if name.startswith(start)), OPERATORS)


def clocked(function: Callable, words: str, seconds: Counter) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = function(*args, **kwargs)
        seconds[words] += time.perf_counter() - start
        return result

    return call


def steps(lean: Any, batch: Any, repeats: int) -> float:
    """Median seconds of a step."""
    taken = []
    for _ in range(WARM_UPS + repeats):
        start = time.perf_counter()
        lean.step(batch)
        taken.append(time.perf_counter() - start)
    return median(taken[WARM_UPS:])


def parts(plan: dict, repeats: int) -> dict[str, float]:
    """Seconds of a step by the code and from the tape, and of the calls of each family."""
    found = {}
    for name, static in (("by the code", False), ("from the tape", True)):
        task = shoestring.builtin("wrn-28-2", batch=100).with_(static_graph=static)
        lean = shoestring.apply(task, shoestring.Plan(**plan))
        found[name] = steps(lean, task.batch, repeats)
    seconds = Counter[str]()
    tapes = lean.stepper.tapes
    heads = [
        head._replace(function=clocked(head.function, family(head.function), seconds)) for head in tapes._tape.heads
    ]
    tapes._tape = tapes._tape._replace(heads=heads)
    for _ in range(repeats):
        lean.step(task.batch)
    return found | {words: seconds[words] / repeats for words in (*FAMILIES.values(), OPERATORS)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    heads = ("before: by the code", "its code", "from the tape", "its loop", *FAMILIES.values(), OPERATORS)
    print(f"| {cpu_name().rpartition(',')[0]}: ms of a step | {' | '.join(heads)} |")
    print("|---" * (len(heads) + 1) + "|")
    for plan in PLANS:
        for threads in args.threads:
            torch.set_num_threads(threads)
            found = parts(plan, args.repeats)
            calls = sum(found[words] for words in (*FAMILIES.values(), OPERATORS))
            code, tape = found.pop("by the code"), found.pop("from the tape")
            figures = (code, code - calls, tape, tape - calls, *found.values())
            words = f"{plan['nonzero']}%, {plan['microbatch']}, {threads} thread{'s' * (threads > 1)}"
            print(f"| {words} | {' | '.join(f'{1e3 * figure:.0f}' for figure in figures)} |", flush=True)


if __name__ == "__main__":
    main()
