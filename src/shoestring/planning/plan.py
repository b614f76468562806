"""Plan: which techniques, with which settings; plain data, the same words as the command line's flags."""

import json
from dataclasses import asdict, dataclass, field, fields, make_dataclass, replace
from typing import Any, NotRequired, TypedDict

from ..errors import ShoestringError
from ..records import checked, read_sealed
from ..techniques import WORDS
from .shown import plan_html, plan_lines

VERSION = 1
_Techniques: Any = make_dataclass("_Techniques", [(word.name, Any, None) for word in WORDS], frozen=True)


class Alternative(TypedDict):
    """A row of the plan's table; `estimated` if it was not traced."""

    settings: dict[str, Any]
    predicted_peak_bytes: int
    predicted_time_ratio: float
    risk: str
    object_bytes: NotRequired[int]
    estimated: NotRequired[bool]
    chosen: NotRequired[bool]


class LeftOutRow(TypedDict):
    """Options that the planner left out for the same reason."""

    options: list[str]
    reason: str
    kind: str


@dataclass(frozen=True)
class Plan(_Techniques):
    """`Plan(checkpoint="residual-2*", microbatch=10)`. There is a field for each technique; None changes nothing.

    A technique's value is a scalar, or a mapping of its settings: `Plan(nonzero={"nonzero": 30, "method": "set"})`.
    The other fields are the planner's: the budget it planned for, its predictions, and the plans it compared.
    """

    task: str = ""
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    predicted_bytes: dict[str, int] = field(default_factory=dict)
    predicted_time_ratio: float | None = None
    object_bytes: int | None = None  # of the Python objects around tensors, for which a plan leaves room
    least_budget_bytes: int | None = None  # the smallest budget that works at the risk allowed, if it was looked for
    reasons: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    left_out: tuple[LeftOutRow, ...] = ()  # options that the planner left out, by reason

    def __post_init__(self) -> None:
        for word in WORDS:
            if (value := getattr(self, word.name)) is not None:
                object.__setattr__(self, word.name, word.checked(value))

    def techniques(self) -> dict[str, Any]:
        """The settings that change something, in the order in which they are applied."""
        return {word.name: value for word in WORDS if word.asks(value := getattr(self, word.name))}

    def __str__(self) -> str:
        return "\n".join(plan_lines(self))

    def _repr_html_(self) -> str:
        return plan_html(self)

    def with_(self, **changes: Any) -> "Plan":
        return replace(self, **changes)

    def for_one(self) -> "Plan":
        """The same for a model that one process holds."""
        return self.with_(**{word.name: None for word in WORDS if word.of_several})

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The text of a plan file -> the plan; a damaged one, or one of another version, is refused."""
        try:
            record, _ = read_sealed(text.encode("utf-8", "surrogatepass"))
            version = record.pop("version")
        except (ValueError, KeyError) as error:
            why = "it has no version" if isinstance(error, KeyError) else error
            raise ShoestringError(
                f"this is not a plan file ({why}): make one with `shoestring plan --output FILE`"
            ) from error
        if version != VERSION:
            raise ShoestringError(f"the plan has version {version!r}, this Shoestring reads {VERSION}: plan again")
        known = {f.name for f in fields(cls)}
        if unknown := sorted(name for name, value in record.items() if name not in known and value is not None):
            words = ", ".join(word.name for word in WORDS)
            raise ShoestringError(
                f"the plan has a field {unknown[0]!r} that does not exist (techniques: {words}): plan again"
            )
        try:
            return cls(**checked(cls, record))
        except ValueError as error:
            raise ShoestringError(f"the plan file is damaged: {error}; plan again") from error
