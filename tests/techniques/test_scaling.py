"""Loss scaling: an overflow skips the step and halves the scale, and leaves every bit of the weights as it was."""

import math

import pytest
import torch
from torch import nn

from shoestring import SGD, Adam, ShoestringError, Task
from shoestring.errors import Diverged
from shoestring.profiling import profile
from shoestring.step import Stepper
from shoestring.techniques.precision.loss_scale import Scaling


class Net(nn.Module):
    """Convolution, batch norm, a linear layer: each kind of parameter that a gradient may overflow in."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


PARAMETERS = [name for name, _ in Net().named_parameters()]


def loss(model, batch):
    return model(batch).square().mean()


def make(**changes) -> Task:
    torch.manual_seed(0)
    fields = {
        "model": Net(),
        "loss": loss,
        "batch": torch.randn(6, 2, 5, 5),
        "optimizer": SGD(lr=0.1, momentum=0.9),
        "scaling": Scaling(),
    }
    return Task(**(fields | changes))


def tensors(stepper):
    """All that an update changes: parameters, and the optimizer's state."""
    state = [dict(stepper.optimizer.state[p]) for p in stepper.task.model.parameters()]
    values = [value for part in state for value in part.values() if isinstance(value, torch.Tensor)]
    return [t.detach().clone() for t in (*stepper.task.model.parameters(), *values)]


def poison(parameter, value, place, microbatch=0):
    """The gradient of a parameter has a bad value once, in one of the microbatches to come."""
    seen = []

    def hook(gradient):
        seen.append(gradient)
        if len(seen) != microbatch + 1:
            return gradient
        gradient = gradient.clone()
        gradient.view(-1)[place] = value
        return gradient

    return parameter.register_hook(hook)


# -- what a skipped step leaves ---------------------------------------------------------------------------------
@pytest.mark.parametrize("optimizer", [SGD(lr=0.1, momentum=0.9), Adam(lr=0.01)], ids=["sgd", "adam"])
@pytest.mark.parametrize("microbatch", [0, 2])
@pytest.mark.parametrize("value, place", [(math.nan, 0), (math.inf, -1), (-math.inf, 1)])
@pytest.mark.parametrize("name", PARAMETERS)
def test_one_bad_value_in_any_gradient_leaves_weights_and_momenta_as_they_were(
    name, value, place, microbatch, optimizer
):
    task = make(optimizer=optimizer, split=lambda batch: batch.split(2))
    stepper = Stepper(task)
    stepper.step(task.batch)
    before = tensors(stepper)
    hook = poison(dict(task.model.named_parameters())[name], value, place, microbatch)
    assert stepper.step(task.batch).isfinite()
    hook.remove()
    assert stepper.scale.value == 2.0**15
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(stepper), strict=True))
    assert all(p.grad is None for p in task.model.parameters())
    head = task.model.head.weight.detach().clone()
    stepper.step(task.batch)
    assert not torch.equal(head, task.model.head.weight)  # the run goes on


def test_an_update_that_was_skipped_is_not_followed_by_its_hooks():
    called = []
    task = make(after_update=(called.append,))
    stepper = Stepper(task)
    stepper.step(task.batch)
    hook = poison(task.model.head.weight, math.inf, 0)
    stepper.step(task.batch)
    hook.remove()
    assert called == [stepper]


