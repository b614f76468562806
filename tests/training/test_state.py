import random

import numpy as np
import pytest
import torch
from torch import nn

from shoestring import Adam, Task
from shoestring.errors import ShoestringError
from shoestring.randomness import RandomState, seeded
from shoestring.runs.save import Saves, restore_task
from shoestring.runs.state import ModelState, OptimizerState, Parts, find_stateful, fingerprint, model_tensors, pack


def through_a_save(tmp_path, part, target=None, in_place=False):
    """A part's state, written and read again into `target` (default: the part itself)."""
    saves = Saves(tmp_path / "saves")
    saves.write(1, "", {"part": part})
    saves.newest().restore("part", target or part, in_place)


class Box:
    """Something with a state, whatever it is."""

    def __init__(self, content=None):
        self.content = content

    def state(self):
        return self.content

    def restore(self, state):
        self.content = state


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
    if isinstance(a, dict):
        return type(b) is dict and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or a != a)


@pytest.mark.parametrize(
    "content",
    [
        None,
        {},
        {"a": 1, "b": [1.5, True, None, "text"], "c": {"deep": (1, (2,))}},
        {0: {"momentum": torch.randn(3)}, 1: {}, "1": "another key"},
        {"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1)},
        {"$tensor": "a key like ours", "x": torch.ones(1)},
        [torch.randn(4, 3).t(), (torch.tensor(2.0), torch.empty(0, 5))],
        {"huge": 2**200, "tiny": 5e-324, "infinite": float("inf"), "nothing": float("nan"), "minus": -0.0},
        {"mask": torch.tensor([True, False]), "bits": torch.arange(5, dtype=torch.uint8)},
        {"last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)},
    ],
)
def test_a_state_of_any_plain_structure_comes_back_the_same(tmp_path, content):
    target = Box()
    through_a_save(tmp_path, Box(content), target)
    assert same(content, target.content)


@pytest.mark.parametrize("thing", [object(), {1, 2}, np.float32(1), lambda: 0, {"deep": [b"bytes"]}])
def test_what_is_not_plain_data_is_refused_by_its_place(thing):
    with pytest.raises(ShoestringError, match="cannot be saved"):
        pack({"part": thing})


def small_model():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 4))
    model.register_buffer("hidden", torch.randn(2), persistent=False)
    model[2].weight = nn.Parameter(model[0].weight.t().clone())
    return model


def test_a_model_is_restored_into_the_tensors_that_it_has(tmp_path):
    one, two = small_model(), small_model()
    places = {name: tensor.data_ptr() for name, tensor in model_tensors(two).items()}
    through_a_save(tmp_path, ModelState(one), ModelState(two), in_place=True)
    for name, tensor in model_tensors(two).items():
        assert torch.equal(tensor, model_tensors(one)[name]) and tensor.data_ptr() == places[name]
    assert "hidden" in places and "1.running_mean" in places


def test_shared_weights_are_saved_once_and_stay_shared(tmp_path):
    one, two = (
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
    )
    for model in (one, two):
        model[1].weight = model[0].weight
    through_a_save(tmp_path, ModelState(one), ModelState(two), in_place=True)
    assert two[1].weight is two[0].weight and torch.equal(two[0].weight, one[0].weight)


def test_a_parameter_that_grew_in_training_is_restored_at_its_size(tmp_path):
    one, two = nn.Linear(4, 3), nn.Linear(4, 3)
    one.weight.data = torch.randn(17)
    parameter = two.weight
    through_a_save(tmp_path, ModelState(one), ModelState(two), in_place=True)
    assert two.weight is parameter and torch.equal(two.weight, one.weight)


