"""What a step asks of an optimizer: lean ones have it, and PyTorch's own are driven to the same numbers."""

import pytest
import torch
from torch import nn

from shoestring import SGD, Adam, Task
from shoestring.step import Optimizer, Stepper
from shoestring.techniques.optimizer import LeanSettings
from shoestring.techniques.optimizer.factored import SM3, Adafactor
from shoestring.techniques.precision.loss_scale import Scaling

X = torch.linspace(-2, 3, 24).view(4, 6)


def a_task(optimizer, **changes):
    torch.manual_seed(0)
    return Task(nn.Linear(6, 2), lambda model, x: model(x).square().mean(), X, optimizer, **changes)


@pytest.mark.parametrize("rule", [SGD(), Adam(), SM3(), Adafactor()], ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_lean_optimizer_has_all_that_a_step_asks_for(rule, in_backward):
    stepper = Stepper(a_task(LeanSettings(rule, in_backward=in_backward)))
    assert isinstance(stepper.optimizer, Optimizer)
    assert stepper.in_backward == in_backward == bool(stepper.optimizer.contexts)


def test_an_optimizer_of_torch_is_driven_whatever_its_attributes_are_called():
    class Theirs(torch.optim.SGD):
        contexts = "something of their own"

        def begin(self):
            raise AssertionError("it is not ours to call")

    task = a_task(lambda parameters: Theirs(parameters, lr=0.1))
    before = task.model.weight.clone()
    stepper = Stepper(task)
    stepper.step(X)
    assert not isinstance(stepper.optimizer, Optimizer) and not stepper.in_backward
    assert not torch.equal(task.model.weight, before)


@pytest.mark.parametrize("scaling", [None, Scaling(initial=2.0**10)], ids=["plain", "scaled"])
@pytest.mark.parametrize("clip", [None, 0.01, 1e6])
def test_a_step_of_a_torch_optimizer_is_pytorchs_own(clip, scaling):
    task = a_task(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), clip=clip, scaling=scaling)
    plain = a_task(SGD()).model
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    stepper = Stepper(task)
    for _ in range(3):
        stepper.step(X)
        task.loss(plain, X).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(plain.parameters(), clip)
        theirs.step()
        theirs.zero_grad()
    exactly = {"rtol": 0, "atol": 0} if scaling is None or clip != 0.01 else {}
    torch.testing.assert_close(task.model.state_dict(), plain.state_dict(), **exactly)
