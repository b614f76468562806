"""The memory of a step, as data of a page: the timeline, the peak, and what is alive at it, of one ledger."""

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ShoestringError
from ...ledger import Entry
from ...records import file_bytes, read_sealed, seal
from ..timeline import timeline

if TYPE_CHECKING:
    from ...planning.plan import Plan
    from ...profiling import Profile
    from ...runs.record import RunRecord
    from ...task import Task

STEPS = "step.json"  # in a run folder: what a page shows of the step, plain and lean
COLUMNS = 600
MOST_ROWS = 300  # of what is alive; the others are summed in one
_STORED = ("module", "operation", "codec", "exact_bytes", "stored_bytes")


def step_data(profile: "Profile", microbatches: int = 1, columns: int = COLUMNS) -> dict[str, Any]:
    """A profile -> its last step: thinned to `columns` moments, each the highest of those it stands for.

    `microbatches` is given for a brief profile, which runs one or two of so many.
    """
    ledger, peak = profile.ledger, profile.peak
    shown = timeline(ledger, columns)
    live = ledger.live_at(peak.time)
    notes = [f"not seen: {words}" for words in profile.unseen]
    if microbatches > 1:
        notes.append(f"of its {microbatches:,} microbatches the largest is traced, as if others had been before")
    if max(shown.totals) < peak.bytes:
        notes.append("the peak comes before the step that is drawn, when the first step makes the optimizer's state")
    return {
        "peak": {"bytes": peak.bytes, "phase": str(peak.phase), "module": peak.module, "operation": peak.operation},
        "parts": shown.parts,
        "totals": shown.totals,
        "spans": [{"phase": str(span.phase), "first": span.first, "end": span.end} for span in shown.spans],
        "peak_column": shown.peak_column,
        "events": ledger.time + 1,
        "alive": _alive(live),
        "modules": profile.by_module,
        "notes": notes,
    }


def _alive(live: list[Entry]) -> list[dict[str, Any]]:
    """Storages -> their bytes by layer, operation and category, largest first; the smallest in one row."""
    sums: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for entry in live:
        row = sums[entry.module, entry.operation, str(entry.category)]
        row[0] += entry.bytes
        row[1] += 1
    ordered = sorted(sums.items(), key=lambda item: -item[1][0])
    rows: list[dict[str, Any]] = [
        {"module": module, "operation": operation, "category": kind, "bytes": size, "storages": count}
        for (module, operation, kind), (size, count) in ordered[:MOST_ROWS]
    ]
    if rest := [figures for _, figures in ordered[MOST_ROWS:]]:
        size, count = (sum(figures) for figures in zip(*rest, strict=True))
        others = {"module": f"{len(rest)} smaller rows", "operation": "", "category": "several"}
        rows.append(others | {"bytes": size, "storages": count})
    return rows


def stored_data(task: "Task") -> list[dict[str, Any]]:
    """A task under a plan -> what codecs compress of its first microbatch: a row per layer, operation and codec."""
    from ...techniques.activations.rehearsals import saved
    from ...techniques.activations.saving import SavedPass

    if not any(isinstance(context, SavedPass) for context in task.contexts):
        return []
    sums: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for kept in saved(task).compressed:
        row = sums[kept.module, kept.operation, kept.codec]
        row[0] += kept.exact_bytes
        row[1] += kept.stored_bytes
    return [dict(zip(_STORED, (*place, *sizes), strict=True)) for place, sizes in sums.items()]


def write_steps(path: Path, steps: dict[str, Any]) -> None:
    """Puts the steps of a run into its folder, which may not be there yet."""
    from ...runs.folder import replace_file

    path.mkdir(parents=True, exist_ok=True)
    replace_file(path / STEPS, seal(steps))


def steps_of(path: Path, record: "RunRecord | None", plan: "Plan | None") -> tuple[dict[str, Any], list[str]]:
    """A run folder, its record and its plan -> the steps, plain and lean, and what is to be said about them."""
    try:
        steps, _ = read_sealed(file_bytes(path / STEPS))
        if all(_is_step(step) for step in steps.values()):
            return steps, []
        return {}, [f"{STEPS} is damaged: the memory of a step is not shown"]
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        return {}, [f"{STEPS} cannot be read ({error}): the memory of a step is not shown"]
    if record is None or plan is None:
        return {}, ["the memory of a step is not shown: what was trained is not recorded"]
    try:
        return _traced_again(record, plan)
    except ShoestringError as error:
        return {}, [f"the memory of a step is not shown: {record.task or 'the task'} cannot be rebuilt ({error})"]


def _is_step(step: Any) -> bool:
    """Whether a part of a file has the form that `step_data` gives, on which the page's script relies."""
    try:
        width, lists = len(step["totals"]), [step["totals"], *step["parts"].values()]
        rows = step["alive"] + step["modules"]
        stored = [[row[key] for key in _STORED] for row in step.get("stored", [])]
        numbers = [step["peak"]["bytes"], step["peak_column"], *(row["bytes"] for row in rows)]
        numbers += [edge for span in step["spans"] for edge in (span["first"], span["end"])]
        texts = [step["peak"][key] for key in ("phase", "module", "operation")]
        texts += [row["module"] for row in rows] + [span["phase"] for span in step["spans"]]
        texts += [text for row in stored for text in row[:3]]
        numbers += [size for row in stored for size in row[3:]]
    except (TypeError, KeyError, AttributeError):
        return False
    numbers += [size for sizes in lists for size in sizes]
    good = all(isinstance(number, int) for number in numbers) and all(isinstance(text, str) for text in texts)
    return good and all(len(sizes) == width for sizes in lists) and 0 <= step["peak_column"] < width


def _traced_again(record: "RunRecord", plan: "Plan") -> tuple[dict[str, Any], list[str]]:
    """The step of a built-in model, by its recorded batch and plan; operators' scratch stays unknown."""
    from ...models import builtin
    from ...profiling import profile
    from ...training.apply import lean_task

    batch = record.settings.get("batch")
    if not isinstance(batch, int):
        raise ShoestringError("its batch is not recorded")

    def traced(plan: "Plan") -> dict[str, Any]:
        return step_data(profile(lean_task(builtin(record.task, device="meta", batch=batch), plan)))

    steps = {"plain": traced(type(plan)())}
    if plan.techniques():
        steps["lean"] = traced(plan)
    return steps, [
        f"the step is traced again, without the scratch inside operators, for {batch} inputs of the usual size of "
        f"{record.task}: the data of the run may have another"
    ]
