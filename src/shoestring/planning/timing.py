"""Predicts the time of a step: the FLOPs, bytes and calls of its trace, at the rates of this device.

    seconds = flops / flops_per_second + 3 born_bytes / bytes_per_second + calls seconds_per_call
              + 2 offloaded_bytes / disk_bytes_per_second
              + 2 (devices - 1) / devices gradient_bytes / link_bytes_per_second

A tensor is written once and read about twice; each that is born comes with some calls. Offloaded bytes are written and
read back. Processes that share a batch pass their gradients around a ring; what of that goes on during the backward
pass is not taken off. The rates come from a calibration of about a second; only ratios of predictions are used, so that
what all plans share cancels. benchmarks/predicted_time.py measures how accurate they are.
"""

from typing import NamedTuple

from ..profiling import Profile
from ..rates import Rates
from .estimate import forward_start

LEAN_CALL = 2.0  # a lean layer's calls, in plain layers' calls: each kernel is called by Python functions of ours


class Work(NamedTuple):
    """What takes time in one traced step of the whole batch."""

    flops: float
    born_bytes: int
    calls: int
    offloaded_bytes: int


def work_of(traced: Profile, offloaded_bytes: int = 0) -> Work:
    """A brief trace -> its work from the forward pass on: before it, optimizer state is created."""
    flops = sum(traced.flops[part] for part in ("forward", "backward", "recompute"))
    start = forward_start(traced)
    born = [entry.bytes for entry in traced.ledger.entries if entry.born >= start]
    return Work(flops, sum(born), len(born), offloaded_bytes)


def sent_bytes(gradient_bytes: float, devices: int) -> float:
    """What each of several processes sends to add up their gradients around a ring: nearly all of them, twice."""
    return 2 * (devices - 1) / devices * gradient_bytes


def seconds_of(
    work: Work, rates: Rates, pieces: int = 1, density: float = 1.0, lean: bool = False, sent: float = 0.0
) -> float:
    """The predicted time of a step that runs in `pieces`, computes a share `density` of its FLOPs and sends bytes."""
    rate = rates.flops_per_second if density == 1 else rates.sparse_flops_per_second
    calls = pieces * work.calls * (LEAN_CALL if lean else 1.0)
    moved = work.born_bytes * rates.seconds_per_byte("memory") + work.offloaded_bytes * rates.seconds_per_byte("disk")
    moved += sent / rates.link_bytes_per_second
    return density * work.flops / rate + moved + calls * rates.seconds_per_call
