"""What is not finite, gradient or loss, changes no bit of weights and momenta, whatever the precision and the plan."""

import math

import pytest
import torch
from torch import nn

from shoestring import SGD, Adam, Plan, ShoestringError, Task, apply, builtin
from shoestring.errors import Diverged
from shoestring.step import Stepper

BAD = (math.nan, math.inf, -math.inf)


def held(stepper: Stepper) -> list[torch.Tensor]:
    """Copies of all that an update changes: weights, momenta and their scales."""
    parameters = list(stepper.task.model.parameters())
    state = [value for p in parameters for value in stepper.optimizer.state[p].values()]
    return [t.detach().clone() for t in (*parameters, *state) if isinstance(t, torch.Tensor)]


def same_bits(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def injected(parameter: nn.Parameter, value: float, piece: int):
    """A hook by which one number of the gradient of a microbatch, from 0, is bad."""
    seen = []

    def spoil(gradient):
        seen.append(piece)
        if len(seen) == piece + 1:
            gradient = gradient.clone()
            gradient.view(-1)[gradient.numel() // 2] = value
        return gradient

    return parameter.register_hook(spoil)


def started(optimizer, plan: dict) -> Stepper:
    """A small WRN under a plan, after one good step, so that there are momenta."""
    task = builtin("wrn-10-1", batch=4, image=8).with_(optimizer=optimizer)
    stepper = apply(task, Plan(**plan)).stepper
    stepper.step(task.batch)
    return stepper


@pytest.mark.parametrize("optimizer", [SGD(0.1, 0.9, nesterov=True), Adam()], ids=["sgd", "adam"])
@pytest.mark.parametrize(
    "plan", [{}, {"checkpoint": "residual-2*", "microbatch": 2}, {"optimizer": "8bit"}], ids=["plain", "lean", "8bit"]
)
def test_in_fp16_no_injected_gradient_changes_a_weight_or_a_momentum(plan, optimizer):
    stepper = started(optimizer, {"precision": "fp16"} | plan)
    before, batch = held(stepper), stepper.task.batch
    for number, parameter in enumerate(stepper.task.model.parameters()):
        stepper.scale.value = 2.0**16
        hook = injected(parameter, BAD[number % 3], piece=number % 2 if "microbatch" in plan else 0)
        assert stepper.step(batch).isfinite()
        hook.remove()
        assert stepper.scale.value == 2.0**15
        assert same_bits(before, held(stepper))
    stepper.step(batch)
    assert not same_bits(before, held(stepper))  # the run goes on


@pytest.mark.parametrize("plan", [{"precision": "bf16"}, {"optimizer": "8bit"}, {"optimizer": "fp16"}], ids=str)
def test_without_a_loss_scale_the_run_stops_with_the_layer_and_all_bits_as_before(plan):
    stepper = started(Adam(), plan)
    before = held(stepper)
    for number, (name, parameter) in enumerate(stepper.task.model.named_parameters()):
        hook = injected(parameter, BAD[number % 3], piece=0)
        with pytest.raises(Diverged, match=f"gradient of {name} is not finite .the weights are as before"):
            stepper.step(stepper.task.batch)
        hook.remove()
        assert same_bits(before, held(stepper))
    stepper.step(stepper.task.batch)
    assert not same_bits(before, held(stepper))


def test_at_its_floor_the_scale_names_the_layer_that_the_overflow_reached_first():
    """All gradients behind it are bad too: the first in the order of the backward pass is where to look."""

    def spoiled_loss(model, batch):
        scores = model(batch[0])
        scores.register_hook(lambda gradient: gradient * math.inf)
        return nn.functional.cross_entropy(scores, batch[1])

    stepper = started(SGD(0.1, 0.9), {"precision": "fp16"})
    before, last = held(stepper), list(stepper.task.model.named_parameters())[-1][0]
    stepper.task = stepper.task.with_(loss=spoiled_loss)
    with pytest.raises(Diverged, match=f"gradient of {last} is not finite even at a loss scale of 0.00012"):
        for _ in range(40):
            stepper.step(stepper.task.batch)
    assert same_bits(before, held(stepper))


@pytest.mark.parametrize(
    "plan",
    [{"precision": "fp16"}, {"precision": "bf16"}, {"optimizer": "8bit"}, {"optimizer": "no-gradient"},
     {"precision": "bf16", "optimizer": "no-gradient"}],
    ids=str,
)  # fmt: skip
def test_a_loss_that_is_not_a_number_is_told_before_anything_changes(plan):
    stepper = started(SGD(0.1, 0.9), plan)
    before, (images, labels) = held(stepper), stepper.task.batch
    with pytest.raises(Diverged, match="the loss is nan after 1 updates"):
        stepper.step((images * math.nan, labels))
    assert same_bits(before, held(stepper))


# -- models that 16 bits cannot hold ----------------------------------------------------------------------------
class Buffered(nn.Module):
    def __init__(self, values):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("offsets", torch.tensor(values))

    def forward(self, x):
        return (self.linear(x) + self.offsets).softmax(1)


def in_fp16(model: nn.Module, batch: torch.Tensor):
    return apply(Task(model, lambda m, x: m(x)[:, 0].mean(), batch, SGD()), Plan(precision="fp16"))


def test_a_buffer_out_of_range_is_named_and_infinity_is_not_out_of_range():
    with pytest.raises(ShoestringError, match=r"buffer offsets has a value of -1e\+09, and torch.float16 holds"):
        in_fp16(Buffered([0.0, -1e9]), torch.randn(3, 2))
    lean = in_fp16(Buffered([0.0, -math.inf]), torch.randn(3, 2))
    assert lean.step(lean.task.batch) == 1


def test_a_sparse_gradient_is_refused_with_what_to_do():
    embedding = nn.Sequential(nn.Embedding(8, 4, sparse=True))
    lean = in_fp16(embedding, torch.tensor([1, 2, 2]))
    with pytest.raises(ShoestringError, match=r"lean updates need a dense one .nn.Embedding with sparse=False"):
        lean.step(lean.task.batch)
