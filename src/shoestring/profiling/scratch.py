"""The scratch inside operators, put into a traced ledger by a table: another table needs no other trace."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..ledger import Category, Entry, Ledger, Phase
from ..signature import Bound, Signature
from ..units import format_bytes


class Moment(NamedTuple):
    """A call of an operator: the last event of the ledger before its scratch was there, and whose it was."""

    time: int
    signature: Signature
    module: str
    operation: str
    phase: Phase


class Traced(NamedTuple):
    """What a trace saw but for the scratch inside PyTorch's operators, as data."""

    task: str
    settings: dict[str, Any]
    ledger: Ledger
    moments: list[Moment]
    signatures: list[Signature]
    flops: dict[str, float]
    unseen: list[str]
    nodes: int
    leaves: int
    is_recorded: bool
    flops_by_width: dict[int, int]
    draws: int
    sent_bytes: int
    repeated: tuple[int, int]
    open_outputs: set[str]  # keys of outputs whose sizes no table had
    branches: bool  # whether it is the larger of several ways, which may depend on the scratch


def with_scratch(bare: Ledger, moments: Sequence[Moment], table: Mapping[str, int | None]) -> Ledger:
    """A ledger, its operators' calls in order and the scratch of each -> the ledger in which that is born and freed."""
    sizes = {signature: table.get(str(signature)) or 0 for signature in {moment.signature for moment in moments}}
    needy = [moment for moment in moments if sizes[moment.signature]]
    times = [moment.time for moment in needy]

    def later(time: int) -> int:
        return time + 2 * bisect_left(times, time)  # a birth and a death for each moment before it

    found = [
        replace(entry, born=later(entry.born), died=None if entry.died is None else later(entry.died))
        for entry in bare.entries
    ]
    for number, (time, signature, module, operation, phase) in enumerate(needy):
        born = time + 2 * number + 1
        found.append(Entry(sizes[signature], Category.WORKSPACE, module, operation, phase, born, born + 1))
    ledger = Ledger()
    ledger.entries = sorted(found, key=lambda entry: entry.born)
    ledger.time, ledger.live_bytes = bare.time + 2 * len(needy), bare.live_bytes
    return ledger


def unmeasured(scratch: Sequence[int | None]) -> list[str]:
    """What is not known of the scratch of distinct calls: not counted, or counted by a bound."""
    words, bounds = [], [size for size in scratch if isinstance(size, Bound)]
    if uncalibrated := scratch.count(None):
        words.append(f"the scratch inside {uncalibrated} distinct operator calls: not calibrated, not counted")
    if any(bounds):
        words.append(
            f"the scratch inside {len(bounds)} distinct operator calls, which could not be made here: "
            f"bounds of up to {format_bytes(max(bounds))} are counted in its place"
        )
    return words
