"""Small networks in which anything may stand between batch norm and convolution, and their check against PyTorch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoestring import SGD, Plan, Task, apply

STRATEGIES = ("no-bn", "residual-1*", "residual-2*", "every-2", "residual-1", "optimal")
QUICK = ("no-bn", "residual-2*")  # the others, on everything, in `make test-slow`
PLANS = [
    pytest.param({"checkpoint": strategy}, id=strategy, marks=[] if strategy in QUICK else pytest.mark.slow)
    for strategy in STRATEGIES
]


class Block(nn.Module):
    """x + tail(conv, relu(norm(x))): `middle(block, y)` is what stands between norm and convolution, and both."""

    def __init__(self, middle, **conv):
        super().__init__()
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU()
        self.conv = nn.Conv2d(4, 4, **({"kernel_size": 3, "padding": 1} | conv))
        self.middle = middle

    def forward(self, x):
        y = self.middle(self, self.norm(x))
        return x + F.interpolate(y, x.shape[2:])


class Net(nn.Module):
    def __init__(self, middle, **conv):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(middle, **conv) for _ in range(3)))
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def images():
    draw = torch.Generator().manual_seed(1)
    return torch.randn(6, 3, 9, 9, generator=draw, dtype=torch.float64), torch.randint(5, (6,), generator=draw)


def check_same(
    model: nn.Module, batch, plan: dict, before_step=lambda model: None, loss=loss_of, steps: int = 2
) -> None:
    """Two updates of the plan are plain PyTorch's: loss, weights and buffers."""
    model, plain = model.double(), copy.deepcopy(model).double()
    lean = apply(Task(model, loss, batch, SGD(lr=0.1)), Plan(**plan))
    before_step(model)
    before_step(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(steps):
        expected = loss(plain, batch)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(lean.step(batch), expected.detach(), rtol=1e-10, atol=1e-10)
    for (name, ours), theirs in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10, msg=name)


def no_grad_beside(block: Block, y: Tensor) -> Tensor:
    y = F.relu(y)
    with torch.no_grad():
        beside = block.conv(y)
    return y * beside


def no_grad_only(block: Block, y: Tensor) -> Tensor:
    with torch.no_grad():
        beside = block.conv(F.relu(y))
    return beside


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


MIDDLES = {
    "modules": lambda m, y: m.conv(m.relu(y)),
    "relu by keyword": lambda m, y: m.conv(F.relu(input=y)),
    "relu in place by position": lambda m, y: m.conv(F.relu(y, True)),
    "relu in place by keyword": lambda m, y: m.conv(F.relu(input=y, inplace=True)),
    "relu_ as a statement": lambda m, y: (y.relu_(), m.conv(y))[1],
    "torch.relu_ by keyword": lambda m, y: m.conv(torch.relu_(input=y)),
    "torch.relu": lambda m, y: m.conv(torch.relu(input=y)),
    "method": lambda m, y: m.conv(y.relu()),
    "conv by keyword": lambda m, y: F.conv2d(input=F.relu(y), weight=m.conv.weight, bias=m.conv.bias, padding=1),
    "conv by position": lambda m, y: F.conv2d(F.relu(y), m.conv.weight, m.conv.bias, [1, 1], [1, 1], [1], 1),
    "conv with padding same": lambda m, y: F.conv2d(F.relu(y), m.conv.weight, padding="same"),
    "conv with padding valid": lambda m, y: F.conv2d(F.relu(y), m.conv.weight, padding="valid"),
    "conv of one example": lambda m, y: torch.stack([m.conv(example) for example in F.relu(y)]),
    "conv in autocast that is off": lambda m, y: _autocast_off(m, F.relu(y)),
    "norm as the weight": lambda m, y: F.conv2d(y, F.relu(y)[:4, :, :3, :3], padding=1),
    "no_grad beside": no_grad_beside,
    "no_grad only": no_grad_only,
    "two convolutions": lambda m, y: m.conv(r := F.relu(y)) + m.conv(r * 2),
    "norm seen after its relu": lambda m, y: m.conv(F.relu(y)) + y,
    "no relu": lambda m, y: m.conv(y),
    "relu twice": lambda m, y: m.conv(F.relu(F.relu(y))),
    "a view between": lambda m, y: m.conv(F.relu(y).view(y.shape)),
    "data of it": lambda m, y: m.conv(F.relu(y)) + F.relu(y).data.mean(),
    "transposed by attribute": lambda m, y: m.conv(F.relu(y).mT),
    "own autograd function": lambda m, y: m.conv(Doubled.apply(F.relu(y))),
    "linear by keyword": lambda m, y: F.linear(
        input=F.relu(y).movedim(1, 3), weight=m.conv.weight[:, :, 0, 0]).movedim(3, 1),
    "matmul by keyword": lambda m, y: torch.matmul(input=F.relu(y), other=F.relu(y).mT),
    "dropout of nothing by keyword": lambda m, y: F.dropout(input=m.conv(F.relu(y)), p=0.0, training=True),
    "attention by keyword": lambda m, y: F.scaled_dot_product_attention(query=y, key=F.relu(y), value=y),
    "norm by keyword": lambda m, y: m.conv(F.relu(F.batch_norm(
        input=y, running_mean=m.norm.running_mean, running_var=m.norm.running_var, training=True))),
    "norm of nothing but a map": lambda m, y: m.conv(F.relu(F.batch_norm(y, None, None, training=True))),
    "native norm": lambda m, y: m.conv(F.relu(torch.batch_norm(
        y, m.norm.weight, m.norm.bias, m.norm.running_mean, m.norm.running_var, True, 0.1, 1e-5, False))),
    "weights normalised by batch norm": lambda m, y: F.conv2d(
        F.relu(y), F.batch_norm(m.conv.weight.view(1, 4, -1), None, None, training=True).view(4, 4, 3, 3), padding=1),
}  # fmt: skip


def _autocast_off(block: Block, y: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return block.conv(y)


class Switched:
    """Takes the ReLU, or another path, only if `on`: the code of a model may well change its mind."""

    def __init__(self, on, off):
        self.on_path, self.off_path, self.on = on, off, True

    def __call__(self, block, y):
        return (self.on_path if self.on else self.off_path)(block, y)

    def __deepcopy__(self, memo):
        return self
