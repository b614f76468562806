"""A run on TensorBoard: loss, learning rate, measured peak and quality, update by update."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import ShoestringError, how_to_install
from ..training.events import Evaluated, Event, Listener, Updated


@contextmanager
def tensorboard(folder: Path) -> Iterator[Listener]:
    """A folder -> a listener that writes there; events after the update from which a run resumes are hidden."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ShoestringError(
            f"TensorBoard is not installed: {how_to_install('log')}, or leave --tensorboard out"
        ) from None
    writer: Any = None

    def listen(event: Event) -> None:
        nonlocal writer
        if writer is None:
            writer = SummaryWriter(str(folder), purge_step=event.update)
        if isinstance(event, Updated):
            values = {"loss": event.loss, "learning rate": event.lr, "measured peak (MB)": _mb(event.peak_bytes)}
        elif isinstance(event, Evaluated):
            values = {event.name: event.quality}
        else:
            return
        for name, value in values.items():
            if value is not None:
                writer.add_scalar(name, value, event.update)

    try:
        yield listen
    finally:
        if writer is not None:
            writer.close()


def _mb(size: int | None) -> float | None:
    return None if size is None else size / 1e6
