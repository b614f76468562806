"""Measurement: the reading of one meter over one run."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Measurement:
    """The reading of a meter; all bytes but `start_bytes` itself include those held at the start.

    `start_bytes` are those that the caller says were there before the run and stayed (0: the reading is above
    the start). Only the allocator meter sees single blocks and can tell an operator's scratch from tensors;
    to the others the remaining fields are None or empty, never a guess. `timeline` is the live bytes after
    each event and `tensor_timeline` the part of it that is tensors; `by_operation` is what each operator had
    allocated of the bytes alive at the peak, largest first.
    """

    meter: str
    peak_bytes: int
    end_bytes: int
    start_bytes: int = 0
    tensor_peak_bytes: int | None = None
    workspace_peak_bytes: int | None = None
    workspace_at_peak_bytes: int | None = None
    peak_operation: str = ""
    by_operation: dict[str, int] = field(default_factory=dict)
    timeline: tuple[int, ...] = ()
    tensor_timeline: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """-> a plain record, without the two timelines, which have a number per event."""
        record = asdict(self)
        return {key: record[key] for key in record if not key.endswith("timeline")}
