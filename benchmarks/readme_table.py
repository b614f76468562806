"""The tables of README.md: heap peak and time of a training step of WRN-28-2, minibatch 100; and trained quality.

    python benchmarks/readme_table.py heap time    # measures (a quarter of an hour) and writes both files
    python benchmarks/readme_table.py time         # the times alone, on a quiet machine
    python benchmarks/readme_table.py              # README's table again from docs/steps.json

The heap is measured in a fresh process per row. The steps of all rows take turns, each row in a process of its own;
their medians are told as a ratio to the faster of PyTorch's two eager layouts, in a column for each kind of machine.
README's tables are nothing but docs/steps.json and docs/results drawn: a test compares them.
"""

import argparse
import datetime
import json
from pathlib import Path

import hundredfold
import torch
from lean_steps import LAYOUTS, cpu_name, heap, times

from shoestring.measuring.calibration import machine
from shoestring.studies.results import Estimate, metric_of

ROOT = Path(__file__).resolve().parents[1]
RESULT, README = ROOT / "docs" / "steps.json", ROOT / "README.md"
TRAINED = ("headline", "table3", "figure3", "accuracy-compressed", "neutral")  # studies, of docs/results
BEGIN, END = "<!-- {}: made by benchmarks/readme_table.py -->\n", "<!-- end of {} -->"
MODEL, BATCH, REPEATS = "wrn-28-2", 100, 5
SIXTY = {"precision": "fp16", "checkpoint": "residual-2*", "microbatch": 10}

# The words of a row, its plan, its risk.
ROWS: tuple[tuple[str, dict, str], ...] = (
    ("plain PyTorch, NCHW", {}, ""),
    ("plain PyTorch, channels_last", {"pytorch": "channels_last"}, ""),
    ("plain PyTorch, `torch.compile`", {"pytorch": "compile"}, ""),
    ("[checkpointing](docs/techniques/checkpoint.md) `no-bn`", {"checkpoint": "no-bn"}, "exact"),
    ("`residual-1*`", {"checkpoint": "residual-1*"}, "exact"),
    ("`residual-2*`", {"checkpoint": "residual-2*"}, "exact"),
    (
        "and [microbatches](docs/techniques/microbatch.md) of 10",
        {"checkpoint": "residual-2*", "microbatch": 10},
        "approximate with batch norm, else exact",
    ),
    ("and [FP16](docs/techniques/precision.md), no master copy", SIXTY, "neutral itself"),
    (
        "and 30% [nonzeros](docs/techniques/sparsity.md), rewired as it trains",
        {"nonzero": 30, **SIXTY},
        "approximate",
    ),
    ("20%, microbatches of 4", {"nonzero": 20, **SIXTY, "microbatch": 4}, "approximate"),
    ("10%, microbatches of 4", {"nonzero": 10, **SIXTY, "microbatch": 4}, "approximate"),
    (
        "[activations offloaded to a file](docs/techniques/activations.md), nothing else",
        {"activations": "offload"},
        "exact",
    ),
    (
        "[inputs of layers](docs/techniques/activations.md) in 4 bits (`int4`), nothing else",
        {"activations": "int4"},
        "approximate",
    ),
    ("averaged over 2 x 2 pixels (`pool2`), nothing else", {"activations": "pool2"}, "approximate"),
    ("[8-bit optimizer state](docs/techniques/optimizer.md), nothing else", {"optimizer": "8bit"}, "neutral"),
    ("`int4`, the model in channels_last", {"activations": "int4", "pytorch": "channels_last"}, "approximate"),
    ("`pool2`, the model in channels_last", {"activations": "pool2", "pytorch": "channels_last"}, "approximate"),
    (
        "[a hundredth](docs/techniques/activations.md#the-hundredth) of what the paper counts for plain training",
        hundredfold.PLANS["100x"],
        "approximate",
    ),
)


def time_of_steps(repeats: int) -> dict:
    """Per number of threads, the median seconds of every row's step."""
    cores, seconds = torch.get_num_threads(), {}
    for threads in sorted({1, cores}):
        torch.set_num_threads(threads)
        seconds[str(threads)] = times(MODEL, BATCH, [plan for _, plan, _ in ROWS], repeats)
        print(f"{threads} threads: {[round(one, 3) for one in seconds[str(threads)]]}", flush=True)
    torch.set_num_threads(cores)
    return {"seconds": seconds, "repeats": repeats, "date": str(datetime.date.today())}


def heap_of_steps() -> dict:
    found = []
    for _, plan, _ in ROWS:
        found.append(heap(MODEL, BATCH, plan))
        print(f"{json.dumps(plan)}: heap {found[-1]}", flush=True)
    return {"heap_bytes": found, "plans": [plan for _, plan, _ in ROWS]}


