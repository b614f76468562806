"""The ledger: which storages were alive when, in which category, for which module. Peaks are read from it.

A storage is recorded once, however many tensors view it. Time is the count of births and deaths, so the
peak is a fact about one moment and not a sum of maxima.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum

BUCKET = "bucket"  # the operation that gathers gradients for other processes: they move into its storage


class Category(StrEnum):
    """What a storage is for. The order is the one in which reports stack them."""

    MODEL = "model"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer_state"
    INPUT = "input"
    ACTIVATION = "activation"
    ACTIVATION_GRADIENT = "activation_gradient"
    WORKSPACE = "workspace"


class Phase(StrEnum):
    """The part of a training step in which a storage was born."""

    BUILD = "build"
    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    UPDATE = "update"


@dataclass(slots=True)
class Entry:
    """One storage: its bytes, what it is for, where it was born, and from when to when it lived."""

    bytes: int
    category: Category
    module: str
    operation: str
    phase: Phase
    born: int
    died: int | None = None

    def alive_at(self, time: int) -> bool:
        return self.born <= time and (self.died is None or time < self.died)


@dataclass(frozen=True)
class Peak:
    """The moment at which most bytes were alive."""

    bytes: int
    time: int
    phase: Phase
    module: str
    operation: str


class Ledger:
    """Births and deaths of storages in order -> peak, timeline, and sums by any key.

    >>> ledger = Ledger()
    >>> weight = ledger.birth(400, Category.MODEL, "fc")
    >>> hidden = ledger.birth(100, Category.ACTIVATION, "fc", "addmm", Phase.FORWARD)
    >>> ledger.death(hidden)
    >>> ledger.peak().bytes, ledger.live_bytes
    (500, 400)
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.live_bytes = 0
        self.time = -1  # of the last event

    def birth(
        self,
        size: int,
        category: Category,
        module: str = "",
        operation: str = "",
        phase: Phase = Phase.BUILD,
    ) -> int:
        """Records that a storage of `size` bytes is born now -> its number, for `death`."""
        self.time += 1
        self.live_bytes += size
        self.entries.append(Entry(size, category, module, operation, phase, self.time))
        return len(self.entries) - 1

    def death(self, number: int) -> None:
        """Records that storage `number` is freed now."""
        entry = self.entries[number]
        assert entry.died is None, "a storage dies once"
        self.time += 1
        self.live_bytes -= entry.bytes
        entry.died = self.time

    def resize(self, number: int, size: int) -> int:
        """Records that storage `number` has `size` bytes from now on -> its new number."""
        entry = self.entries[number]
        self.death(number)
        return self.birth(size, entry.category, entry.module, entry.operation, entry.phase)

    def timeline(self) -> list[int]:
        """Live bytes after each event."""
        change = [0] * (self.time + 1)
        for entry in self.entries:
            change[entry.born] += entry.bytes
            if entry.died is not None:
                change[entry.died] -= entry.bytes
        live = 0
        return [live := live + step for step in change]

    def peak(self) -> Peak:
        """The first moment with the most live bytes, and what was born at it."""
        timeline = self.timeline()
        time = max(range(len(timeline)), key=timeline.__getitem__, default=0)
        if not any(timeline):
            return Peak(0, 0, Phase.BUILD, "", "")
        born = next(e for e in self.entries if e.born == time)  # memory only rises at a birth
        return Peak(timeline[time], time, born.phase, born.module, born.operation)

    def live_at(self, time: int) -> list[Entry]:
        return [entry for entry in self.entries if entry.alive_at(time)]

    def bytes_by(self, key: Callable[[Entry], str], time: int | None = None) -> dict[str, int]:
        """Live bytes at `time` (default: the peak) summed by `key(entry)`."""
        return sum_bytes(self.live_at(self.peak().time if time is None else time), key)

    def stacked_timeline(self) -> dict[Category, list[int]]:
        """Live bytes after each event, for each category that occurs."""
        parts = {category: self.only(category) for category in Category}
        return {category: part.timeline() for category, part in parts.items() if part.entries}

    def only(self, *categories: Category) -> "Ledger":
        """The same timeline, of the storages of these categories only."""
        part = Ledger()
        part.time = self.time
        part.entries = [entry for entry in self.entries if entry.category in categories]
        part.live_bytes = sum(entry.bytes for entry in part.entries if entry.died is None)
        return part

    def to_json(self) -> str:
        return json.dumps({"version": 1, "entries": [asdict(entry) for entry in self.entries]})

    @classmethod
    def from_json(cls, text: str) -> "Ledger":
        ledger = cls()
        for row in json.loads(text)["entries"]:
            row |= {"category": Category(row["category"]), "phase": Phase(row["phase"])}
            ledger.entries.append(Entry(**row))
        for entry in ledger.entries:
            ledger.time = max(ledger.time, entry.born, entry.died or 0)
            ledger.live_bytes += entry.bytes if entry.died is None else 0
        return ledger


def sum_bytes(entries: Iterable[Entry], key: Callable[[Entry], str]) -> dict[str, int]:
    """Entries -> bytes by `key(entry)`, largest first."""
    sums: dict[str, int] = defaultdict(int)
    for entry in entries:
        sums[key(entry)] += entry.bytes
    return dict(sorted(sums.items(), key=lambda item: -item[1]))
