"""ConvNeXt: its size and shapes, a block's formula, and that it learns."""

import pytest
import torch
import torch.nn.functional as F

from shoestring import Adam, ShoestringError, builtin
from shoestring.models.convnext import Block, ConvNeXt
from shoestring.step import Stepper


def test_convnext_tiny_has_the_papers_28_6_million_parameters():
    task = builtin("convnext-tiny", batch=2, device="meta")
    assert sum(parameter.numel() for parameter in task.model.parameters()) == 28_589_128
    assert task.model(task.batch[0].to("meta")).shape == (2, 1000)


def test_a_block_adds_its_scaled_branch_to_its_input():
    torch.manual_seed(0)
    block = Block(8)
    torch.nn.init.ones_(block.scale)
    x = torch.randn(2, 8, 9, 9)
    tokens = F.layer_norm(block.depthwise(x).permute(0, 2, 3, 1), (8,), block.norm.weight, block.norm.bias)
    branch = F.linear(F.gelu(F.linear(tokens, block.fc1.weight, block.fc1.bias)), block.fc2.weight, block.fc2.bias)
    torch.testing.assert_close(block(x), x + branch.permute(0, 3, 1, 2))


def test_the_loss_falls_over_a_few_steps():
    torch.manual_seed(0)
    task = builtin("convnext-tiny", batch=4, image=32, classes=5)
    small = ConvNeXt(5, (1, 1), (16, 32))
    stepper = Stepper(task.with_(model=small, optimizer=Adam(lr=1e-2)))
    losses = [stepper.step(task.batch).item() for _ in range(10)]
    assert losses[-1] < 0.8 * losses[0]


def test_depths_and_widths_must_be_as_many():
    with pytest.raises(ShoestringError, match="2 depths and 1 widths"):
        ConvNeXt(5, (1, 1), (16,))
