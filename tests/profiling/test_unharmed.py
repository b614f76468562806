"""A profile leaves no trace: model, gradients, attributes and random numbers stay as they were."""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from shoestring import SGD, Adam, ShoestringError, Task
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
            name: (id(t), t.data_ptr(), t.clone())
            for name, t in task.model.state_dict(keep_vars=True).items()
        },
        "gradients": [
            None if p.grad is None else (id(p.grad), p.grad.clone()) for p in task.model.parameters()
        ],
        "attributes": {path: dict(vars(module)) for path, module in task.model.named_modules()},
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in task.model.modules()],
        "random": torch.get_rng_state(),
        "batch": task.batch.clone(),
    }


def assert_same(before, after):
    assert before.keys() == after.keys()
    for a, b in zip(
        torch.utils._pytree.tree_leaves(before), torch.utils._pytree.tree_leaves(after), strict=True
    ):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a is b or a == b


def test_the_model_is_as_it_was():
    task = make()
    before = snapshot(task)
    profile(task)
    assert_same(before, snapshot(task))


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
