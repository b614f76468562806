"""`make demo`: a Wide ResNet trained inside a budget, beside plain PyTorch. Writes runs/demo.html and runs/demo.png.

It plans, runs a few steps of plain PyTorch and of the plan in turn under a meter of every block that PyTorch
allocates, and then trains both ways on the embedded part of Fashion-MNIST, with the same seed, batches and schedule.
The page at the end shows both. About two minutes on two cores.
"""

import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from shoestring import Plan, builtin, plan
from shoestring.data import open_images
from shoestring.ledger import Category, Ledger, Phase
from shoestring.measuring.allocator import Event, read, record, storage_bytes
from shoestring.measuring.calibration import load_cache
from shoestring.measuring.counted import measure_counted
from shoestring.profiling import profile
from shoestring.reporting.figures import overlay_figure
from shoestring.reporting.page import page_data, page_html, run_data, step_data, write_steps
from shoestring.reporting.plans import show_plan
from shoestring.reporting.run_progress import run_progress
from shoestring.reporting.terminal import make_console
from shoestring.runs.record import RunRecord
from shoestring.training.apply import LeanTask
from shoestring.training.job import CrossEntropy, ImageJob, Session, image_job
from shoestring.training.loop import train
from shoestring.training.schedules import schedule
from shoestring.units import format_bytes

MODEL, BATCH, BUDGET, EPOCHS = "wrn-10-1", 100, "2.2MB", 12
STEPS = 5  # of each, timed in turn
RUNS = {"plain": Path("runs") / "demo-plain", "lean": Path("runs") / "demo"}
PICTURE, PAGE = Path("runs") / "demo.png", Path("runs") / "demo.html"
console = make_console()


class Side(NamedTuple):
    """What one way to train took: the allocator's events in a step, the bytes held before it, seconds of a step."""

    events: list[Event]
    held: int
    seconds: float

    @property
    def peak_bytes(self) -> int:
        return read(self.events, self.held).peak_bytes


def job() -> ImageJob:
    images = open_images(None, channels=3)
    task = builtin(MODEL, batch=BATCH, classes=len(images.classes), image=images.shape[1])
    return image_job(task, images, seed=0, loss=CrossEntropy(), schedule="mostafa-wang")


def say(words: str = "", style: str = "") -> None:
    console.print(words, style=style, highlight=False)


def in_turn(plans: list[Plan]) -> list[Side]:
    """Plans -> what a step under each takes, their steps taken in turn so that all meet the same machine."""
    sessions = [job().build(plan) for plan in plans]
    seconds: list[list[float]] = [[] for _ in sessions]
    for number in range(1 + STEPS):
        for session, taken in zip(sessions, seconds, strict=True):
            start = time.perf_counter()
            session.lean.step(session.data.read(0, number))
            taken += [time.perf_counter() - start] if number else []  # the first is the warm-up
    return [side(session, statistics.median(taken)) for session, taken in zip(sessions, seconds, strict=True)]


def side(session: Session, seconds: float) -> Side:
    batch = session.data.read(0, 0)
    held = storage_bytes([*session.lean.held(), *batch])
    return Side(record(lambda: session.lean.step(batch)), held, seconds)


def as_ledger(side: Side) -> Ledger:
    """Allocator events -> the ledger that a prediction would have kept, as far as the meter can tell."""
    ledger, blocks = Ledger(), {}
    ledger.birth(side.held, Category.MODEL)
    for event in side.events:
        if event.bytes > 0:
            blocks[event.address] = ledger.birth(event.bytes, Category.ACTIVATION, "", event.operation, Phase.FORWARD)
        elif event.address in blocks:
            ledger.death(blocks.pop(event.address))
    return ledger


def timed(words: str, make: Callable[[], Any]) -> Any:
    start = time.perf_counter()
    made = make()
    say(f"({words} in {time.perf_counter() - start:.0f} s)\n", "dim")
    return made


def trained(name: str, plan: Plan) -> tuple[RunRecord, Session]:
    """Trains under a plan -> what became of it; its step is on its page."""
    session = job().build(plan)
    step = profile(session.lean.task, load_cache(), brief=True)
    write_steps(RUNS[name], {name: step_data(step)})
    plan = plan.with_(predicted_peak_bytes=step.peak_bytes, predicted_bytes=step.bytes_by_category)
    with run_progress(sys.stderr, plan.budget_bytes) as listener:
        record = train(
            LeanTask(session.lean.task, plan),
            session.data,
            epochs=EPOCHS,
            run=RUNS[name],
            listeners=[listener],
            meter=measure_counted,
            schedule=schedule(session.schedule, EPOCHS * len(session.data)),
            evaluation=session.evaluation,
        )
    return record, session


def main() -> None:
    began = time.perf_counter()
    say(f"1. Plan {MODEL}, batch {BATCH}, for {BUDGET}: steps are traced, nothing runs yet.", "bold")
    chosen = timed("planned", lambda: plan(job().task, BUDGET, risk="approximate"))
    show_plan(console, chosen)

    say(f"\n2. Compare {STEPS} steps of plain PyTorch and of the plan, taken in turn, metered.", "bold")
    plain, lean = timed("compared", lambda: in_turn([Plan(), chosen]))
    title, names = f"A training step of {MODEL}, batch {BATCH}, measured", ("plain PyTorch", "Shoestring")
    overlay_figure(PICTURE, as_ledger(plain), as_ledger(lean), names, title, chosen.budget_bytes)

    say(f"3. Train {EPOCHS} epochs of Fashion-MNIST inside the budget.", "bold")
    run, session = trained("lean", chosen)
    rewirings = sum(hook.times for hook in session.lean.task.after_update)
    assert rewirings or not chosen.nonzero, "a sparse network that is never rewired is another method"

    say("\n4. The same with plain PyTorch: the same seed, batches and schedule.", "bold")
    beside, _ = trained("plain", Plan())
    both = [run_data(folder) for folder in RUNS.values()]
    PAGE.write_text(page_html(page_data(f"{MODEL} trained plainly, and in {BUDGET}", both)), "utf-8")

    measured = max(run.measured_peak_bytes or 0, lean.peak_bytes)
    budget = chosen.budget_bytes or 0
    say()
    for name, value in (
        ("budget", format_bytes(budget)),
        ("predicted", format_bytes(chosen.predicted_peak_bytes or 0)),
        ("measured", f"{format_bytes(measured)}, {'within' if measured <= budget else 'OVER'} the budget"),
        ("plain PyTorch", f"{format_bytes(plain.peak_bytes)}, measured"),
        ("memory", f"{plain.peak_bytes / measured:.1f}x less"),
        ("time", f"{lean.seconds / plain.seconds:.2f}x ({lean.seconds:.2f} s per step, plain {plain.seconds:.2f} s)"),
        ("accuracy", f"{run.quality or 0:.1f}% after {run.updates:,} updates, plain {beside.quality or 0:.1f}%"),
        ("rewired", f"{rewirings} times"),
        ("timelines", str(PICTURE)),
        ("in all", f"{time.perf_counter() - began:.0f} s"),
        ("page", f"{PAGE}: open it in a browser"),
    ):
        say(f"  {name:<14}{value}")


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    for folder in RUNS.values():
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier demo
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped")