def trained(kind, steps=3, **options):
    torch.manual_seed(0)
    model = nn.Linear(5, 2)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    for _ in range(steps):
        model(torch.randn(8, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(
    "kind, options",
    [
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Adafactor, {}),
        (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    ],
)
def test_any_optimizer_goes_on_as_if_it_had_not_stopped(tmp_path, kind, options, in_place):
    model, optimizer = trained(kind, **options)
    other, fresh = trained(kind, steps=0 if not in_place else 1, **options)
    other.load_state_dict(model.state_dict())
    fresh.param_groups[0]["lr"] = 7.0
    through_a_save(tmp_path, OptimizerState(optimizer), OptimizerState(fresh), in_place)
    for net, update in ((model, optimizer), (other, fresh)):
        net(torch.ones(8, 5)).square().mean().backward()
        update.step()
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert fresh.param_groups[0]["lr"] == 0.1


def test_optimizer_state_keeps_its_own_type_beside_parameters_of_another(tmp_path):
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    one, two = (torch.optim.SGD([parameter], lr=0.1) for _ in range(2))
    one.state[parameter] = {
        "momentum": torch.tensor([1e-30, 2.0, 3.3]),
        "codes": torch.ones(3, dtype=torch.uint8),
    }
    through_a_save(tmp_path, OptimizerState(one), OptimizerState(two))
    assert same(dict(one.state[parameter]), dict(two.state[parameter]))


def test_an_optimizer_with_its_own_way_to_load_is_asked_for_it(tmp_path):
    class Own(torch.optim.SGD):
        def state_dict(self):
            return {"mine": torch.ones(2)}

        def load_state_dict(self, state_dict):
            self.loaded = state_dict

    own = Own([nn.Parameter(torch.zeros(1))], lr=0.1)
    through_a_save(tmp_path, OptimizerState(own))
    assert same(own.loaded, {"mine": torch.ones(2)})


def draw(generator):
    return [
        torch.rand(3).tolist(),
        torch.randn(3, generator=generator).tolist(),
        np.random.standard_normal(3).tolist(),
        [random.gauss(0, 1) for _ in range(3)],
    ]


def test_every_generator_goes_on_from_where_it_was(tmp_path):
    generator = torch.Generator().manual_seed(3)
    with seeded(5):
        draw(generator)
        state = RandomState({"masks": generator})
        saves = Saves(tmp_path / "saves")
        saves.write(1, "", {"random": state})
        first = draw(generator)
        draw(generator)
        saves.newest().restore("random", state)
        assert draw(generator) == first


def test_seeding_leaves_the_generators_outside_as_they_were():
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    expected = draw(torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    with seeded(2):
        inside = draw(torch.Generator().manual_seed(0))
    assert draw(torch.Generator().manual_seed(0)) == expected
    with seeded(2):
        assert draw(torch.Generator().manual_seed(0)) == inside


class Masked(nn.Linear, Box):
    """A layer with a state of its own, such as the generator of its mask."""

    def __init__(self):
        super().__init__(2, 2)
        self.content = {"drawn": 3}


class Grown(nn.Module):
    """As a sparse layer: the number of its values is drawn when it is built, and changes as it trains."""

    def __init__(self, count, width=4):
        super().__init__()
        self.values, self.width = nn.Parameter(torch.randn(count)), width

    def get_extra_state(self):
        return {"width": self.width}

    def set_extra_state(self, state):
        self.width = state["width"]


def test_a_module_with_an_extra_state_may_be_built_with_other_shapes(tmp_path):
    one, two = nn.Sequential(Grown(5, width=9)), nn.Sequential(Grown(7))
    assert fingerprint(one) == fingerprint(two) != fingerprint(nn.Sequential(nn.Linear(1, 1)))
    assert fingerprint(nn.Linear(2, 3)) != fingerprint(nn.Linear(3, 3))
    tasks = [Task(model, print, torch.ones(1), Adam()) for model in (one, two)]
    groups = [{"model": ModelState(task.model), "parts": Parts(find_stateful(task))} for task in tasks]
    saves = Saves(tmp_path / "saves")
    saves.write(1, fingerprint(one), groups[0])
    restore_task(tasks[1], saves.newest())
    assert torch.equal(two[0].values, one[0].values) and two[0].width == 9


def test_parts_of_a_task_that_have_a_state_are_found(tmp_path):
    def loss(model, batch):
        return model(batch).mean()

    class Scaling(Box):
        def __call__(self, model):
            raise NotImplementedError

    scaling = Scaling({"scale": 1024.0})
    task = Task(nn.Sequential(Masked()), loss, torch.ones(1, 2), Adam(), contexts=(scaling,), after_update=(scaling,))
    found = find_stateful(task)
    assert set(found) == {"context0", "after_update0", "module 0"}
    through_a_save(tmp_path, Parts(found))
    scaling.content = None
    Saves(tmp_path / "saves").newest().restore("part", Parts(found))
    assert scaling.content == {"scale": 1024.0} and task.model[0].content == {"drawn": 3}
