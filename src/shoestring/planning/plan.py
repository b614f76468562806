"""Plan: which techniques, with which settings; plain data, the same words as the command line's flags."""

import json
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ..errors import ShoestringError

VERSION = 1


@dataclass(frozen=True)
class Plan:
    """`Plan(checkpoint="residual-2*", microbatch=10)`. Fields that are None (or "none") change nothing.

    The second half is what the planner adds: the budget it planned for, what it predicts, and what else it weighed.
    """

    nonzero: float | None = None  # percent of the weights of sparsified layers
    precision: str | None = None
    optimizer: str | None = None  # the form of its state
    checkpoint: str | None = None
    microbatch: int | None = None
    activations: str | None = None  # the form in which they are saved

    task: str = ""
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    predicted_bytes: dict[str, int] = field(default_factory=dict)
    predicted_time_ratio: float | None = None
    reasons: tuple[str, ...] = ()
    alternatives: tuple[dict[str, Any], ...] = ()
    left_out: tuple[dict[str, Any], ...] = ()  # options that were not weighed, by reason

    def techniques(self) -> dict[str, Any]:
        """The settings that change something, in the order in which they are applied."""
        values = {name: getattr(self, name) for name in TECHNIQUES}
        return {name: value for name, value in values.items() if value is not None and value != NEUTRAL.get(name)}

    def with_(self, **changes: Any) -> "Plan":
        return replace(self, **changes)

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The text of a plan file -> the plan; refuses what is damaged or of another version."""
        try:
            record = json.loads(text)
            version = record.pop("version")
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise ShoestringError("this is not a plan file: make one with `shoestring plan --output FILE`") from error
        if version != VERSION:
            raise ShoestringError(f"the plan has version {version}, this Shoestring reads {VERSION}: plan again")
        unknown = set(record) - {f.name for f in fields(cls)}
        if unknown:
            raise ShoestringError(f"the plan has a field {sorted(unknown)[0]!r} that does not exist: plan again")
        record["reasons"] = tuple(record.get("reasons", ()))
        record["alternatives"] = tuple(record.get("alternatives", ()))
        record["left_out"] = tuple(record.get("left_out", ()))
        return cls(**record)


NEUTRAL = {"nonzero": 100, "precision": "fp32", "checkpoint": "none"}  # values that ask for nothing
TECHNIQUES = ("nonzero", "precision", "optimizer", "checkpoint", "activations", "microbatch")
