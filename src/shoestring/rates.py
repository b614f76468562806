"""Rates: how fast a device is, as data for the time model."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """Throughputs per second, and the overhead per operator call."""

    flops_per_second: float
    sparse_flops_per_second: float
    bytes_per_second: float
    seconds_per_call: float
    disk_bytes_per_second: float = 5e8
    link_bytes_per_second: float = 1e9  # between processes

    def seconds_per_byte(self, medium: str) -> float:
        """The time to recompute a byte of a tensor in memory, or to offload it to disk and read it back; "" is free."""
        return {"memory": 3 / self.bytes_per_second, "disk": 2 / self.disk_bytes_per_second, "": 0.0}[medium]


# A two-core AVX2 server, for plans without a measurement: only ratios of predicted times are used.
NOMINAL = Rates(
    flops_per_second=8e10,
    sparse_flops_per_second=6e10,
    bytes_per_second=1e10,
    seconds_per_call=1e-5,
)
