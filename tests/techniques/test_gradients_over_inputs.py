"""Gradients of batch norm, ReLU and sparse convolution written over the input, a few channels at a time."""

import pytest
import torch
from torch import nn

from metering import measured, predicted
from shoestring import SGD, Plan, Task, apply
from shoestring.passes import functions, sparse_layers

PLANS = {
    "sparse": Plan(nonzero=50, checkpoint="residual-1*"),
    "sparse, FP16": Plan(nonzero=50, precision="fp16", checkpoint="residual-1*"),
    "sparse, whole": Plan(nonzero=50, checkpoint="no-bn"),
    "sparse, BF16": Plan(nonzero=50, precision="bf16", checkpoint="no-bn"),
}


class Block(nn.Module):
    """`hold` keeps the map between its convolutions, as a model that is looked into later may."""

    def __init__(self, hold):
        super().__init__()
        self.hold, self.held = hold, []
        self.norm1, self.conv1 = nn.BatchNorm2d(32), nn.Conv2d(32, 32, 3, padding=1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(32), nn.Conv2d(32, 32, 3, padding=1, bias=False)

    def forward(self, x):
        y = self.conv1(self.norm1(x).relu())
        if self.hold:
            self.held.append(y)
        return x + self.conv2(self.norm2(y).relu())


class Net(nn.Module):
    def __init__(self, hold):
        super().__init__()
        self.conv, self.blocks = nn.Conv2d(3, 32, 3, padding=1), nn.ModuleList([Block(hold), Block(hold)])
        self.norm, self.head = nn.BatchNorm2d(32), nn.Linear(32, 10)

    def forward(self, x):
        x = self.conv(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).relu().mean((2, 3)))


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])


def task(hold=False):
    torch.manual_seed(0)
    batch = torch.randn(4, 3, 8, 8), torch.randint(10, (4,))
    return Task(Net(hold), loss, batch, SGD(lr=0.1, momentum=0.9))


@pytest.fixture(params=PLANS.values(), ids=PLANS)
def plan(request):
    return request.param


@pytest.fixture
def pieces(monkeypatch):
    """Counts the maps that are made in pieces, which small ones are not by themselves."""
    made, over_input = [], functions._over_input
    monkeypatch.setattr(sparse_layers, "LEAST_BYTES", 1)
    monkeypatch.setattr(functions, "_over_input", lambda *args: made.append(args[-1]) or over_input(*args))
    return made


def gradients(task, plan):
    torch.manual_seed(1)
    lean = apply(task, plan)
    lean.backward(lean.task.batch)
    return {name: p.grad for name, p in lean.model.named_parameters()}, lean


def assert_alike(found, wanted):
    """But for the order of sums over a map, which may round a gradient of 16 bits otherwise."""
    for name, gradient in wanted.items():
        error = (found[name].float() - gradient.float()).abs().max() / gradient.float().abs().max().clamp(min=1e-6)
        assert error <= 2 * torch.finfo(gradient.dtype).eps + 1e-5, name


def test_gradients_are_those_of_the_whole_map(plan, pieces, monkeypatch):
    found, _ = gradients(task(), plan)
    assert pieces, "no map was made in pieces"
    monkeypatch.setattr(sparse_layers, "MOST_PIECES", 1)
    count = len(pieces)
    whole, _ = gradients(task(), plan)
    assert len(pieces) == count
    assert_alike(found, whole)


def test_a_map_that_somebody_else_holds_is_not_written_over(plan, pieces, monkeypatch):
    gradients(task(), plan)
    assert len(pieces) == 4  # the inputs of both norms of both blocks
    found, lean = gradients(task(hold=True), plan)
    assert len(pieces) == 4 and all(block.held for block in lean.model.blocks)
    monkeypatch.setattr(sparse_layers, "MOST_PIECES", 1)
    whole, _ = gradients(task(hold=True), plan)
    assert_alike(found, whole)


def test_a_trace_makes_the_same_pieces_as_a_step(plan, pieces):
    lean = apply(task(), plan)
    traced = predicted(lean.task).peak_bytes
    assert pieces
    assert measured(lean.task).peak_bytes == pytest.approx(traced, rel=1e-4)
