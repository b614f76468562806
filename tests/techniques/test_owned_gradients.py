"""A backward function writes into a gradient only if nobody else can see it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoestring
from shoestring.passes import owned as owned_module
from shoestring.passes.functions import lean_relu, lean_relu_in_place
from shoestring.passes.owned import told_if_owned, usual_references
from shoestring.profiling.dry import dry_run

usual_references()
told: list[bool] = []


class Asking(torch.autograd.Function):
    """x itself; notes whether it was told that the gradient is its own."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    @told_if_owned
    def backward(ctx, grad, owned):
        told.append(owned)
        return grad.clone()


def owned(use) -> list[bool]:
    """What each `Asking` in a graph is told, the last one first."""
    told.clear()
    x = torch.arange(8.0, requires_grad=True)
    use(x)
    return list(told)


def kept_by(keep):
    kept = []

    def use(x):
        y = Asking.apply(x)
        y.register_hook(lambda grad: kept.append(keep(grad)))
        (y * y).sum().backward()

    return use


def test_a_gradient_on_its_way_from_one_node_to_the_next_is_owned():
    assert owned(lambda x: Asking.apply(x).mul(2).sum().backward()) == [True]
    assert owned(lambda x: Asking.apply(Asking.apply(x)).mul(2).sum().backward()) == [True, True]


def test_of_the_two_branches_of_a_sum_only_the_last_one_owns_its_gradient():
    assert owned(lambda x: (Asking.apply(x) + Asking.apply(x.clone())).pow(2).sum().backward()) == [False, True]


def test_a_gradient_that_a_skip_connection_carries_on_is_not_owned():
    def use(x):
        y = Asking.apply(x)
        (y + Asking.apply(y)).pow(2).sum().backward()

    assert owned(use)[0] is False


@pytest.mark.parametrize(
    "keep",
    [lambda grad: grad, lambda grad: grad[:2], lambda grad: grad.detach(), lambda grad: grad.numpy()],
    ids=["itself", "a view", "a detached one", "an array"],
)
def test_a_gradient_that_a_hook_keeps_is_not_owned(keep):
    assert owned(kept_by(keep)) == [False]


def test_a_gradient_that_a_hook_only_looks_at_is_owned():
    assert owned(kept_by(lambda grad: None)) == [True]


def test_a_gradient_that_was_asked_for_or_given_is_not_owned():
    def asked(x):
        y = Asking.apply(x)
        torch.autograd.grad(y.pow(2).sum(), [y, x])

    given = torch.ones(8)
    assert owned(asked) == [False]
    assert owned(lambda x: Asking.apply(x).backward(given)) == [False]


def test_an_expanded_gradient_is_not_owned():
    assert owned(lambda x: Asking.apply(x).sum().backward()) == [False]


def test_a_gradient_that_a_hook_keeps_is_not_owned_in_the_thousandth_pass_either():
    for _ in range(1000):
        assert owned(lambda x: Asking.apply(x).mul(2).sum().backward()) == [True]
        assert owned(kept_by(lambda grad: grad)) == [False]


def test_a_trace_is_told_the_same():
    task = shoestring.builtin("wrn-10-1", batch=2)

    def look(batch):
        told.clear()
        x = batch[0].clone().requires_grad_()
        (Asking.apply(x) + Asking.apply(x.clone())).pow(2).sum().backward()
        kept_by(lambda grad: grad)(x)
        return list(told)

    assert dry_run(task, task.batch, look) == [False, True, False]


class Net(nn.Module):
    """ReLU, batch norm and max-pool with skip connections around them."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv, self.after = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, images):
        maps = F.max_pool2d(F.relu(self.norm(self.stem(images))), 3, 2, 1)
        return (F.relu(maps + self.after(self.conv(F.relu(maps)))) + maps).mean((2, 3))


@pytest.mark.parametrize("hooked", [False, True])
def test_gradients_and_what_hooks_kept_of_them_are_those_of_plain_training(hooked):
    """The norms' inputs are stored exactly, those of the convolutions in 8 bits, which changes only their weights'."""

    def run(rules):
        torch.manual_seed(0)
        model, images, kept = Net().double(), torch.randn(16, 3, 33, 33).double(), []
        if hooked:
            for module in (model.norm, model.after):
                module.register_full_backward_hook(lambda module, grads, outs: kept.extend((*grads, *outs)))
        task = shoestring.Task(model, lambda model, batch: model(batch).pow(2).mean(), images, shoestring.SGD(lr=0.1))
        lean = shoestring.apply(task, shoestring.Plan(**rules))
        lean.step(images)
        return {name: p for name, p in model.named_parameters() if "norm" in name or "after" in name}, kept

    (plain, plain_kept), (lean, lean_kept) = run({}), run({"activations": "int8"})
    for name, parameter in plain.items():
        torch.testing.assert_close(lean[name], parameter, rtol=1e-10, atol=1e-12)
    assert len(plain_kept) == len(lean_kept) == (4 if hooked else 0)
    for ours, theirs in zip(lean_kept, plain_kept, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_relu_reuses_an_owned_gradient_and_leaves_a_shared_one_alone():
    seen = []
    x = torch.randn(4, 8, requires_grad=True)
    y = lean_relu(x)
    y.register_hook(lambda grad: seen.append(grad))
    (y * y).sum().backward()
    torch.testing.assert_close(seen[0], 2 * y.detach())
    torch.testing.assert_close(x.grad, 2 * y.detach())


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("of_gradient", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("of_map", [torch.contiguous_format, torch.channels_last])
def test_a_relu_passes_the_same_gradient_in_every_layout(of_map, of_gradient, in_place):
    torch.manual_seed(0)
    leaf = torch.randn(3, 5, 7, 9).contiguous(memory_format=of_map).requires_grad_()
    grad = torch.randn(3, 5, 7, 9).contiguous(memory_format=of_gradient)
    kept = grad.clone()
    y = (lean_relu_in_place if in_place else lean_relu)(leaf * 1)
    assert y.is_contiguous(memory_format=of_map)
    y.backward(grad)
    assert torch.equal(leaf.grad, torch.where(leaf > 0, kept, 0)) and torch.equal(grad, kept)


def test_where_pytorch_does_not_tell_its_references_nothing_is_owned(monkeypatch):
    monkeypatch.setattr(owned_module, "_references", lambda tensor: None)
    monkeypatch.setattr(owned_module, "_lone_references", lambda: None)
    monkeypatch.setattr(owned_module, "usual_references", lambda: None)
    assert not owned_module.is_owned(torch.ones(1))
    assert owned(lambda x: Asking.apply(x).mul(2).sum().backward()) == [False]
