"""A profile leaves no trace: model, gradients, attributes and random numbers stay as they were."""

import copy
import sys
from collections import defaultdict, deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import transformers_zoo
from shoestring import SGD, Adam, Plan, ShoestringError, Task, apply
from shoestring.profiling import profile


class Mixed(nn.Module):
    """Everything that a profile could leave changed: dropout, running statistics, an LSTM, state, a list."""

    def __init__(self):
        super().__init__()
        self.norm, self.lstm, self.drop = nn.BatchNorm1d(8), nn.LSTM(8, 8, batch_first=True), nn.Dropout(0.5)
        self.last, self.history, self.scale = None, [], torch.ones(8)

    def forward(self, x):
        self.last = self.drop(self.lstm(self.norm(x)[:, None])[0])
        self.history.append(self.last.detach())
        self.calls = 1
        return self.last * self.scale


def loss(model, batch):
    return model(batch).square().mean()


def failing(model, batch):
    raise KeyError("the user's own mistake")


def make(**changes) -> Task:
    torch.manual_seed(3)
    fields = {"model": Mixed(), "loss": loss, "batch": torch.randn(4, 8), "optimizer": Adam(), "clip": 1.0}
    return Task(**(fields | changes))


def snapshot(task: Task):
    return {
        "weights": {
            name: (id(t), t.data_ptr(), t.clone()) for name, t in task.model.state_dict(keep_vars=True).items()
        },
        "gradients": [None if p.grad is None else (id(p.grad), p.grad.clone()) for p in task.model.parameters()],
        "attributes": {path: dict(vars(module)) for path, module in task.model.named_modules()},
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in task.model.modules()],
        "random": torch.get_rng_state(),
        "batch": task.batch.clone(),
    }


def assert_same(before, after):
    assert before.keys() == after.keys()
    for a, b in zip(torch.utils._pytree.tree_leaves(before), torch.utils._pytree.tree_leaves(after), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a is b or a == b


def test_the_model_is_as_it_was():
    task = make()
    before = snapshot(task)
    profile(task)
    assert_same(before, snapshot(task))


def test_modules_still_share_the_keys_of_their_attributes():
    task = make(model=nn.Sequential(nn.BatchNorm1d(8), nn.BatchNorm1d(8)))
    before = sys.getsizeof(vars(task.model[0]))
    profile(task)
    assert sys.getsizeof(vars(task.model[0])) < 1.5 * before  # with keys of its own it is three times as large


def test_gradients_that_were_there_are_still_there():
    task = make(model=nn.Linear(8, 8))
    loss(task.model, task.batch).backward()
    before = snapshot(task)
    profile(task)
    assert_same(before, snapshot(task))


@pytest.mark.parametrize(
    "error, changes", [(KeyError, {"loss": failing}), (ShoestringError, {"loss": lambda m, b: m(b)})]
)
def test_an_error_in_the_step_leaves_the_model_as_it_was(error, changes):
    task = make(**changes)
    before = snapshot(task)
    with pytest.raises(error):
        profile(task)
    assert_same(before, snapshot(task))


def test_no_fake_tensor_stays_anywhere_in_the_model():
    task = make()
    profile(task)
    leaves = torch.utils._pytree.tree_leaves([dict(vars(module)) for module in task.model.modules()])
    assert not any(isinstance(leaf, FakeTensor) for leaf in leaves)
    assert task.model.last is None and task.model.history == []
    copy.deepcopy(task.model)


def test_training_goes_on_as_if_nothing_had_been_profiled():
    def trained(profiles):
        task = make(optimizer=SGD(lr=0.1))
        optimizer = task.optimizer(task.model.parameters())
        for _ in range(3):
            if profiles:
                profile(task)
            optimizer.zero_grad()
            task.loss(task.model, task.batch).backward()
            optimizer.step()
        return task.model.state_dict()

    for a, b in zip(trained(True).values(), trained(False).values(), strict=True):
        assert torch.equal(a, b)


def test_a_layer_that_lists_its_weights_a_second_time_trains_its_real_ones_afterwards():
    task = make(model=nn.LSTM(8, 8), loss=lambda model, batch: model(batch[None])[0].square().mean())
    profile(task)
    assert all(a is b for a, b in zip(task.model._flat_weights, task.model.parameters(), strict=True))
    task.loss(task.model, task.batch).backward()
    assert all(type(p.grad) is torch.Tensor for p in task.model.parameters())


def test_the_same_task_gives_the_same_profile_again():
    task = make()
    first, second = profile(task), profile(task)
    assert first.to_json() == second.to_json()
    assert first.ledger.timeline() == second.ledger.timeline()


# -- what a model changes of itself in its first forward pass ------------------------------------------------
class Capturing(nn.Module):
    """Installs hooks behind a flag in its first forward pass, and counts, caches and collects in all ways there are."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4))
        self.installed, self.seen, self.last = False, set(), deque(maxlen=2)
        self.by_name, self.nested, self.record = defaultdict(list), {"a": [{1}]}, SimpleNamespace(calls=0, cache=None)

    def forward(self, x):
        if not self.installed:
            self.installed = True
            for layer in self.layers:
                layer.register_forward_hook(lambda module, args, out: self.states.append(out))
                layer.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
                layer.register_full_backward_hook(lambda module, given, made: None)
            self.register_buffer("late", torch.zeros(2))
            self.added = nn.Identity()
        self.states = []
        for layer in self.layers:
            x = layer(x)
        self.seen.add(len(self.seen))
        self.last.append(x)
        self.by_name["x"].append(x)
        self.nested["a"][0].add(2)
        self.record.calls, self.record.cache = self.record.calls + 1, x
        return x


def everything(model):
    """All that a model's modules hold, looked into as far as it can be changed."""

    def look(value):
        if isinstance(value, dict):
            return {key: look(part) for key, part in value.items()}
        if isinstance(value, list | tuple | set | deque):
            return [type(value), *map(look, value)]
        if isinstance(value, SimpleNamespace):
            return look(vars(value))
        return id(value)

    return {path: look(vars(module)) for path, module in model.named_modules()}


@pytest.mark.parametrize("error", [False, True])
def test_hooks_and_attributes_that_a_forward_pass_makes_are_gone(error):
    def failing(model, batch):
        raise KeyError(loss(model, batch))

    task = make(model=Capturing(), loss=failing if error else loss)
    before = everything(task.model)
    if error:
        with pytest.raises(KeyError):
            profile(task)
    else:
        profile(task)
    assert everything(task.model) == before
    task.model(task.batch)
    assert len(task.model.states) == 4, "each hook is there once"


@pytest.mark.parametrize("strategy", ["every-2", "optimal"])
def test_applying_a_plan_leaves_hooks_and_attributes_as_they_were(strategy):
    task = make(model=Capturing(), clip=None)
    before = everything(task.model)
    apply(task, Plan(checkpoint=strategy))
    assert everything(task.model) == before


MORE = [pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "vit", "gpt2")]


@pytest.mark.parametrize("name", ["bert", "t5", "segformer", "convnext", *MORE])
def test_a_model_of_transformers_is_as_it_was(name):
    task = transformers_zoo.make(name)
    untouched = copy.deepcopy(task.model)
    before = everything(task.model)
    profile(task)
    assert everything(task.model) == before
    how = task.batch | {"output_hidden_states": True}
    states = [key for key in untouched.eval()(**how) if key.endswith("hidden_states")]
    for key in states:
        for a, b in zip(task.model.eval()(**how)[key], untouched(**how)[key], strict=True):
            assert torch.equal(a, b)
    assert states
