"""What a plan does to a user's own model, and the way back from it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoestring
from shoestring import SGD, Plan, ShoestringError, Task, apply
from shoestring.techniques.sparsity.conversion import from_dense
from shoestring.techniques.sparsity.layer import SparseLayer


def tied():
    """A shared module, a convolution and a norm, called with a keyword."""
    shared = nn.Linear(16, 16)
    return nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), shared,
                         nn.ReLU(), shared, nn.Linear(16, 4))  # fmt: skip


def encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.Sequential(nn.Flatten(), nn.Unflatten(1, (4, 16)), layer, nn.Flatten(), nn.Linear(64, 4))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def task_of(build):
    torch.manual_seed(0)
    batch = torch.randn(8, 1, 8, 8), torch.randint(4, (8,))
    return Task(build(), loss, batch, SGD(lr=0.1, momentum=0.9))


def test_of_a_model_that_has_values_the_largest_weights_are_kept_unless_random_ones_are_asked_for():
    def kept(value):
        model = apply(task_of(tied), Plan(nonzero=value)).model
        return next(module for module in model.modules() if isinstance(module, SparseLayer)).values.abs().min()

    weight = task_of(tied).model[4].weight.abs().flatten().sort(descending=True).values
    asked = kept({"nonzero": 25, "positions": "random"})
    assert kept(25) == weight[len(weight) // 4 - 1] > asked


def test_a_plan_says_which_weights_of_a_sparse_model_survive():
    for device, words in (("cpu", "of the model's weights the largest are kept"), ("meta", "at random positions")):
        task = task_of(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 4)))
        task = Task(task.model.to(device), loss, task.batch, task.optimizer)
        with pytest.raises(ShoestringError, match=words):
            shoestring.plan(task, "1.5MB", risk="exact", calibrate=None)


@pytest.mark.parametrize("plan", [Plan(precision="fp16"), Plan(precision="bf16", nonzero=50)], ids=str)
@pytest.mark.parametrize("build", [tied, encoder])
def test_a_copy_is_changed_if_asked_for_and_the_users_model_stays_as_it_is(build, plan):
    task = task_of(build)
    before = copy.deepcopy(task.model.state_dict())
    lean = apply(task, plan, copy=True)
    lean.step(task.batch)
    after = task.model.state_dict()
    assert lean.model is not task.model and list(after) == list(before)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


class Penalised(nn.Module):
    """A loss that is an object and holds the model."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, model, batch):
        assert model is self.model
        return loss(model, batch)


def test_a_loss_that_holds_the_model_is_copied_with_it():
    task = task_of(tied)
    task = task.with_(loss=Penalised(task.model))
    assert apply(task, Plan(precision="bf16"), copy=True).step(task.batch) > 0


@pytest.mark.parametrize(
    "plan", [Plan(precision="fp16"), Plan(nonzero=40), Plan(nonzero=40, precision="bf16"), Plan(microbatch=4)], ids=str
)
@pytest.mark.parametrize("build", [tied, encoder])
def test_plain_leads_back_to_the_users_own_layers_in_fp32(build, plan):
    task = task_of(build)
    kinds = [type(module) for module in task.model.modules()]
    names = list(task.model.state_dict())
    lean = apply(task, plan)
    lean.step(task.batch)
    wanted = lean.model.eval()(task.batch[0])
    twin = shoestring.plain(lean.model, copy=True)
    assert twin is not lean.model and [type(module) for module in twin.modules()] == kinds
    model = shoestring.plain(lean.model)
    assert model is lean.model
    for one in (model, twin):
        assert [type(module) for module in one.modules()] == kinds and list(one.state_dict()) == names
        assert {tensor.dtype for tensor in one.state_dict().values()} <= {torch.float32, torch.int64}
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in one.modules())
        torch.testing.assert_close(one(task.batch[0]), wanted, atol=0.02, rtol=0.02)
        one.train()(task.batch[0]).sum().backward()
    layers = [module for module in model.modules() if isinstance(module, nn.TransformerEncoderLayer)]
    assert all(layer.activation_relu_or_gelu for layer in layers)  # PyTorch's fast path is open again
    apply(task_of(build).with_(model=model), plan).step(task.batch)  # and can be made lean again


@pytest.mark.parametrize("second", [Plan(precision="fp16"), Plan(nonzero=50), Plan(checkpoint="no-bn")], ids=str)
@pytest.mark.parametrize("first", [Plan(precision="fp16"), Plan(nonzero=30), Plan(microbatch=2)], ids=str)
def test_a_second_plan_is_refused_with_the_way_back(first, second):
    task = task_of(tied)
    lean = apply(task, first)
    way = "task that it was made from" if first.microbatch else "shoestring.plain"
    for use in (lambda: apply(lean.task, second), lambda: shoestring.plan(lean.task, "1MB")):
        with pytest.raises(ShoestringError, match=way):
            use()
    if not first.microbatch:
        with pytest.raises(ShoestringError, match="lean already"):
            apply(task, second)
    lean.step(task.batch)  # and nothing has changed


def test_a_model_that_its_user_made_sparse_takes_a_plan():
    task = task_of(tied)
    from_dense(task.model, 50)
    assert apply(task, Plan(microbatch=4)).step(task.batch) > 0
