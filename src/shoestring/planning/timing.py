"""How long a step would take: FLOPs, bytes and calls of its trace, at the rates of this device.

    seconds = flops / flops_per_second + 3 born_bytes / bytes_per_second + calls seconds_per_call
              + 2 paged_bytes / disk_bytes_per_second

A tensor is written once and read about twice; with each that is born go some calls. What is paged out to disk is
written and read back. The rates come from a calibration of about a second; only ratios of predictions are used, so that
what all plans share cancels. How near they come is told by benchmarks/predicted_time.py.
"""

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..cache import cache_folder, write_whole
from ..profiling import Profile
from ..techniques.codecs import spill_folder
from .estimate import forward_start


@dataclass(frozen=True)
class Rates:
    """What this device does in a second, and what a call costs."""

    flops_per_second: float
    sparse_flops_per_second: float
    bytes_per_second: float
    seconds_per_call: float
    disk_bytes_per_second: float = 5e8

    def seconds_per_byte(self, medium: str) -> float:
        """What it costs to make a byte of a tensor again, or to page it out and in."""
        return 2 / self.disk_bytes_per_second if medium == "disk" else 3 / self.bytes_per_second


def device_rates(threads: int) -> Rates:
    """The rates of this CPU with this many threads, measured once a machine: plans of two days are in one order."""
    path = cache_folder() / f"rates-3-{platform.node()}-{torch.__version__}-{threads}.json"
    with suppress(OSError, ValueError, TypeError):
        return Rates(**json.loads(path.read_text()))
    rates = measured_rates()
    with suppress(OSError):
        write_whole(path, json.dumps(asdict(rates)).encode())
    return rates


def measured_rates() -> Rates:
    x, weight = torch.randn(32, 32, 32, 32, requires_grad=True), torch.randn(32, 32, 3, 3, requires_grad=True)
    once = _seconds(lambda: torch.autograd.grad(F.conv2d(x, weight, padding=1).sum(), (x, weight)))
    dense = 3 * 2 * x.numel() * weight[0].numel() / once  # forward, and both gradients
    large = torch.randn(4 * 2**20)
    small = torch.randn(8)
    return Rates(
        flops_per_second=dense,
        sparse_flops_per_second=0.75 * dense,  # benchmarks/sparse_convolution.py: 30% of the FLOPs in 0.4 of the time
        bytes_per_second=3 * large.nbytes / _seconds(lambda: large + large),
        seconds_per_call=8 * _seconds(lambda: small + small),
        disk_bytes_per_second=_disk_rate(spill_folder()),
    )


def _disk_rate(folder: str, size: int = 32 * 2**20) -> float:
    """Bytes a second that the disk itself takes: what the system holds back in memory is no use where that is short."""
    data = os.urandom(size)
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:

            def write() -> None:
                os.pwrite(file.fileno(), data, 0)
                os.fsync(file.fileno())

            return size / _seconds(write, repeats=2)
    except OSError:
        return Rates.disk_bytes_per_second  # paging out will say what is wrong with the folder


def _seconds(run: Callable[[], object], repeats: int = 7) -> float:
    run()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return min(taken)


LEAN_CALL = 2.0  # times the calls of plain layers: functions of our own, in Python, around each kernel


class Work(NamedTuple):
    """What one traced step of the whole batch does, as far as its time goes."""

    flops: float
    born_bytes: int
    calls: int
    paged_bytes: int  # that go to disk


def work_of(traced: Profile, paged_bytes: int = 0) -> Work:
    """A brief trace -> its work, from the forward pass on: what comes before puts state in place."""
    flops = sum(traced.flops[part] for part in ("forward", "backward", "recompute"))
    start = forward_start(traced)
    born = [entry.bytes for entry in traced.ledger.entries if entry.born >= start]
    return Work(flops, sum(born), len(born), paged_bytes)


def seconds_of(work: Work, rates: Rates, pieces: int = 1, density: float = 1.0, lean: bool = False) -> float:
    """The predicted time of a step, if it is run in `pieces` with sparse layers."""
    rate = rates.flops_per_second if density == 1 else rates.sparse_flops_per_second
    calls = pieces * work.calls * (LEAN_CALL if lean else 1.0)
    moved = work.born_bytes * rates.seconds_per_byte("memory") + work.paged_bytes * rates.seconds_per_byte("disk")
    return density * work.flops / rate + moved + calls * rates.seconds_per_call
