"""Sizes as text and back: MB is 1e6 bytes; MiB, 2**20 bytes, is accepted too."""

import math
import re

from .errors import ShoestringError

_FACTORS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(text: str | int | float) -> int:
    """A size such as "7MB", "1.5GiB" or 7000000 -> bytes.

    >>> parse_bytes("7MB"), parse_bytes("1 KiB"), parse_bytes(12)
    (7000000, 1024, 12)
    """
    match = _SIZE.fullmatch(str(text))
    if not match or match[2].lower() not in _FACTORS:
        raise ShoestringError(f"{text!r} is not a size in bytes: write it as 7MB, 1.5GB or 512KiB")
    size = float(match[1]) * _FACTORS[match[2].lower()]
    if not math.isfinite(size) or not 1 <= size < 2**60:
        raise ShoestringError(f"a size of {text} is out of range: it must be at least 1 byte and below 1 EB")
    return round(size)


def share_of(text: str | int | None) -> float | None:
    """A budget such as "50%" -> 0.5; None for one in bytes.

    >>> share_of("50%"), share_of("7MB")
    (0.5, None)
    """
    if not isinstance(text, str) or not text.strip().endswith("%"):
        return None
    try:
        share = float(text.strip()[:-1]) / 100
    except ValueError:
        share = math.nan
    if not 0 < share < math.inf:
        raise ShoestringError(f"{text!r} is not a share of what plain training needs: write it as 50%")
    return share


def format_bytes(size: float, digits: int = 4) -> str:
    """Bytes -> "6.672 MB", to `digits` significant digits.

    >>> format_bytes(6_672_000), format_bytes(999), format_bytes(404_802_000)
    ('6.672 MB', '999 B', '404.8 MB')
    """
    for factor, unit in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "KB")):
        if abs(size) >= factor * (1 - 0.5 * 10**-digits):  # 999,999 B are "1.000 MB", not "1000.0 KB"
            value = size / factor
            decimals = max(0, digits - len(str(int(abs(value)))))
            return f"{value:.{decimals}f} {unit}"
    return f"{round(size)} B"


def format_flops(flops: float) -> str:
    """Floating-point operations -> "12.9 GFLOP"."""
    for factor, unit in ((10**15, "PFLOP"), (10**12, "TFLOP"), (10**9, "GFLOP"), (10**6, "MFLOP")):
        if flops >= factor:
            return f"{flops / factor:.3g} {unit}"
    return f"{flops:.0f} FLOP"
