"""ResNet-18: sizes, stems and shortcuts."""

import pytest
import torch

from shoestring import ShoestringError, builtin
from shoestring.models.resnet import BasicBlock, ResNet18
from shoestring.step import Stepper


@pytest.mark.parametrize(
    "options, parameters, shape",
    [({}, 11_173_962, (32, 10)), ({"stem": "imagenet"}, 11_689_512, (224, 1000))],
)
def test_resnet18_has_the_published_size(options, parameters, shape):
    task = builtin("resnet18", batch=2, device="meta", **options)
    assert sum(p.numel() for p in task.model.parameters()) == parameters
    assert task.batch[0].shape == (2, 3, shape[0], shape[0])
    assert task.model(task.batch[0].to("meta")).shape == (2, shape[1])
    assert len(task.model.blocks) == 8


def test_the_stems_leave_maps_of_the_right_size():
    sizes = []
    for stem in ("cifar", "imagenet"):
        with torch.device("meta"):
            model = ResNet18(10, stem)
            model.blocks[0].register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].shape[2]))
            model(torch.empty(1, 3, 64, 64))
    assert sizes == [64, 16]


def test_a_block_whose_last_norm_is_zero_is_its_shortcut():
    block = BasicBlock(4, 4, 1)
    torch.nn.init.zeros_(block.norm2.weight)
    x = torch.randn(2, 4, 6, 6)
    assert torch.equal(block(x), x.relu())


def test_the_loss_falls_over_a_few_steps():
    task = builtin("resnet18", batch=4, image=8)
    stepper = Stepper(task.with_(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01)))
    losses = [stepper.step(task.batch).item() for _ in range(5)]
    assert losses[-1] < 0.8 * losses[0]


def test_an_unknown_stem_lists_the_known_ones():
    with pytest.raises(ShoestringError, match="no stem 'mnist': use cifar or imagenet"):
        builtin("resnet18", stem="mnist")
