"""A plan is rehearsed on one real microbatch: what crashes there is not handed out, and nothing is left behind."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from shoestring import SGD, Adam, Task
from shoestring.planning.rehearsal import rehearse
from shoestring.planning.search import plan
from shoestring.profiling import profile
from shoestring.rates import Rates

RATES = Rates(1e11, 8e10, 1e10, 1e-5)


class Picky(nn.Module):
    """Refuses, with real numbers only, what `refuses(x)` finds: a trace sees nothing of it."""

    def __init__(self, refuses=lambda x: False):
        super().__init__()
        layers = [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1)]
        self.layers, self.refuses = nn.Sequential(*layers, nn.Linear(64, 64)), refuses

    def forward(self, x):
        h = self.layers(x)
        if not isinstance(h, torch._subclasses.FakeTensor) and not h.is_meta and self.refuses(h):
            raise RuntimeError(f"expected scalar type Float but found {h.dtype}")
        return h


def squares(model, batch):
    return model(batch).square().mean()


def task(**changes):
    torch.manual_seed(0)
    fields = {"model": Picky(), "loss": squares, "batch": torch.randn(256, 64), "optimizer": Adam()}
    return Task(**(fields | changes))


def is_half(h):
    return h.dtype == torch.float16


def test_a_plan_that_crashes_with_real_numbers_is_not_handed_out():
    lines, picky = [], task(model=Picky(is_half))
    budget = 0.37 * profile(picky).peak_bytes
    told = plan(picky, round(budget), risk="approximate", rates=RATES)
    assert told.precision == "fp16", "this budget is one for which FP16 is chosen"
    found = plan(picky, round(budget), risk="approximate", rates=RATES, rehearse=True, warn=lines.append)
    assert found.precision != "fp16" and found.predicted_peak_bytes <= budget
    row = next(row for row in found.left_out if row["kind"] == "error")
    assert "precision fp16" in row["options"] and "expected scalar type Float" in row["reason"]
    assert "precision fp16" in " ".join(lines)


def state_of(model):
    tensors = {name: tensor.clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return tensors, gradients, [module.training for module in model.modules()]


def assert_same(before, after):
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize("crashes", [False, True], ids=["to the end", "broken off"])
@pytest.mark.parametrize("holds_on", [False, True], ids=["by its argument", "by a closure"])
@pytest.mark.parametrize(
    "settings",
    [
        (("optimizer", "8bit+no-gradient"),),
        (("precision", "fp16"), ("microbatch", 64)),
        (("nonzero", 30), ("checkpoint", "no-bn")),
        (("activations", "offload"),),
    ],
    ids=str,
)
def test_a_rehearsal_leaves_everything_as_it_was(settings, holds_on, crashes):
    model = Picky((lambda h: True) if crashes else (lambda h: False))
    loss = (lambda _, batch: model(batch).square().mean()) if holds_on else squares
    mine = task(model=model, loss=loss, optimizer=SGD(momentum=0.9))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.layers[3].eval()
    before, drawn = state_of(model), (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())
    kinds = [type(module) for module in model.modules()]
    try:
        rehearse(mine, settings)
    except Exception:
        assert crashes or holds_on  # sparse or 16-bit layers of the copy are not what a closure calls
    assert_same(before, state_of(model))
    assert [type(module) for module in model.modules()] == kinds
    assert torch.equal(drawn[0], torch.get_rng_state()) and drawn[1] == random.getstate()
    assert (drawn[2] == np.random.get_state()[1]).all()


def test_a_model_without_bytes_is_planned_without_a_rehearsal_and_that_is_said():
    with torch.device("meta"):
        model = Picky()
    blank = task(model=model)
    found = plan(blank, round(0.8 * profile(blank).peak_bytes), rates=RATES, rehearse=True)
    assert any(reason.startswith("not rehearsed: ") and "meta" in reason for reason in found.reasons)


def test_a_loss_that_is_not_finite_under_a_plan_is_found():
    large = task(batch=torch.full((256, 64), 1e30))  # beyond FP16, within FP32
    with pytest.raises(Exception, match=r"not finite|nan|inf|65,?504"):
        rehearse(large, (("precision", "fp16"),))
