"""How long a step would take: FLOPs, bytes and calls of its trace, at the rates of this device.

    seconds = flops / flops_per_second + 3 born_bytes / bytes_per_second + calls seconds_per_call

A tensor is written once and read about twice; with each that is born go some calls. The rates come from a calibration
of about half a second; only ratios of predictions are used, so that what all plans share cancels. How near they come is
told by benchmarks/predicted_time.py.
"""

import json
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F

from ..cache import cache_folder, write_whole
from ..ledger import Phase
from ..profiling import Profile


@dataclass(frozen=True)
class Rates:
    """What this device does in a second, and what a call costs."""

    flops_per_second: float
    sparse_flops_per_second: float
    bytes_per_second: float
    seconds_per_call: float


def device_rates(threads: int) -> Rates:
    """The rates of this CPU with this many threads, measured once a machine: plans of two days are in one order."""
    path = cache_folder() / f"rates-2-{platform.node()}-{torch.__version__}-{threads}.json"
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
    )


def _seconds(run: Callable[[], object], repeats: int = 7) -> float:
    run()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return min(taken)


LEAN_CALL = 2.0  # times the calls of plain layers: functions of our own, in Python, around each kernel


def seconds_of(profile: Profile, rates: Rates, pieces: int = 1, density: float = 1.0, lean: bool = False) -> float:
    """The predicted time of a step whose whole batch was traced once, if it is run in `pieces` with sparse layers."""
    flops = sum(profile.flops[part] for part in ("forward", "backward", "recompute"))
    born = [entry.bytes for entry in profile.ledger.entries if entry.phase is not Phase.BUILD]
    rate = rates.flops_per_second if density == 1 else rates.sparse_flops_per_second
    calls = pieces * len(born) * (LEAN_CALL if lean else 1.0)
    return density * flops / rate + 3 * sum(born) / rates.bytes_per_second + calls * rates.seconds_per_call
