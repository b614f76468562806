"""A zoo of real models (transformers, diffusers): profile, plans, updates and manners, a process for each model.

    python benchmarks/zoo.py                          # all of them, and docs/zoo.md from what was found
    python benchmarks/zoo.py --model bert llama       # some, whose rows take the place of earlier ones
    python benchmarks/zoo.py --jobs 2                 # two models at a time
    python benchmarks/zoo.py --missing                # those that docs/zoo.json does not have: goes on after a stop
    python benchmarks/zoo.py --table                  # docs/zoo.md once more, from docs/zoo.json

Ends with exit code 1 if a cell does not hold. Heap figures are those of the heap meter in a fresh process: what a task
and its steps allocate above what the libraries hold, the batch included.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import zoo_models
from zoo_models import MODELS

import shoestring
from shoestring import SGD, NoPlanFits, Plan, ShoestringError, Task
from shoestring.measuring import heap, measure_heap
from shoestring.techniques import checkpoint

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "tests" / "contract"))
from runs import Run, astray, doubled, run  # noqa: E402 - the contract's own way to compare two runs

DOCS = HERE.parent / "docs"
SHARES = (0.7, 0.4, 0.2)
WITHIN = 0.02  # of the heap: the default profile
SAME = 1e-5  # of the weights' way: what convolutions that sum in another order make of it
MINUTES = 60


# -- what one model's process finds out -------------------------------------------------------------------------------
def train(name: str, settings: dict[str, Any]) -> Any:
    """The target of the heap meter: a task under a plan, two steps. The peak is that of the steps: a plan may shrink
    weights that were there before it."""
    lean = shoestring.apply(zoo_models.task(name), Plan(**settings))
    if heap.is_preloaded():
        heap.reset()
    for _ in range(2):
        lean.step(lean.task.batch)
    return lean


def heap_bytes(name: str, settings: dict[str, Any]) -> int:
    return measure_heap(f"{__file__}:train", [name, settings]).peak_bytes


def examine(name: str) -> dict[str, Any]:
    """All cells of a model: each holds a result, or an error in one line."""
    torch.set_num_threads(1)
    plain = heap_bytes(name, {})
    cells: dict[str, Any] = {"plain": plain, "profile": cell(profile, name, plain)}
    cells |= {f"{share:.0%}": cell(planned, name, int(share * plain)) for share in SHARES}
    cells |= {"updates": cell(updates, name), "as before": cell(as_before, name), "library": cell(library, name)}
    return cells


def cell(find: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    try:
        return find(*args)
    except Exception as error:
        traceback.print_exc()
        return {"holds": False, "text": f"{type(error).__name__}: {' '.join(str(error).split())}"}


def profile(name: str, plain: int) -> dict[str, Any]:
    """The default profile of plain training against the heap. It may be more if it says what it could only bound, as
    layers that are dropped at random."""
    predicted = shoestring.profile(zoo_models.task(name))
    off = predicted.needed_bytes / plain - 1
    bound = off > WITHIN and bool(predicted.unseen)
    return {"holds": bound or abs(off) <= WITHIN, "text": f"{off:+.1%}" + ", a bound, said" * bound}


def planned(name: str, budget: int) -> dict[str, Any]:
    """The plan for a budget, and what it takes on the heap."""
    try:
        settings = shoestring.plan(zoo_models.task(name), budget).techniques()
    except NoPlanFits as error:
        return {"holds": True, "text": "no plan", "why": str(error)}
    taken = heap_bytes(name, settings)
    words = ", ".join(f"{technique} {value}" for technique, value in settings.items())
    return {"holds": taken <= budget, "text": f"{taken / budget:.0%} of it", "plan": words}


def updates(name: str) -> dict[str, Any]:
    """Weights after two steps under each strategy that the planner tries, and with saved tensors in a file: their error
    against FP64 beside that of plain PyTorch in FP32. A model that knows no FP64, or draws other numbers in it, is held
    to plain FP32 itself. What exceeds its bound must do so with other weights and data too: in a small network a ReLU
    whose input is zero but for rounding may change a gradient visibly."""
    strategies = [Plan(checkpoint=strategy) for strategy in checkpoint.options(by_sgd(name, 0))]
    worst, refused, beside = 0.0, [], set()
    for plan in [*strategies, Plan(activations="offload")]:
        try:
            errors = [error_and_bound(name, plan, 0)]
            if errors[0].error > errors[0].bound:
                errors.append(error_and_bound(name, plan, 1))
        except ShoestringError as error:
            refused.append(f"{plan.techniques()}: {error}")
            continue
        least = min(errors, key=lambda found: found.error / found.bound)
        worst = max(worst, least.error / least.bound)
        beside.add(f"{least.error:.1e} {least.beside}")
    text = f"{len(strategies) + 1 - len(refused)} plans, at most {max(beside)}"
    return {"holds": worst <= 1, "text": text + (f", {len(refused)} refused" if refused else ""), "refused": refused}


class Found(NamedTuple):
    """The error of a plan's weights, the most that it may be, and in words what it stands beside."""

    error: float
    bound: float
    beside: str