@pytest.mark.parametrize("clip", [None, 0.05, 1e6])
@pytest.mark.parametrize("optimizer", [SGD(lr=0.1, momentum=0.9), Adam(lr=0.01)], ids=["sgd", "adam"])
def test_a_scaled_step_is_the_plain_step(optimizer, clip):
    """The loss is scaled by a power of two, so FP32 keeps every digit; clipping sees the unscaled norm."""
    plain, scaled = (make(optimizer=optimizer, clip=clip, scaling=s) for s in (None, Scaling()))
    one, other = Stepper(plain), Stepper(scaled)
    for _ in range(3):
        torch.testing.assert_close(one.step(plain.batch), other.step(scaled.batch))
        for a, b in zip(tensors(one), tensors(other), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_the_scale_reaches_the_backward_pass_and_not_the_loss():
    seen = []
    task = make(scaling=Scaling(initial=8.0))
    plain = loss(task.model, task.batch)
    wanted = torch.autograd.grad(plain, task.model.head.bias)[0]
    task.model.head.bias.register_hook(lambda gradient: seen.append(gradient.clone()))
    assert Stepper(task).step(task.batch) == plain
    torch.testing.assert_close(seen[0], 8 * wanted)


def test_a_scale_beyond_the_range_of_a_loss_in_fp16_is_lowered_until_updates_are_made():
    task = make(loss=lambda model, batch: model(batch).square().mean().half(), scaling=Scaling(initial=2.0**20))
    stepper = Stepper(task)
    assert all(stepper.step(task.batch).isfinite() for _ in range(8))
    assert stepper.scale.updates > 0 and stepper.scale.value <= 65504


# -- how the scale moves ----------------------------------------------------------------------------------------
def overflowing_above(limit):
    """A loss whose gradient overflows FP16 wherever it is larger than `limit` times FP16's largest."""

    class Narrow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return (gradient * (65504 / limit)).half().float() / (65504 / limit)

    return lambda model, batch: Narrow.apply(model(batch).square().mean())


def test_the_scale_halves_until_the_gradients_fit_and_doubles_after_good_steps():
    task = make(loss=overflowing_above(1000.0), scaling=Scaling(initial=4096.0, growth_steps=3))
    stepper, values = Stepper(task), []
    for _ in range(9):
        stepper.step(task.batch)
        values.append(stepper.scale.value)
    assert values == [2048, 1024, 512, 512, 512, 1024, 512, 512, 512]


def test_the_scale_does_not_grow_beyond_its_ceiling():
    task = make(scaling=Scaling(initial=2.0, growth_steps=1, ceiling=8.0))
    stepper = Stepper(task)
    for _ in range(5):
        stepper.step(task.batch)
    assert stepper.scale.value == 8.0


def test_at_the_floor_the_run_stops_and_names_the_layer_where_the_overflow_began():
    task = make(scaling=Scaling(initial=4.0, floor=1.0))
    stepper = Stepper(task)
    before = tensors(stepper)
    task.model.norm.weight.register_hook(lambda gradient: gradient * math.inf)
    task.model.conv.weight.register_hook(lambda gradient: gradient * math.nan)  # what it poisons behind itself
    for _ in range(2):
        stepper.step(task.batch)
    with pytest.raises(Diverged, match=r"gradient of norm\.weight .* loss scale of 1, the floor, after 3 skipped"):
        stepper.step(task.batch)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(stepper), strict=True))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_from_the_first_step_is_told_at_once(value):
    task = make(batch=torch.full((6, 2, 5, 5), value))
    stepper = Stepper(task)
    before = tensors(stepper)
    with pytest.raises(Diverged, match="before the first update: look for values in the batch or the weights"):
        stepper.step(task.batch)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(stepper), strict=True))
    assert all(p.grad is None for p in task.model.parameters())


def test_a_loss_that_is_lost_later_is_told_with_its_update():
    task = make()
    stepper = Stepper(task)
    stepper.step(task.batch)
    with pytest.raises(Diverged, match="the loss is nan after 1 updates"):
        stepper.step(task.batch * math.nan)


def test_gradients_of_a_step_that_broke_off_do_not_join_the_next():
    def breaking(batch):
        yield batch[:3]
        yield batch[3:] * math.nan

    task = make(split=breaking)
    stepper, plain = Stepper(task), Stepper(make())
    with pytest.raises(Diverged):
        stepper.step(task.batch)
    task.model.load_state_dict(plain.task.model.state_dict())  # batch norm saw the first half
    stepper.run([task.batch], [1.0]), plain.step(task.batch)
    assert all(torch.equal(a, b) for a, b in zip(tensors(stepper), tensors(plain), strict=True))


# -- around it --------------------------------------------------------------------------------------------------
def test_a_scale_that_is_saved_goes_on_where_it_was():
    task = make(scaling=Scaling(growth_steps=3))
    one, other = Stepper(task), Stepper(task)
    for _ in range(2):
        one.step(task.batch)
    other.scale.restore(one.scale.state())
    one.step(task.batch), other.step(task.batch)
    assert one.scale.value == other.scale.value == 2.0**17


def test_the_profiler_takes_the_way_of_a_step_that_goes_well():
    plain, scaled = profile(make(scaling=None)), profile(make())
    assert scaled.bytes_by_category["gradient"] == plain.bytes_by_category["gradient"] > 0
    assert scaled.bytes_by_category["optimizer_state"] == plain.bytes_by_category["optimizer_state"] > 0
    assert not any("depends on the data" in words for words in scaled.unseen)


@pytest.mark.parametrize(
    "wrong", [{"initial": 0.0}, {"floor": 4.0, "initial": 2.0}, {"ceiling": math.inf}, {"growth_steps": 0}]
)
def test_a_scale_that_cannot_be_is_refused(wrong):
    with pytest.raises(ShoestringError, match="a loss scale"):
        Scaling(**wrong)
