"""Regions: what they save, when they are recomputed, and where that stops."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from shoestring import ShoestringError
from shoestring.ledger import Phase
from shoestring.passes.checksums import Seen
from shoestring.passes.regions import Region
from shoestring.passes.saved_tensors import AsIs
from shoestring.phases import current_phase


class Counted(nn.Module):
    """exp, sin and cos of a parameter's product with x; counts how far it was run."""

    def __init__(self):
        super().__init__()
        self.weight, self.steps = nn.Parameter(torch.full((3,), 0.5)), []

    def forward(self, x):
        for step in ("mul", "exp", "sin", "end"):
            self.steps.append((step, current_phase()))
            x = {"mul": lambda x: x * self.weight, "exp": torch.exp, "sin": torch.sin, "end": lambda x: x + 1}[step](x)
        return x


def leaf():
    return torch.arange(3.0, requires_grad=True)


def test_a_region_gives_the_gradients_of_its_function():
    x, y, plain, again = leaf(), leaf(), Counted(), Counted()
    plain(x * 2).sum().backward()
    Region("region").call(again, (y * 2,), {}).sum().backward()
    assert torch.equal(y.grad, x.grad)
    assert torch.equal(again.weight.grad, plain.weight.grad)


def test_a_region_keeps_its_input_and_nothing_else():
    kept = []

    def store(tensor):
        kept.append(tensor)
        return AsIs(tensor)

    x = leaf() * 2
    region = Region("region", store_input=store)
    region.call(Counted(), (x,), {})
    assert len(kept) == 1
    assert kept[0] is x
    assert region.recomputed is None
    assert len(region.saved) == 3  # the product's x, exp's output, sin's input


def test_a_region_runs_again_once_and_stops_at_the_last_tensor_that_is_asked_for():
    model = Counted()
    loss = Region("region").call(model, (leaf() * 2,), {}).sum()
    assert [phase for _, phase in model.steps] == [current_phase()] * 4
    loss.backward()
    assert model.steps[4:] == [(step, Phase.RECOMPUTE) for step in ("mul", "exp", "sin")]


def test_calls_of_one_region_pass_on_what_they_made():
    first, second, x = Counted(), Counted(), leaf()
    region = Region("region")
    between = region.call(first, (x * 2,), {})
    assert region.place(between) is not None
    region.call(second, (between,), {}).sum().backward()
    y, plain = leaf(), (Counted(), Counted())
    plain[1](plain[0](y * 2)).sum().backward()
    assert torch.equal(x.grad, y.grad)
    assert torch.equal(first.weight.grad, plain[0].weight.grad)


def test_a_region_inside_a_region():
    inner = Counted()

    def outer(x):
        return Region("inner").call(inner, (x.tanh(),), {}).cos()

    x, y, plain = leaf(), leaf(), Counted()
    Region("outer").call(outer, (x * 2,), {}).sum().backward()
    plain((y * 2).tanh()).cos().sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_what_a_region_made_is_not_held_by_it():
    region = Region("region")
    output = region.call(Counted(), (leaf() * 2,), {})
    number = id(output)
    assert region.place(output)
    del output
    assert region._made[number][0]() is None


def test_random_numbers_are_drawn_again_and_the_generator_goes_on():
    x = torch.randn(1000, requires_grad=True)
    torch.manual_seed(3)
    out = Region("region").call(nn.Dropout(0.5), (x * 1,), {})
    after = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(torch.get_rng_state(), after)
    assert torch.equal(x.grad != 0, out != 0)


def test_the_random_state_is_kept_only_where_it_was_drawn_from():
    drawing, still = Region("a"), Region("b")
    drawing.call(nn.Dropout(0.5), (leaf() * 1,), {})
    still.call(nn.Tanh(), (leaf() * 1,), {})
    assert list(drawing.calls[0].state.random) == [torch.device("cpu")]
    assert not still.calls[0].state.random


def test_a_region_whose_second_run_saves_less_is_told():
    runs = []

    def moody(x):
        runs.append(1)
        return x.exp().sin() if len(runs) == 1 else x.exp() + 1

    with pytest.raises(ShoestringError, match="the region saved 1 tensors in place of 2 when it was recomputed"):
        Region("the region").call(moody, (leaf() * 2,), {}).sum().backward()


