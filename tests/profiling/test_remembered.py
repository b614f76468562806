"""What is remembered of operators' calls is what they give: traces are the same, and errors are raised as before."""

import pytest
import torch
from torch import nn

import zoo
from shoestring import Adam, Plan, Task, apply
from shoestring.fakes import corrections
from shoestring.profiling import profile, trace

TASKS = {
    "mlp": (zoo.mlp, {}),
    "gpt, recomputed": (zoo.gpt, {"checkpoint": "residual-1"}),
    "gpt, offloaded, in BF16": (zoo.gpt, {"precision": "bf16", "activations": "offload"}),
    "lstm": (zoo.lstm, {}),
    "tied": (zoo.tied, {"optimizer": "8bit+no-gradient"}),
}


def told(task):
    """All that a trace says."""
    found = profile(task, brief=True)
    entries = [(e.bytes, e.category, e.module, e.operation, e.born, e.died) for e in found.ledger.entries]
    return entries, found.flops, found.unseen, list(map(str, found.signatures))


@pytest.mark.parametrize("make, settings", TASKS.values(), ids=list(TASKS))
def test_a_trace_is_the_same_as_if_every_call_were_made(make, settings, monkeypatch):
    task = apply(make(), Plan(**settings)).task
    told(task)  # from here on all of its calls were made before
    known = told(task)
    monkeypatch.setattr(trace, "remembered", lambda key, given, args, kwargs: corrections.run(key[0], args, kwargs))
    assert known == told(task)


class Changed(nn.Module):
    """Changes a part of its input's copy by what `other` makes of it."""

    def __init__(self, other):
        super().__init__()
        self.layer, self.other = nn.Linear(4, 4), other

    def forward(self, x):
        y = self.layer(x)
        y.t()[1:3].add_(self.other(y))
        return y


def changed(other):
    return Task(Changed(other), lambda model, x: model(x).square().mean(), torch.randn(5, 4), Adam())


@pytest.mark.parametrize("other", [lambda y: y.detach().t()[:2], lambda y: 1.0, lambda y: torch.ones(2, 1)])
def test_views_that_are_changed_in_place_are_followed(other):
    for _ in range(2):
        assert profile(changed(other)).peak_bytes > 0


@pytest.mark.parametrize("other", [lambda y: torch.ones(3, 5), lambda y: y.detach().t()])
def test_a_call_that_pytorch_refuses_is_refused_each_time(other):
    for _ in range(2):
        with pytest.raises(RuntimeError):
            profile(changed(other))
