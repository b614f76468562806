"""WideResNet: sizes, shapes and the identity shortcut."""

import pytest
import torch

from shoestring import ShoestringError, builtin
from shoestring.models.wrn import WideResNet, identity_shortcut
from shoestring.step import Stepper


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def test_wrn_28_2_has_exactly_1456858_parameters():
    model = builtin("wrn-28-2", batch=1, device="meta").model
    assert parameters(model) == 1_456_858
    assert parameters(model.conv) == 432
    assert parameters(model.fc) == 1_290
    assert sum(b.conv1.weight.numel() + b.conv2.weight.numel() for b in model.blocks) == 1_451_520
    assert len(model.blocks) == 12


@pytest.mark.parametrize("depth, width, channels", [(10, 0.5, 32), (10, 1.5, 96), (16, 1, 64)])
def test_any_depth_and_width_scores_every_class(depth, width, channels):
    model = WideResNet(depth, width, classes=7)
    assert model.fc.in_features == channels
    assert model(torch.randn(2, 3, 16, 16)).shape == (2, 7)


def test_the_shortcut_keeps_every_second_pixel_and_adds_zero_maps():
    x = torch.randn(2, 3, 4, 4)
    out = identity_shortcut(x, 5, 2)
    assert torch.equal(out[:, :3], x[:, :, ::2, ::2])
    assert torch.equal(out[:, 3:], torch.zeros(2, 2, 2, 2))


def test_the_shortcut_of_a_block_that_keeps_its_shape_is_its_input():
    x = torch.randn(2, 3, 4, 4)
    assert identity_shortcut(x, 3, 1).data_ptr() == x.data_ptr()


def test_a_block_whose_convolutions_are_zero_is_its_shortcut():
    block = WideResNet(10, 2).blocks[1]
    torch.nn.init.zeros_(block.conv2.weight)
    x = torch.randn(2, 32, 8, 8)
    assert torch.equal(block(x), identity_shortcut(x, 64, 2))


def test_the_loss_falls_over_a_few_steps():
    task = builtin("wrn-10-0.5", batch=8, image=16)
    stepper = Stepper(task)
    losses = [stepper.step(task.batch).item() for _ in range(8)]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("depth, nearest", [(27, 28), (24, 22), (4, 10), (99_999, 1000)])
def test_a_depth_that_is_not_6n_plus_4_is_refused(depth, nearest):
    with pytest.raises(ShoestringError, match=rf"depth {depth} .*6n\+4.*try {nearest}"):
        builtin(f"wrn-{depth}-2")


@pytest.mark.parametrize("width", ["0", "10001", "0.0"])
def test_a_width_out_of_range_is_refused(width):
    with pytest.raises(ShoestringError, match="at most 10,000"):
        builtin(f"wrn-28-{width}")