def test_an_input_that_is_changed_in_place_later_is_told():
    x = leaf() * 2
    loss = Region("region").call(torch.sin, (x,), {}).sum()
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(ShoestringError, match="was changed in place"):
        loss.backward()


# -- other devices --------------------------------------------------------------------------------------------------
class Accelerator:
    """A device module as CUDA's or XPU's, with a generator for each of two devices."""

    def __init__(self):
        self.generators, self.selected = [torch.Generator().manual_seed(seed) for seed in (1, 2)], 0

    @contextmanager
    def device(self, index):
        before, self.selected = self.selected, index
        yield
        self.selected = before

    def get_rng_state(self):
        return self.generators[self.selected].get_state()

    def set_rng_state(self, state):
        self.generators[self.selected].set_state(state)


class Far(torch.Tensor):
    """A tensor that says that it is on the second accelerator."""

    @staticmethod
    def __new__(cls, near):
        return torch.Tensor._make_wrapper_subclass(cls, near.shape, dtype=near.dtype, device="xpu:1")

    def __init__(self, near):
        self.near = near

    __torch_dispatch__ = None


@pytest.fixture
def accelerator(monkeypatch):
    module = Accelerator()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


def noisy(generator):
    return lambda x, *_: (x + torch.rand(3, generator=generator)).exp() * torch.rand(3, generator=generator)


@pytest.mark.parametrize("place", ["the model's", "an argument's"])
def test_random_numbers_of_another_device_are_drawn_again_and_its_generator_goes_on(accelerator, place):
    second = accelerator.generators[1]
    far = Far(torch.zeros(1)) if place == "an argument's" else None
    devices = frozenset() if far is not None else frozenset({torch.device("xpu:1")})
    x, y, plain = leaf(), leaf(), torch.Generator().manual_seed(2)
    out = Region("region", devices=devices).call(noisy(second), (x * 2, far), {})
    wanted = noisy(plain)(y * 2)
    assert torch.equal(out, wanted)
    torch.rand(3, generator=second)  # the backward pass comes later
    after = second.get_state()
    out.sum().backward()
    wanted.sum().backward()
    assert torch.equal(x.grad, y.grad)
    assert torch.equal(second.get_state(), after)


def test_without_its_devices_a_region_that_draws_there_is_told(accelerator):
    loss = Region("region").call(noisy(accelerator.generators[1]), (leaf() * 2,), {}).sum()
    with pytest.raises(ShoestringError, match=r"region saved other values of \(3,\) when it was recomputed"):
        loss.backward()


