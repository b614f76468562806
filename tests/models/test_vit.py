"""The vision transformer: size, shape, and attention over all patches."""

import pytest
import torch

from shoestring import Adam, ShoestringError, builtin
from shoestring.models.vit import VisionTransformer
from shoestring.step import Stepper


def test_vit_tiny_has_12_layers_of_width_192_on_64_patches():
    task = builtin("vit-tiny", batch=3, device="meta")
    assert (len(task.model.blocks), task.model.fc.in_features) == (12, 192)
    assert task.model.positions.shape == (1, 65, 192)
    assert task.model(task.batch[0].to("meta")).shape == (3, 10)
    assert task.optimizer == Adam(lr=1e-3, weight_decay=0.05, decoupled=True)


def test_a_block_attends_as_softmax_of_scaled_products_does():
    block = VisionTransformer(width=8, heads=2, depth=1).blocks[0]
    x = torch.randn(2, 5, 8)
    query, key, value = (part.view(2, 5, 2, 4).transpose(1, 2) for part in block.qkv(x).chunk(3, dim=2))
    expected = ((query @ key.transpose(2, 3) / 2).softmax(3) @ value).transpose(1, 2).reshape(2, 5, 8)
    torch.testing.assert_close(block.attend(x), expected)


def test_every_patch_reaches_the_scores():
    torch.manual_seed(0)
    model = VisionTransformer(image=8, width=12, depth=1)
    images = torch.randn(1, 3, 8, 8, requires_grad=True)
    model(images).square().sum().backward()
    assert (images.grad.unfold(2, 4, 4).unfold(3, 4, 4).abs().amax((0, 1, 4, 5)) > 0).all()


def test_the_loss_falls_over_a_few_steps():
    task = builtin("vit-tiny", batch=4, image=8)
    small = VisionTransformer(image=8, width=24, depth=2)
    stepper = Stepper(task.with_(model=small, optimizer=Adam(lr=1e-2)))
    losses = [stepper.step(task.batch).item() for _ in range(10)]
    assert losses[-1] < 0.8 * losses[0]


def test_an_image_that_patches_do_not_tile_is_refused():
    with pytest.raises(ShoestringError, match="image 30 must be a multiple of the 4 pixels"):
        builtin("vit-tiny", image=30)


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ShoestringError, match="width 10 must be a multiple of the 3 heads"):
        VisionTransformer(width=10)
