"""`make demo`: the memory of a training step of WRN-28-2, predicted, and then measured. Writes runs/demo.svg."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shoestring import Profile, Task, builtin, profile
from shoestring.ledger import Category, Ledger, Phase
from shoestring.measuring import calibrated
from shoestring.measuring.allocator import Event, read, record, storage_bytes
from shoestring.reporting.figures import beside_figure
from shoestring.reporting.progress import progress
from shoestring.reporting.terminal import make_console, show_profile
from shoestring.training.step import Stepper
from shoestring.units import format_bytes

MODEL, BATCH = "wrn-28-2", 100
PICTURE = Path("runs") / "demo.png"
console = make_console()


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    return work(), time.perf_counter() - start


def predict(task: Task) -> Profile:
    with progress("measuring the scratch of this machine's operators, once") as advance:
        return calibrated(lambda table: profile(task, table), advance)


def measure(task: Task) -> tuple[list[Event], int, float]:
    """A task -> the allocator's events in its second step, the bytes it started with, and its seconds."""
    stepper = Stepper(task)
    stepper.step(task.batch)
    _, seconds = timed(lambda: stepper.step(task.batch))
    state = [t for s in stepper.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    held = storage_bytes([*task.model.parameters(), *task.model.buffers(), *task.batch, *state])
    return record(lambda: stepper.step(task.batch)), held, seconds


def as_ledger(events: list[Event], held: int) -> Ledger:
    """Allocator events -> the ledger that a prediction would have kept, as far as the meter can tell."""
    ledger, blocks = Ledger(), {}
    ledger.birth(held, Category.MODEL)
    for event in events:
        if event.bytes > 0:
            blocks[event.address] = ledger.birth(
                event.bytes, Category.ACTIVATION, "", event.operation, Phase.FORWARD
            )
        elif event.address in blocks:
            ledger.death(blocks.pop(event.address))
    return ledger


def main() -> None:
    console.print(f"Predicting {MODEL}, batch {BATCH}: two steps are traced, nothing is computed.\n")
    plan = builtin(MODEL, batch=BATCH, device="meta")
    prediction = predict(plan)
    _, seconds = timed(lambda: profile(plan))
    data = prediction.to_json() | {"settings": {"batch": BATCH}}
    show_profile(console, data, prediction.ledger)

    console.print("\nRunning it for real, under a meter of every block that PyTorch allocates.\n")
    events, held, step_seconds = measure(builtin(MODEL, batch=BATCH))
    reading = read(events, held)
    console.print(f"{'':<12}{'predicted':>14}{'measured':>14}")
    for name, words in (("tensor", "tensors"), ("workspace", "workspace"), ("", "peak")):
        sizes = (getattr(side, f"{name}_peak_bytes".lstrip("_")) for side in (prediction, reading))
        console.print(f"{words:<12}" + "".join(f"{format_bytes(size, 5):>14}" for size in sizes))
    difference = prediction.peak_bytes - reading.peak_bytes
    console.print(f"{'':<12}{f'{difference:+,} B':>14}\n")
    console.print(f"The prediction took {seconds:.1f} s, a real step {step_seconds:.1f} s.")
    PICTURE.parent.mkdir(exist_ok=True)
    beside_figure(PICTURE, data, prediction.ledger, as_ledger(events, held))
    console.print(f"Both timelines: {PICTURE}")


if __name__ == "__main__":
    main()