def test_the_states_of_devices_that_were_not_drawn_from_are_dropped(accelerator):
    both = frozenset({torch.device("xpu:0"), torch.device("xpu:1")})
    region = Region("region", devices=both)
    region.call(noisy(accelerator.generators[0]), (leaf() * 2,), {})
    assert list(region.calls[0].state.random) == [torch.device("xpu:0")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_of_another_device_is_as_it_was(accelerator, dtype):
    seen = []

    def look(x):
        seen.append((torch.is_autocast_enabled("xpu"), torch.get_autocast_dtype("xpu")))
        return x.exp()

    with torch.autocast("xpu", dtype):
        loss = Region("region", devices=frozenset({torch.device("xpu:0")})).call(look, (leaf() * 2,), {}).sum()
    loss.backward()
    assert seen == [(True, dtype)] * 2
    assert not torch.is_autocast_enabled("xpu")


# -- what a second run is compared by ---------------------------------------------------------------------------------
def fickle(change):
    """A function that saves two tensors, the first of which `change` is done to when it is recomputed."""
    runs = []

    def function(x):
        runs.append(1)
        x = x * 1
        if len(runs) > 1:
            with torch.no_grad():
                change(x)
        return x.sin() + x.detach().mul(0).add(1).requires_grad_().exp()

    return function


CHANGES = {
    "one element's last bit": lambda x: x.view(-1).view(torch.int32)[5].bitwise_xor_(1),
    "one sign": lambda x: x.view(-1)[7].neg_(),
    "all signs": lambda x: x.neg_(),
    "the order of rows": lambda x: x.copy_(x.flip(0)),
    "the order of columns": lambda x: x.copy_(x.roll(1, 1)),
    "a number to NaN": lambda x: x.view(-1)[3].fill_(float("nan")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_in_any_tensor_that_is_saved_is_told(change):
    x = torch.linspace(1, 2, 24).view(6, 4).requires_grad_()
    with pytest.raises(ShoestringError, match=r"saved other values of \(6, 4\) .* not deterministic"):
        Region("region").call(fickle(CHANGES[change]), (x,), {}).sum().backward()


LAYOUTS = {
    "rows": lambda t: t,
    "columns": lambda t: t.t(),
    "every other column": lambda t: t[:, ::2],
    "part of each row": lambda t: t.view(256, 50, 80)[..., 10:30].transpose(0, 1),
    "channels_last": lambda t: t.view(8, 32, 80, 50).to(memory_format=torch.channels_last),
    "expanded": lambda t: t[:, None].expand(-1, 3, -1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_change_of_a_fiftieth_of_a_large_tensor_is_told_however_it_lies_in_memory(layout):
    made = LAYOUTS[layout]
    tensor = torch.randn(256, 4000)
    before = Seen.of(made(tensor))
    assert not Seen.of(made(tensor.clone())).difference(before)
    for rows in (slice(0, 5), slice(77, 82), slice(251, 256)):
        other = tensor.clone()
        other[rows] += 1
        assert "other values" in Seen.of(made(other)).difference(before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool,
                                   torch.complex64])  # fmt: skip
def test_tensors_of_every_type_are_compared(dtype):
    tensor = torch.tensor([0, 1, 1, 0]).to(dtype)
    assert not Seen.of(tensor.clone()).difference(Seen.of(tensor))
    assert Seen.of(tensor.flip(0).roll(1)).difference(Seen.of(tensor))
    assert Seen.of(torch.zeros(4)).difference(Seen.of(tensor))


def test_a_scalar_and_an_empty_tensor_are_compared():
    assert Seen.of(torch.tensor(1.0)).difference(Seen.of(torch.tensor(2.0)))
    assert not Seen.of(torch.empty(0, 3)).difference(Seen.of(torch.empty(0, 3)))


def test_a_region_whose_input_comes_back_rounded_is_not_called_random():
    class Rounded:
        def __init__(self, tensor):
            self.tensor = tensor.half().float()

        def take(self):
            return self.tensor

    x = torch.linspace(1, 2, 24).requires_grad_()
    Region("region", store_input=Rounded).call(torch.exp, (x * 1,), {}).sum().backward()
    assert torch.allclose(x.grad, x.exp(), rtol=1e-3)


def test_a_result_that_is_changed_in_place_before_the_next_call_is_an_input_of_its_own():
    """An in-place activation between two blocks of one region, which neither of them contains."""

    def run(call):
        x = leaf() * 2 - 2
        first = call(lambda x: (x * 3).sin(), (x,), {})
        return call(lambda x: (x * x).exp(), (first.relu_(),), {}), x

    region = Region("region")
    (y, x), (wanted, plain) = run(region.call), run(lambda function, args, kwargs: function(*args))
    (found,), (gradient,) = torch.autograd.grad(y.sum(), x), torch.autograd.grad(wanted.sum(), plain)
    assert torch.equal(y, wanted) and torch.equal(found, gradient)


@pytest.mark.parametrize("call", [
    lambda attention, x: attention(x, x, x),
    lambda attention, x: attention(query=x, key=x, value=x, need_weights=False),
    lambda attention, x: attention(x, y := x * 2, y),
], ids=["self", "by keyword", "keys are values"])  # fmt: skip
def test_arguments_that_were_one_tensor_are_one_again(call):
    """MultiheadAttention asks whether they are, and projects them together if so."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2)
    gradients = []
    for run in (attention, lambda *args, **kwargs: Region("region").call(attention, args, kwargs)):
        x = torch.linspace(-1, 1, 40).view(5, 1, 8).requires_grad_()
        attention.zero_grad()
        call(run, x * 1)[0].square().sum().backward()
        gradients.append([x.grad, *(parameter.grad.clone() for parameter in attention.parameters())])
    assert all(map(torch.equal, *gradients))


def test_a_tensor_that_is_given_twice_is_stored_once():
    stored = []

    def store(tensor):
        stored.append(tensor)
        return AsIs(tensor)

    x = leaf() * 2
    Region("region", store_input=store).call(lambda a, b, *, c: a * b * c, (x, x), {"c": x}).sum().backward()
    assert len(stored) == 1
