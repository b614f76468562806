"""Scratch that is known only after a trace joins it, and the trace is the one that would have been made."""

import pytest
import torch
from torch import nn

import zoo
from shoestring import Adam, Plan, Task, apply
from shoestring.measuring import calibrated, calibration
from shoestring.profiling import profile
from shoestring.signature import Bound, output_key

TASKS = {
    "mlp": (zoo.mlp, {}),
    "gpt, recomputed": (zoo.gpt, {"checkpoint": "residual-1"}),
    "tied, in BF16": (zoo.tied, {"precision": "bf16", "optimizer": "8bit+no-gradient"}),
}


def told(found):
    """All that a profile says."""
    entries = [(e.bytes, e.category, e.module, e.operation, e.phase, e.born, e.died) for e in found.ledger.entries]
    return entries, found.ledger.time, found.peak, found.unseen, found.uncalibrated, found.scratch_bytes


@pytest.mark.parametrize("make, settings", TASKS.values(), ids=list(TASKS))
def test_a_table_known_later_gives_the_trace_with_that_table(make, settings):
    task = apply(make(), Plan(**settings)).task
    bare = profile(task, brief=True)
    calls = list(map(str, bare.signatures))
    table = {call: 1000 * number for number, call in enumerate(calls[:-1])} | {calls[2]: Bound(10**9)}
    later = bare.with_scratch(table)
    assert told(later) == told(profile(task, table, brief=True))
    assert later.peak_bytes > 10**9 > bare.peak_bytes
    assert told(later.with_scratch({})) == told(bare)


def test_a_table_with_the_size_of_an_open_output_asks_for_another_trace():
    found = profile(zoo.lstm())
    call = next((call for call in found.signatures if "rnn_layer" in call.op), None)
    if call is None:
        pytest.skip("this PyTorch has no oneDNN")
    assert found.with_scratch({str(call): 100}) is not None
    assert found.with_scratch({output_key(call, 3): 100}) is None


def test_a_step_whose_calls_are_not_known_yet_is_traced_once(monkeypatch):
    tables = []

    def predict(table):
        tables.append(dict(table))
        return profile(zoo.mlp(), table)

    monkeypatch.setattr(calibration, "load_cache", dict)
    found = calibrated(predict)
    assert tables == [{}] and not found.uncalibrated
    assert told(found) == told(profile(zoo.mlp(), calibration.calibrate(found.signatures)))


@pytest.mark.parametrize("norm", [nn.LayerNorm(64), nn.GroupNorm(4, 64)], ids=["layer", "group"])
def test_the_backward_pass_of_a_norm_in_16_bits_is_one_that_can_be_measured(norm):
    model = nn.Sequential(nn.Linear(64, 64), norm, nn.Linear(64, 1))
    task = Task(model, lambda model, x: model(x).square().mean(), torch.randn(32, 64), Adam())
    lean = apply(task, Plan(precision="bf16")).task
    assert not any("could not be made here" in words for words in calibrated(lambda table: profile(lean, table)).unseen)
