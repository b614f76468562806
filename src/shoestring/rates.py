"""Rates: how fast a device is, as data for the time model."""

from dataclasses import dataclass, field
from math import log2

PLAIN, LEAN, SPARSE = "plain", "lean", "sparse"  # PyTorch's kernels, ours, and ours on nonzeros


@dataclass(frozen=True)
class Rates:
    """Throughputs per second, and the overhead per operator call.

    `speeds` are FLOPs per second of kinds of kernels on maps of some widths, such as "lean 8"; 0 is a matrix product,
    and "lean 0" one in 16 bits. `weight_seconds` is what a pass takes for each weight however few its examples are: to
    widen, to reorder or to decode it.
    """

    flops_per_second: float
    sparse_flops_per_second: float
    bytes_per_second: float
    seconds_per_call: float
    disk_bytes_per_second: float = 5e8
    link_bytes_per_second: float = 1e9  # between processes
    speeds: dict[str, float] = field(default_factory=dict)
    weight_seconds: dict[str, float] = field(default_factory=dict)

    def speed(self, kind: str, width: int) -> float:
        """FLOPs per second of a kind of kernel, by the nearest width that was measured, or the overall one."""
        overall = self.sparse_flops_per_second if kind == SPARSE else self.flops_per_second
        return _nearest(self.speeds, kind, width, overall)

    def seconds_per_weight(self, kind: str, width: int) -> float:
        return _nearest(self.weight_seconds, kind, width, 0.0)

    def seconds_per_byte(self, medium: str) -> float:
        """The time to recompute a byte of a tensor in memory, or to offload it to disk and read it back; "" is free."""
        return {"memory": 3 / self.bytes_per_second, "disk": 2 / self.disk_bytes_per_second, "": 0.0}[medium]


def _nearest(measured: dict[str, float], kind: str, width: int, otherwise: float) -> float:
    """What was measured of a kind of kernel at the nearest width; a matrix product (0) has no neighbours."""
    known = {int(key.split()[1]): one for key, one in measured.items() if key.startswith(f"{kind} ")}
    maps = {size: one for size, one in known.items() if bool(size) == bool(width)}
    return maps[min(maps, key=lambda size: abs(log2(size or 1) - log2(width or 1)))] if maps else otherwise


# A two-core AVX2 server, for plans without a measurement: only ratios of predicted times are used.
NOMINAL = Rates(
    flops_per_second=8e10,
    sparse_flops_per_second=6e10,
    bytes_per_second=1e10,
    seconds_per_call=1e-5,
)
