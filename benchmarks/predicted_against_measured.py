"""Predicted against measured: built-in models, plain and lean, and architectures that users bring.

Each task's step is predicted, then run twice under the allocator meter. Writes the figures, a table and a
picture to docs/. One task alone: python benchmarks/predicted_against_measured.py lstm; the picture alone, from the
figures of the last run: --redraw
"""

import gc
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from shoestring import Plan, Task, apply, builtin
from shoestring.measuring.calibration import machine
from shoestring.reporting.comparison import Comparison, comparison_table
from shoestring.reporting.comparison_figure import comparison_figure

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # for the zoo, and for the way in which tests measure
import zoo  # noqa: E402
from metering import measured, predicted  # noqa: E402

PROMISED = {"tensors": 0.01, "workspace": 0.10}
NEGLIGIBLE = 10_000  # bytes of workspace in which a percentage says nothing


def lean(name: str, batch: int, **plan) -> Callable[[], Task]:
    return lambda: apply(builtin(name, batch=batch), Plan(**plan)).task


TASKS: dict[str, Callable[[], Task]] = {
    "wrn-28-2, batch 100": lambda: builtin("wrn-28-2", batch=100),
    "  microbatch 10": lean("wrn-28-2", 100, microbatch=10),
    "  residual-1": lean("wrn-28-2", 100, checkpoint="residual-1"),
    "  residual-2*": lean("wrn-28-2", 100, checkpoint="residual-2*"),
    "  residual-2*, microbatch 10": lean("wrn-28-2", 100, checkpoint="residual-2*", microbatch=10),
    "  fp16, residual-2*, microbatch 10": lean(
        "wrn-28-2", 100, precision="fp16", checkpoint="residual-2*", microbatch=10
    ),
    "  10% nonzero, fp16, residual-2*, microbatch 4": lean(
        "wrn-28-2", 100, nonzero=10, precision="fp16", checkpoint="residual-2*", microbatch=4
    ),
    "resnet18, batch 16": lambda: builtin("resnet18", batch=16),
    "vit-tiny, batch 16": lambda: builtin("vit-tiny", batch=16),
    "dynamicconv-iwslt, 4,000 tokens": lambda: builtin("dynamicconv-iwslt", tokens=4000),
} | {make.__name__: make for make in zoo.ZOO}


def compare(name: str, task: Task) -> Comparison:
    prediction, reading = predicted(task), measured(task)
    for words in prediction.unseen:
        print(f"{name.strip()}: not seen: {words}")
    return Comparison(
        name,
        prediction.tensor_peak_bytes,
        reading.tensor_peak_bytes,
        prediction.workspace_peak_bytes,
        reading.workspace_peak_bytes,
        prediction.peak_bytes,
        reading.peak_bytes,
    )


def keeps_promise(row: Comparison) -> bool:
    workspace = abs(row.predicted_workspace - row.measured_workspace)
    allowed = max(NEGLIGIBLE, PROMISED["workspace"] * row.measured_workspace)
    return abs(row.error) <= PROMISED["tensors"] and workspace <= allowed


def write(rows: list[Comparison]) -> None:
    base = ROOT / "docs" / "predicted_against_measured"
    base.parent.mkdir(exist_ok=True)
    record = {"machine": machine(), "promised": PROMISED, "rows": [asdict(row) for row in rows]}
    base.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    words = (ROOT / "benchmarks" / "predicted_against_measured.txt").read_text()
    base.with_suffix(".md").write_text(words.format(table=comparison_table(rows), **machine()))
    comparison_figure(base.with_suffix(".svg"), rows)


def redraw() -> None:
    """The picture again, from the figures of the last run."""
    base = ROOT / "docs" / "predicted_against_measured"
    rows = json.loads(base.with_suffix(".json").read_text())["rows"]
    comparison_figure(base.with_suffix(".svg"), [Comparison(**row) for row in rows])


def main() -> int:
    """Runs the tasks that are named, or all -> 0 if every prediction is as good as promised."""
    if sys.argv[1:] == ["--redraw"]:
        redraw()
        return 0
    wanted = {name: make for name, make in TASKS.items() if name.strip() in sys.argv[1:] or not sys.argv[1:]}
    rows = []
    for name, make in wanted.items():
        torch.manual_seed(0)
        rows.append(compare(name, make()))
        gc.collect()
        print(comparison_table(rows[-1:]).splitlines()[-1], flush=True)
    print(comparison_table(rows))
    if not sys.argv[1:]:
        write(rows)
    return 0 if all(map(keeps_promise, rows)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
