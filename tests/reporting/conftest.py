"""A small step written down by hand, and its JSON: what a profile of a two-layer model looks like."""

import pytest

from shoestring.ledger import Category, Ledger, Phase, sum_bytes

MB = 10**6


def write_step(ledger: Ledger, scale: int = 1) -> None:
    """One step: two activations forward, their gradients backward, an update; everything of it ends."""
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    a = ledger.birth(100 * MB * scale, Category.ACTIVATION, "first", "convolution", forward)
    b = ledger.birth(60 * MB * scale, Category.ACTIVATION, "second", "relu", forward)
    c = ledger.birth(40 * MB * scale, Category.ACTIVATION_GRADIENT, "second", "threshold_backward", backward)
    ledger.death(b)
    d = ledger.birth(5 * MB, Category.GRADIENT, "first", "convolution_backward", backward)
    ledger.death(a)
    ledger.death(c)
    e = ledger.birth(1 * MB, Category.OPTIMIZER, "", "mul", Phase.UPDATE)
    ledger.death(e)
    ledger.death(d)


@pytest.fixture
def ledger() -> Ledger:
    """Two steps; the state that the first leaves is alive in the second, and torn down after it."""
    ledger = Ledger()
    kept = [ledger.birth(5 * MB, Category.MODEL, "first", "parameter"), ledger.birth(3 * MB, Category.INPUT)]
    write_step(ledger)
    kept.append(ledger.birth(5 * MB, Category.OPTIMIZER, "", "zeros_like", Phase.UPDATE))
    write_step(ledger)
    for number in kept:
        ledger.death(number)
    return ledger


@pytest.fixture
def data(ledger: Ledger) -> dict:
    """The JSON of the profile that the ledger is from."""
    peak = ledger.peak()
    live = ledger.live_at(peak.time)
    modules = sum_bytes(live, lambda entry: entry.module)
    parts = ledger.bytes_by(lambda entry: str(entry.category))
    place = {"phase": "backward", "module": "second", "operation": "threshold_backward"}
    sums = {"model": 5 * MB, "optimizer": 5 * MB, "activations": 203 * MB, "workspace": None}
    return {
        "rules": "real",
        "task": "two-layers",
        "settings": {"batch": 8},
        "bytes": sums | {"total": peak.bytes},
        "by_category": parts,
        "by_module": [
            {"module": name, "bytes": size}
            | sum_bytes((e for e in live if e.module == name), lambda entry: str(entry.category))
            for name, size in modules.items()
        ],
        "flops": {"forward": 2e9, "backward": 4e9, "recompute": 1e9, "ratio": 7 / 6},
        "peak": {"bytes": peak.bytes} | place,
        "unseen": ["the scratch that 12 distinct operator calls allocate inside PyTorch: not calibrated"],
    }
