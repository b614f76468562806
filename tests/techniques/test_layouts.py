"""Maps lie in memory as under plain PyTorch, whatever their strides: dropout draws its numbers in that order."""

import pytest
import torch
import torch.nn.functional as F
from runs import astray, doubled, run
from torch import nn

from shoestring import SGD, Plan, Task, apply
from shoestring.kernels.conv import conv_forward
from views import LAST, VIEWS

BLOCKS = {
    "conv": lambda: [nn.Conv2d(4, 4, 3, padding=1)],
    "1 x 1 conv": lambda: [nn.Conv2d(4, 6, 1, stride=2, bias=False)],
    "norm, ReLU, conv": lambda: [nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2, padding=1)],
    "norm": lambda: [nn.BatchNorm2d(4)],
    "ReLU": lambda: [nn.ReLU()],
    "dropout": lambda: [nn.Dropout(0.3)],
}
CASES = [
    *((block, Plan(checkpoint="every-3")) for block in BLOCKS),
    *((block, Plan(checkpoint="no-bn")) for block in BLOCKS if "norm" in block),
    *((block, Plan(activations="masks")) for block in BLOCKS if "ReLU" in block),
]


class Net(nn.Module):
    def __init__(self, view, block, form):
        super().__init__()
        torch.manual_seed(0)
        self.view, self.scale = VIEWS[view], nn.Parameter(torch.ones(4, 1, 1))
        self.blocks = nn.ModuleList(nn.Sequential(*BLOCKS[block]()) for _ in range(2 if block != "1 x 1 conv" else 1))
        self.to(memory_format=form)

    def forward(self, x):
        for block in self.blocks:
            x = F.dropout(block(self.view(x * self.scale)), 0.5)
        return x


def task(*which):
    model = Net(*which)
    return Task(model, lambda model, x: model(x).square().mean(), torch.randn(6, 4, 5, 5), SGD(lr=0.1))


@pytest.mark.parametrize(("block", "plan"), CASES, ids=str)
@pytest.mark.parametrize("form", [torch.contiguous_format, LAST], ids=["weights contiguous", "weights channels_last"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_dropout_behind_any_layer_drops_the_same_elements(view, form, block, plan):
    found, wanted = run(apply(doubled(task(view, block, form)), plan).task), run(doubled(task(view, block, form)))
    assert astray(found, wanted) < 1e-9


@pytest.mark.parametrize("form", [torch.contiguous_format, LAST], ids=["weight contiguous", "weight channels_last"])
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("view", VIEWS)
def test_a_convolution_lies_in_memory_as_pytorchs(view, kernel, form):
    x, weight = VIEWS[view](torch.randn(3, 4, 5, 5)), torch.randn(6, 4, kernel, kernel).contiguous(memory_format=form)
    wanted = F.conv2d(x, weight, padding=1)
    found = conv_forward(x, weight, padding=1)
    assert found.stride() == wanted.stride()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
