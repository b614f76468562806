"""An update that was traced before is written into another trace, which is the same as if it had been traced there."""

import pytest
import torch

import zoo
from shoestring import SGD, Adam, Task
from shoestring.profiling import Profile, Updates, profile
from shoestring.step import Stepper
from shoestring.techniques.registry import apply_settings

PLANS: list[dict] = [
    {},
    {"checkpoint": "residual-1"},
    {"microbatch": 2},
    {"precision": "fp16"},
    {"precision": "fp16", "activations": "offload"},
    {"precision": "fp16", "optimizer": "8bit", "checkpoint": "residual-1"},
    {"optimizer": "sm3", "microbatch": 2},
    {"precision": "bf16", "optimizer": "8bit+no-gradient"},
]


def seen(traced: Profile) -> tuple:
    """All that a trace saw, until nothing more is made: in what order fakes go after the step is of no interest."""
    last = max(entry.born for entry in traced.ledger.entries)
    entries = [
        (e.bytes, e.category, e.module, e.operation, e.phase, e.born, e.died if (e.died or 0) <= last else None)
        for e in traced.ledger.entries
    ]
    return traced.peak, entries, traced.signatures, traced.flops, traced.unseen, traced.nodes


@pytest.fixture
def updates_run(monkeypatch) -> list:
    run: list = []
    update = Stepper.update
    monkeypatch.setattr(Stepper, "update", lambda stepper: run.append(stepper) or update(stepper))
    return run


@pytest.mark.parametrize(
    "optimizer", [Adam(), pytest.param(SGD(lr=0.1, momentum=0.9), marks=pytest.mark.slow)], ids=["Adam", "SGD"]
)
def test_a_trace_with_a_known_update_is_the_trace_without(updates_run, optimizer):
    shared, before = Updates(), {}
    plain = zoo.gpt().with_(optimizer=optimizer)
    for plan in PLANS:
        start = {"precision": plan["precision"]} if "precision" in plan else {}
        start |= {"optimizer": plan["optimizer"]} if "optimizer" in plan else {}
        first = before.setdefault(str(start), apply_settings(plain, start))
        task = apply_settings(first, {name: value for name, value in plan.items() if name not in start})
        alone = seen(profile(task, brief=True))
        count = len(updates_run)
        profile(first, brief=True, updates=shared)
        known = len(updates_run)
        assert seen(profile(task, brief=True, updates=shared)) == alone, plan
        shares = "no-gradient" not in str(plan)
        assert len(updates_run) - known == (0 if shares else 2), plan
        assert known - count in (0, 2)


def test_another_gradient_is_another_update(updates_run):
    """An embedding with sparse gradients: none is like another, so that each update is traced."""
    model = torch.nn.Sequential(torch.nn.Embedding(50, 8, sparse=True), torch.nn.Linear(8, 8))
    task = Task(model, lambda model, batch: model(batch).square().mean(), torch.arange(10), SGD(lr=0.1))
    shared = Updates()
    traces = [seen(profile(task, brief=True, updates=shared)) for _ in range(2)]
    assert traces[0] == traces[1] == seen(profile(task, brief=True))
    assert len(updates_run) >= 6
