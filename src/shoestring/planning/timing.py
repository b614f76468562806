"""How long a step would take: FLOPs, bytes and calls of its trace, at the rates of this device.

    seconds = flops / flops_per_second + 3 born_bytes / bytes_per_second + calls seconds_per_call
              + 2 offloaded_bytes / disk_bytes_per_second

A tensor is written once and read about twice; each that is born comes with some calls. Offloaded bytes are written and
read back. The rates come from a calibration of about a second; only ratios of predictions are used, so that what all
plans share cancels. benchmarks/predicted_time.py measures how accurate they are.
"""

from typing import NamedTuple

from ..profiling import Profile
from ..rates import Rates
from .estimate import forward_start

LEAN_CALL = 2.0  # times the calls of plain layers: functions of our own, in Python, around each kernel


class Work(NamedTuple):
    """What one traced step of the whole batch does, as far as its time goes."""

    flops: float
    born_bytes: int
    calls: int
    offloaded_bytes: int  # that go to disk


def work_of(traced: Profile, offloaded_bytes: int = 0) -> Work:
    """A brief trace -> its work, from the forward pass on: what comes before puts state in place."""
    flops = sum(traced.flops[part] for part in ("forward", "backward", "recompute"))
    start = forward_start(traced)
    born = [entry.bytes for entry in traced.ledger.entries if entry.born >= start]
    return Work(flops, sum(born), len(born), offloaded_bytes)


def seconds_of(work: Work, rates: Rates, pieces: int = 1, density: float = 1.0, lean: bool = False) -> float:
    """The predicted time of a step, if it is run in `pieces` with sparse layers."""
    rate = rates.flops_per_second if density == 1 else rates.sparse_flops_per_second
    calls = pieces * work.calls * (LEAN_CALL if lean else 1.0)
    moved = work.born_bytes * rates.seconds_per_byte("memory") + work.offloaded_bytes * rates.seconds_per_byte("disk")
    return density * work.flops / rate + moved + calls * rates.seconds_per_call
