"""Rates: how fast a device is, as the time model must know it."""

from dataclasses import dataclass


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


# Of a two-core AVX2 server, for whoever plans without a measurement: only ratios of predicted times are used.
NOMINAL = Rates(
    flops_per_second=8e10,
    sparse_flops_per_second=6e10,
    bytes_per_second=1e10,
    seconds_per_call=1e-5,
)