def error_and_bound(name: str, plan: Plan, seed: int) -> Found:
    own, exact = plain_runs(name, seed)
    lean = run(shoestring.apply(by_sgd(name, seed), plan).task)
    if exact is None:
        return Found(astray(lean, own), SAME, "from FP32")
    usual = astray(own, exact)
    return Found(astray(lean, exact), 2 * usual + 2**-23, f"from FP64 (plain {usual:.1e})")


@cache
def plain_runs(name: str, seed: int) -> tuple[Run, Run | None]:
    """Plain training in FP32, and in FP64 where the model can do it and draws the same random numbers in it."""
    own = run(by_sgd(name, seed))
    try:
        exact = run(doubled(by_sgd(name, seed)))
    except RuntimeError:
        return own, None
    return own, exact if astray(own, exact) < 0.01 else None


def by_sgd(name: str, seed: int) -> Task:
    """Adam's first step is the sign of the gradient, whatever its size: it would measure noise."""
    return zoo_models.task(name, seed).with_(optimizer=SGD(lr=0.1, momentum=0.9))


def as_before(name: str) -> dict[str, Any]:
    """Keys of the state, attributes and hooks of all modules, and the output, after a profile and after lean steps."""
    task = zoo_models.task(name)
    keys, modules = list(task.model.state_dict()), marks(task.model)
    shoestring.profile(task)
    wrong = [] if marks(task.model) == modules else ["modules after profile"]
    twin = zoo_models.task(name).model
    task.loss(twin, task.batch)  # some models note that they were called
    lean = shoestring.apply(task, Plan(checkpoint=checkpoint.options(task)[0]))
    lean.step(task.batch)
    wrong += [] if marks(lean.model) == marks(twin) else ["modules after a step"]
    wrong += [] if list(lean.model.state_dict()) == keys else ["keys of state_dict"]
    twin.load_state_dict(lean.model.state_dict())
    wrong += [] if same_output(task, lean.model, twin) else ["output"]
    return {"holds": not wrong, "text": ", ".join(wrong) + " differ" if wrong else "yes"}


def marks(model: torch.nn.Module) -> dict[str, Any]:
    """Attributes and number of hooks of each module."""
    modules = model.named_modules()
    return {path: (type(module).__qualname__, module.training, attributes(module)) for path, module in modules}


def attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Names of attributes, with the size of what is a table (hooks, children, parameters); `forward` if patched."""
    found = {name: len(value) if isinstance(value, dict) else None for name, value in vars(module).items()}
    return found | {"forward": vars(module).get("forward")}


def same_output(task: Task, model: torch.nn.Module, twin: torch.nn.Module) -> bool:
    found = []
    for each in (model, twin):
        zoo_models.seed_all(0)
        with torch.no_grad():
            found.append(task.loss(each, task.batch))
    return torch.equal(*found)


def library(name: str) -> dict[str, Any]:
    """What the library itself does with the model after lean steps: save_pretrained, from_pretrained, generate."""
    task = zoo_models.task(name)
    lean = shoestring.apply(task, Plan(checkpoint=checkpoint.options(task)[0]))
    lean.step(task.batch)
    done = []
    with tempfile.TemporaryDirectory() as folder:
        lean.model.save_pretrained(folder)
        again = type(lean.model).from_pretrained(folder)
    weights = lean.model.state_dict()
    if not all(torch.equal(tensor, weights[key]) for key, tensor in again.state_dict().items()):
        return {"holds": False, "text": "weights that were saved and loaded differ"}
    done.append("saved and loaded")
    if getattr(lean.model, "can_generate", lambda: False)():
        inputs = {key: value[:2] for key, value in task.batch.items() if key != "labels"}
        lean.model.eval().generate(**inputs, max_new_tokens=4)
        done.append("generated")
    return {"holds": True, "text": ", ".join(done)}


# -- all of them ------------------------------------------------------------------------------------------------------
def in_a_process(name: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", name]
    start = time.monotonic()
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60 * MINUTES)
        cells = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, json.JSONDecodeError, IndexError) as error:
        cells = {"profile": {"holds": False, "text": f"{type(error).__name__}: nothing was found out"}}
    return {"cells": cells, "minutes": (time.monotonic() - start) / 60, "date": date.today().isoformat()} | machine()


def machine() -> dict[str, str]:
    import diffusers
    import transformers

    with open("/proc/cpuinfo") as file:
        names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    modules = (shoestring, torch, transformers, diffusers)
    versions = {module.__name__: module.__version__ for module in modules}
    return versions | {"python": platform.python_version(), "cpu": names[0] if names else platform.processor()}


COLUMNS = ("profile", *(f"{share:.0%}" for share in SHARES), "updates", "as before", "library")


def failures(rows: dict[str, Any]) -> list[str]:
    return [
        f"{name}, {column}: {found['text']}"
        for name, row in rows.items()
        for column, found in row["cells"].items()
        if isinstance(found, dict) and not found["holds"]
    ]


ABOUT = """
- **plain**: the heap's peak in two plain training steps. **profile**: `shoestring.profile(task)` with its
  objects beside it, which should be within {within:.0%}, or more where the profile says what it can only bound
  (layers dropped at random).
