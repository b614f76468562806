"""The rates of this device are measured once, and then read."""

from functools import partial

import pytest
import torch

from shoestring.measuring import rates
from shoestring.rates import LEAN, PLAIN, SPARSE

device_rates = rates.device_rates  # before the tests' own takes its place


@pytest.fixture
def briefly(monkeypatch, tmp_path):
    monkeypatch.setenv("SHOESTRING_CACHE", str(tmp_path))
    monkeypatch.setattr(rates, "_seconds", partial(rates._seconds, repeats=1))


def test_every_kind_of_kernel_is_measured_on_every_width_of_a_map(briefly):
    found = device_rates()
    assert set(found.speeds) == {f"{kind} {width}" for kind in (PLAIN, LEAN, SPARSE) for width in (*rates.MAPS, 0)}
    assert min(found.speeds.values()) > 0
    assert set(found.weight_seconds) == {f"{kind} {width}" for kind in (PLAIN, LEAN, SPARSE) for width in (4, 0)}
    assert min(found.weight_seconds.values()) >= 0
    assert found.flops_per_second == found.speeds[f"{PLAIN} 32"]
    assert min(found.bytes_per_second, found.seconds_per_call, found.disk_bytes_per_second) > 0


def test_they_are_measured_once_per_machine_and_number_of_threads(briefly, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(rates, "measured_rates", lambda: calls.append(None) or rates.Rates(1.0, 2.0, 3.0, 4.0))
    assert device_rates() == device_rates() == rates.Rates(1.0, 2.0, 3.0, 4.0)
    assert len(calls) == 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    device_rates()
    assert len(calls) == 2
    for damaged in tmp_path.iterdir():
        damaged.write_text("{")
    device_rates()
    assert len(calls) == 3
