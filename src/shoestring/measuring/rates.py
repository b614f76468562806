"""The rates of this device: some seconds of measuring, once per machine."""

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch

from ..cache import cache_folder, spill_folder, write_whole
from ..kernels import conv, linear, sparse_conv, sparse_linear
from ..kernels.sparse_index import encode
from ..rates import LEAN, PLAIN, SPARSE, Rates
from ..records import checked, read_object

NONZERO = 0.3  # of the weights of a sparse layer
MAPS = {32: (16, 32), 16: (16, 64), 8: (16, 128), 4: (8, 512)}  # the width of a map -> examples and channels to measure
LONG = 0.02  # seconds in which short runs are repeated


def device_rates() -> Rates:
    """The rates of this CPU with torch's threads, measured once per machine and cached, so that plans made on different
    days rank alike."""
    path = cache_folder() / f"rates-10-{platform.node()}-{torch.__version__}-{torch.get_num_threads()}.json"
    with suppress(OSError, ValueError, TypeError):
        return Rates(**checked(Rates, read_object(path.read_bytes())))
    rates = measured_rates()
    with suppress(OSError):
        write_whole(path, json.dumps(asdict(rates)).encode())
    return rates


def measured_rates() -> Rates:
    speeds: dict[str, float] = {}
    for width in (*MAPS, 0) * 2:  # twice, since what ran beside the first may be gone by the second
        for kind, (flops, seconds) in _timed(_convolutions(width, *MAPS[width]) if width else _products()).items():
            speeds[f"{kind} {width}"] = max(flops / seconds, speeds.get(f"{kind} {width}", 0.0))
    weight_seconds = _per_weight(speeds, 4, 9 * 512**2, _convolutions(4, 8, 512), _convolutions(4, 1, 512))
    weight_seconds |= _per_weight(speeds, 0, 1024**2, _products(256, 1024), _products(16, 1024))
    large, small = torch.randn(16 * 2**20), torch.randn(8)  # larger than any cache, and tiny
    out = torch.empty_like(large)  # new pages of the system's would take longer than the addition
    return Rates(
        flops_per_second=speeds[f"{PLAIN} 32"],
        sparse_flops_per_second=speeds[f"{SPARSE} 32"],
        bytes_per_second=3 * large.nbytes / _seconds(lambda: torch.add(large, large, out=out)),
        seconds_per_call=8 * _seconds(lambda: small + small),
        disk_bytes_per_second=_disk_rate(spill_folder()),
        speeds=speeds,
        weight_seconds=weight_seconds,
    )


# A kind of kernel (PyTorch's, ours, ours on nonzeros) -> the FLOPs of a layer, forward and both gradients, and a run.
Runs = dict[str, tuple[float, Callable[[], object]]]


def _timed(runs: Runs) -> dict[str, tuple[float, float]]:
    return {kind: (flops, _seconds(once)) for kind, (flops, once) in runs.items()}


def _per_weight(speeds: dict[str, float], width: int, weights: int, many: Runs, few: Runs) -> dict[str, float]:
    """A layer on many and on few examples -> the seconds for each of its weights however few the examples are; the
    speeds of that width become those without them."""
    longer, shorter, found = _timed(many), _timed(few), {}
    for kind, (flops, seconds) in longer.items():
        fewer, less = shorter[kind]
        speed = (flops - fewer) / max(seconds - less, 1e-9)
        fixed = max(0.0, less - fewer / speed)
        found[f"{kind} {width}"] = fixed / (weights * (NONZERO if kind == SPARSE else 1))
        speeds[f"{kind} {width}"] = max(speed, speeds[f"{kind} {width}"])
    return found


def _convolutions(width: int, examples: int, channels: int) -> Runs:
    x, weight = torch.randn(examples, channels, width, width), torch.randn(channels, channels, 3, 3)
    values, index, gradient = _nonzeros(weight)
    dy, geometry = torch.randn_like(x), ((3, 3), (1, 1), (1, 1), (1, 1))
    flops = 3 * 2 * x.numel() * weight[0].numel()
    norm: Any = {"scale": torch.ones(channels), "shift": torch.zeros(channels)}  # is part of our kernels in most layers
    backward = [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]

    def plain() -> None:
        torch.conv2d(x, weight, None, padding=1)
        torch.ops.aten.convolution_backward(dy, x, weight, *backward)

    def lean() -> None:
        conv.conv_forward(x, weight, None, 1, 1, **norm, relu=True)
        conv.conv_weight_gradient(dy, x, weight.shape, 1, 1, **norm, relu=True)
        conv.conv_input_gradient(dy, weight, x.shape, 1, 1)

    def sparse() -> None:
        sparse_conv.sparse_conv2d_forward(x, values, index, channels, *geometry, **norm)
        sparse_conv.sparse_conv2d_weight_gradient(x, dy, index, *geometry, **norm, out=gradient)
        sparse_conv.sparse_conv2d_input_gradient(dy, values, index, x.shape, *geometry)

    return {PLAIN: (flops, plain), LEAN: (flops, lean), SPARSE: (NONZERO * flops, sparse)}


def _products(tokens: int = 512, size: int = 256) -> Runs:
    x, weight, dy = torch.randn(tokens, size), torch.randn(size, size), torch.randn(tokens, size)
    values, index, gradient = _nonzeros(weight)
    narrow = [tensor.half() for tensor in (x, weight, dy)]
    flops = 3 * 2 * tokens * weight.numel()

    def plain() -> None:
        torch.nn.functional.linear(x, weight)
        dy @ weight
        dy.t() @ x

    def lean() -> None:
        linear.linear_forward(*narrow[:2])
        linear.linear_input_gradient(narrow[2], narrow[1])
        linear.linear_weight_gradient(narrow[2], narrow[0])

    def sparse() -> None:
        sparse_linear.sparse_linear_forward(x, values, index, size)
        sparse_linear.sparse_linear_input_gradient(dy, values, index, size)
        sparse_linear.sparse_linear_weight_gradient(x, dy, index, out=gradient)

    return {PLAIN: (flops, plain), LEAN: (flops, lean), SPARSE: (NONZERO * flops, sparse)}


def _nonzeros(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight -> values and index of some of it, evenly spread, and a place for their gradient."""
    positions = (torch.arange(int(NONZERO * weight.numel())) / NONZERO).long()
    values = weight.view(-1)[positions].contiguous()
    return values, encode(positions, weight.numel()), torch.empty_like(values)


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


def _seconds(run: Callable[[], object], repeats: int = 15) -> float:
    """The least of many short runs: on a busy machine some of them are not interrupted, where no long one is spared."""
    run()
    taken: list[float] = []
    end = time.perf_counter() + LONG
    while len(taken) < repeats or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return min(taken)