- **70%, 40%, 20%**: `shoestring.plan(task, budget)` for such a share of plain, at the default risk, and what its steps
  took of that budget on the heap.
- **updates**: weights after two SGD steps under each checkpoint strategy that the planner tries and with saved tensors
  in a file; the largest error against FP64, relative to the way that the weights went, which should be at most twice
  plain PyTorch's. Where FP64 cannot be had, or draws other random numbers, against plain FP32.
- **as before**: keys of `state_dict`, attributes and hooks of all modules, and the output, after a profile and a lean
  step. **library**: `save_pretrained` and `from_pretrained` give the same weights, `generate` runs.
"""


def table(rows: dict[str, Any]) -> str:
    """The rows -> the page."""
    dates = sorted({row["date"] for row in rows.values()})
    told = ("shoestring", "torch", "transformers", "diffusers", "python")
    versions = ", ".join(f"{key} {' and '.join(sorted({row[key] for row in rows.values()}))}" for key in told)
    cpus = " and ".join(f"{cpu} ({count} models)" for cpu, count in Counter(r["cpu"] for r in rows.values()).items())
    plans = sum("plan" in row["cells"].get(column, {}) for row in rows.values() for column in COLUMNS[1:4])
    lines = [
        "# A zoo of real models",
        "Small configurations with random weights of architectures that we did not write, trained with Adam in FP32.",
        "`make test-zoo` (`python benchmarks/zoo.py`) makes this page; a cell that does not hold is in bold, as it is.",
        "",
        f"Measured {' to '.join(dict.fromkeys((dates[0], dates[-1])))} on {cpus}, 1 thread, with {versions}.",
        f"{len(rows)} of {len(MODELS)} models so far, {plans} plans, {len(failures(rows))} cells that do not hold.",
        ABOUT.format(within=WITHIN),
        f"| model | plain | {' | '.join(COLUMNS)} |",
        f"|---|---|{'---|' * len(COLUMNS)}",
        *(f"| {name} | {megabytes(row)} | {' | '.join(words(row, column) for column in COLUMNS)} |"
          for name, row in rows.items()),
        "",
        "## The plans",
        *(f"- {name}: {plans_of(row)}" for name, row in rows.items()),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def words(row: dict[str, Any], column: str) -> str:
    found = row["cells"].get(column, {"holds": True, "text": ""})
    text = found["text"].replace("|", "/")[:160]
    return text if found["holds"] else f"**{text}**"


def megabytes(row: dict[str, Any]) -> str:
    return f"{row['cells']['plain'] / 1e6:.1f} MB" if "plain" in row["cells"] else ""


def plans_of(row: dict[str, Any]) -> str:
    found = {column: row["cells"].get(column, {}).get("plan") for column in COLUMNS[1:4]}
    return "; ".join(f"{column}: {plan}" for column, plan in found.items() if plan) or "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--missing", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--one", choices=MODELS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(examine(args.one)))
        return
    record = DOCS / "zoo.json"
    rows = json.loads(record.read_text()) if record.exists() else {}
    names = [] if args.table else [name for name in args.model if not (args.missing and name in rows)]
    with ThreadPoolExecutor(args.jobs) as pool:
        for name, row in zip(names, pool.map(in_a_process, names), strict=True):
            print(f"{name}: {json.dumps(row['cells'])}", flush=True)
            rows = {known: (rows | {name: row})[known] for known in MODELS if known in rows or known == name}
            record.write_text(json.dumps(rows, indent=1) + "\n")  # a run that is stopped keeps what is done
            (DOCS / "zoo.md").write_text(table(rows))
    (DOCS / "zoo.md").write_text(table(rows))
    wrong = failures(rows)
    print("\n".join([*wrong, f"{len(rows)} models, {len(wrong)} cells that do not hold"]))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
