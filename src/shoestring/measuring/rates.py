"""The rates of this device: about a second of measuring, once per machine."""

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

import torch
import torch.nn.functional as F

from ..cache import cache_folder, spill_folder, write_whole
from ..rates import Rates


def device_rates() -> Rates:
    """The rates of this CPU with torch's threads, measured once per machine and cached, so that plans made on different
    days rank alike."""
    path = cache_folder() / f"rates-3-{platform.node()}-{torch.__version__}-{torch.get_num_threads()}.json"
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
    """Bytes per second that the disk itself takes (with fsync): the page cache is no help when memory is short."""
    data = os.urandom(size)
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:

            def write() -> None:
                os.pwrite(file.fileno(), data, 0)
                os.fsync(file.fileno())

            return size / _seconds(write, repeats=2)
    except OSError:
        return Rates.disk_bytes_per_second  # offloading will report what is wrong with the folder


def _seconds(run: Callable[[], object], repeats: int = 7) -> float:
    run()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return min(taken)
