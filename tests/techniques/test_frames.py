"""Regions that run again: what they keep, when they run, and where they stop."""

import pytest
import torch
from torch import nn

from shoestring import ShoestringError
from shoestring.ledger import Phase
from shoestring.phases import current
from shoestring.techniques.frames import Frame
from shoestring.techniques.keeping import Whole


class Counted(nn.Module):
    """exp, sin and cos of a parameter's product with x; counts how far it was run."""

    def __init__(self):
        super().__init__()
        self.weight, self.steps = nn.Parameter(torch.full((3,), 0.5)), []

    def forward(self, x):
        for step in ("mul", "exp", "sin", "end"):
            self.steps.append((step, current()))
            x = {"mul": lambda x: x * self.weight, "exp": torch.exp, "sin": torch.sin, "end": lambda x: x + 1}[step](x)
        return x


def leaf():
    return torch.arange(3.0, requires_grad=True)


def test_a_region_gives_the_gradients_of_its_function():
    x, y, plain, again = leaf(), leaf(), Counted(), Counted()
    plain(x * 2).sum().backward()
    Frame("region").call(again, (y * 2,), {}).sum().backward()
    assert torch.equal(y.grad, x.grad)
    assert torch.equal(again.weight.grad, plain.weight.grad)


def test_a_region_keeps_its_input_and_nothing_else():
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return Whole(tensor)

    x = leaf() * 2
    frame = Frame("region", keep_input=keep)
    frame.call(Counted(), (x,), {})
    assert len(kept) == 1
    assert kept[0] is x
    assert frame.store is None
    assert len(frame.saved) == 3  # the product's x, exp's output, sin's input


def test_a_region_runs_again_once_and_stops_at_the_last_tensor_that_is_asked_for():
    model = Counted()
    loss = Frame("region").call(model, (leaf() * 2,), {}).sum()
    assert [phase for _, phase in model.steps] == [current()] * 4
    loss.backward()
    assert model.steps[4:] == [(step, Phase.RECOMPUTE) for step in ("mul", "exp", "sin")]


def test_calls_of_one_region_pass_on_what_they_made():
    first, second, x = Counted(), Counted(), leaf()
    frame = Frame("region")
    between = frame.call(first, (x * 2,), {})
    assert frame.place(between) is not None
    frame.call(second, (between,), {}).sum().backward()
    y, plain = leaf(), (Counted(), Counted())
    plain[1](plain[0](y * 2)).sum().backward()
    assert torch.equal(x.grad, y.grad)
    assert torch.equal(first.weight.grad, plain[0].weight.grad)


def test_a_region_inside_a_region():
    inner = Counted()

    def outer(x):
        return Frame("inner").call(inner, (x.tanh(),), {}).cos()

    x, y, plain = leaf(), leaf(), Counted()
    Frame("outer").call(outer, (x * 2,), {}).sum().backward()
    plain((y * 2).tanh()).cos().sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_what_a_region_made_is_not_held_by_it():
    frame = Frame("region")
    output = frame.call(Counted(), (leaf() * 2,), {})
    number = id(output)
    assert frame.place(output)
    del output
    assert frame._made[number][0]() is None


def test_random_numbers_are_drawn_again_and_the_generator_goes_on():
    x = torch.randn(1000, requires_grad=True)
    torch.manual_seed(3)
    out = Frame("region").call(nn.Dropout(0.5), (x * 1,), {})
    after = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(torch.get_rng_state(), after)
    assert torch.equal(x.grad != 0, out != 0)


def test_the_random_state_is_kept_only_where_it_was_drawn_from():
    drawing, still = Frame("a"), Frame("b")
    drawing.call(nn.Dropout(0.5), (leaf() * 1,), {})
    still.call(nn.Tanh(), (leaf() * 1,), {})
    assert drawing.calls[0].state.random is not None
    assert still.calls[0].state.random is None


def test_a_region_whose_second_run_saves_less_is_told():
    runs = []

    def moody(x):
        runs.append(1)
        return x.exp().sin() if len(runs) == 1 else x.exp() + 1

    with pytest.raises(ShoestringError, match="the region saved 1 tensors in place of 2 when it was run again"):
        Frame("the region").call(moody, (leaf() * 2,), {}).sum().backward()


def test_an_input_that_is_changed_in_place_later_is_told():
    x = leaf() * 2
    loss = Frame("region").call(torch.sin, (x,), {}).sum()
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(ShoestringError, match="was changed in place"):
        loss.backward()