def table(found: dict) -> str:
    """The measurements as README shows them: a column of times for each kind of machine."""
    machines = found["machines"]
    ratios = {kind: ratios_of(found["plans"], one["seconds"]) for kind, one in machines.items()}
    kinds = " | ".join(f"time, {kind}, {' and '.join(one['seconds'])} threads" for kind, one in machines.items())
    lines = [f"| | heap peak, MB | {kinds} | risk |", "|---" * (len(machines) + 3) + "|"]
    for i, (words, _, risk) in enumerate(ROWS):
        told = " | ".join(", ".join(f"{ratio[i]:.2f}" for ratio in ratios[kind] if i < len(ratio)) for kind in machines)
        lines.append(f"| {words} | {found['heap_bytes'][i] / 1e6:.3g} | {told} | {risk} |")
    where = "; ".join(f"{kind}: {measured(found['plans'], one)}" for kind, one in machines.items())
    how = f"Beside the faster of PyTorch's eager layouts, in turn. {where}. Heap: {found['heap_cpu']}."
    return "\n".join([*lines, "", how, ""])


def fastest(plans: list[dict], taken: list[float]) -> float:
    """Seconds of plain PyTorch in the faster of its eager layouts."""
    return min(taken[i] for i, plan in enumerate(plans) if plan in LAYOUTS)


def ratios_of(plans: list[dict], seconds: dict[str, list[float]]) -> list[list[float]]:
    """Per number of threads, each row's time over plain PyTorch's."""
    return [[one / fastest(plans, taken) for one in taken] for taken in seconds.values()]


def measured(plans: list[dict], one: dict) -> str:
    best = " and ".join(f"{fastest(plans, taken):.2f} s" for taken in one["seconds"].values())
    return (
        f"{one['cpu']}, torch {one['torch']}, {one['date']}, medians of {one['repeats']} steps, {best} per plain step"
    )


def quality(studies: list[dict]) -> str:
    """The trained rows of studies as README shows them, each beside the study's first row."""
    lines = ["| | accuracy, % | beside the first | seeds |", "|---|---|---|---|"]
    for found in studies:
        trained = [row for row in found["rows"] if row["quality"]]
        one = found["trials"][0]
        side = one["job"]["sizes"].get("image", 32)
        words = f"{one['model']}, CIFAR-10 at {side} x {side}, {one['epochs']} epochs"
        lines.append(f"| **{words}**: [{found['title']}](docs/results/{found['study']}.small.md) | | | |")
        first, *_ = estimates = [metric_of(row, "accuracy") for row in trained]
        for row, mine in zip(trained, estimates, strict=True):
            told = "" if mine is first else difference(mine, first)
            lines.append(f"| {row['label']} | {with_margin(mine)} | {told} | {len(row['seeds'])} |")
    return "\n".join([*lines, ""])


def with_margin(found: Estimate, sign: str = "") -> str:
    return f"{found.value:{sign}.2f}" + (f" ± {found.interval:.2f}" if found.interval is not None else "")


def difference(mine: Estimate, first: Estimate) -> str:
    """Points beside the first row; not significant within 1.96 standard errors, unknown with a single seed."""
    found = mine.minus(first)
    if found.interval is None:
        return f"{found.value:+.2f}, a single seed"
    return with_margin(found, "+") + ("" if abs(found.value) > found.interval else ", not significant")


def drawn(readme: str, steps: dict, studies: list[dict]) -> str:
    """README with what was measured in the place of its tables."""
    for name, text in (("steps", table(steps)), ("quality", quality(studies))):
        start, end = readme.index(BEGIN.format(name)) + len(BEGIN.format(name)), readme.index(END.format(name))
        readme = readme[:start] + text + readme[end:]
    return readme


def trained() -> list[dict]:
    """The results of TRAINED that are there, and have a trained row beside the first."""
    paths = [ROOT / "docs" / "results" / f"{name}.small.json" for name in TRAINED]
    found = [json.loads(path.read_text()) for path in paths if path.exists()]
    return [one for one in found if sum(bool(row["quality"]) for row in one["rows"]) > 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", choices=["heap", "time", []], help="what to measure again")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    args = parser.parse_args()
    found = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    if "heap" in args.what:
        found |= heap_of_steps() | {"heap_cpu": cpu_name()}
    if "time" in args.what:
        where = {"cpu": cpu_name(), "torch": torch.__version__}
        found.setdefault("machines", {})[machine()["capability"]] = where | time_of_steps(args.repeats)
    if args.what:
        RESULT.write_text(json.dumps(found, indent=1) + "\n")
    if {"heap_bytes", "machines"} <= set(found):
        README.write_text(drawn(README.read_text(), found, trained()))


if __name__ == "__main__":
    main()
