"""Blocks in the order of their calls: nested in stages, interleaved, with skip connections, and beside each other."""

import pytest
import torch
import torch.nn.functional as F
from runs import distance, doubled, run
from torch import nn

import zoo
from shoestring import SGD, Plan, Task, apply
from shoestring.techniques.checkpoint import options
from shoestring.techniques.checkpoint.chains import find_chains

WIDTH = 8


class Block(nn.Module):
    """A residual block of convolutions, each with its norm in a module of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(*(self.convolution() for _ in range(2)))

    def convolution(self):
        return nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU())

    def forward(self, x):
        return x + self.layer(x)


class Stage(nn.Module):
    """Blocks, and where asked for a pooling after them, so that the next stage is called with something else."""

    def __init__(self, depth, pools):
        super().__init__()
        self.blocks, self.pools = nn.ModuleList([Block() for _ in range(depth)]), pools

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return F.avg_pool2d(x, 2) if self.pools else x


class Staged(nn.Module):
    def __init__(self, pools=False, depths=(2, 1, 3)):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, WIDTH, 3), nn.Linear(WIDTH, 3)
        self.stages = nn.ModuleList([Stage(depth, pools) for depth in depths])

    def forward(self, x):
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


class Double(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.a, self.b = nn.Conv2d(channels, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x, *skips):
        return torch.tanh(self.b(torch.relu(self.a(torch.cat([x, *skips], 1)))))


class Hourglass(nn.Module):
    """A U-Net of lists: each block of the way up is given the map of the way down, as a list."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, WIDTH, 1), nn.Linear(WIDTH, 3)
        self.down = nn.ModuleList([Double(WIDTH) for _ in range(2)])
        self.up = nn.ModuleList([Double(2 * WIDTH) for _ in range(2)])

    def forward(self, x):
        x, skips = self.stem(x), []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        for block in self.up:
            x = block(F.interpolate(x, scale_factor=2.0), skips.pop())
        return self.head(x.mean((2, 3)))


class Turns(nn.Module):
    """Two lists whose blocks take turns."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, WIDTH, 1), nn.Linear(WIDTH, 3)
        self.ones, self.twos = (nn.ModuleList([Double(WIDTH) for _ in range(2)]) for _ in range(2))

    def forward(self, x):
        x = self.stem(x)
        for one, two in zip(self.ones, self.twos, strict=True):
            x = two(one(x))
        return self.head(x.mean((2, 3)))


class Experts(nn.Module):
    """Residual blocks whose inside is the mean of experts: a list, but no chain."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList([Double(WIDTH) for _ in range(3)])

        def forward(self, x):
            return x + sum(expert(x) for expert in self.experts) / 3

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, WIDTH, 1), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList([self.Layer() for _ in range(2)])

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))


def task(make):
    torch.manual_seed(0)
    batch = torch.randn(2, 3, 16, 16), torch.randint(3, (2,))
    return Task(make(), lambda m, b: F.cross_entropy(m(b[0]), b[1]), batch, SGD(lr=0.1))


IN_STAGES = ["stages.0.blocks.0", "stages.0.blocks.1", "stages.1.blocks.0", "stages.2.blocks.0", "stages.2.blocks.1",
             "stages.2.blocks.2"]  # fmt: skip
CHAINS = {
    Staged: [IN_STAGES],
    Hourglass: [["down.0"], ["down.1", "up.0"], ["up.1"]],  # the map of down.1 goes over to up.0
    Turns: [["ones.0", "twos.0", "ones.1", "twos.1"]],
    Experts: [["layers.0", "layers.1"]],
}


@pytest.mark.parametrize("make", CHAINS)
def test_blocks_are_found_in_the_order_of_their_calls(make):
    assert find_chains(task(make)) == CHAINS[make]


def test_a_stage_that_ends_with_something_else_ends_a_chain():
    assert find_chains(task(lambda: Staged(pools=True))) == [IN_STAGES[:2], IN_STAGES[2:3], IN_STAGES[3:]]


def test_a_u_net_of_plain_attributes_has_blocks():
    found = find_chains(zoo.unet(2))
    assert [name for chain in found for name in chain] == ["down1", "down2", "bottom", "merge2", "merge1"]
    assert "optimal" in options(zoo.unet(2))


@pytest.mark.parametrize("strategy", ["residual-1", "residual-2", "residual-2*", "optimal"])
@pytest.mark.parametrize("make", [*CHAINS, lambda: Staged(pools=True)])
def test_what_they_compute_is_what_plain_training_computes(make, strategy):
    plain, lean = run(doubled(task(make)), 1), run(apply(doubled(task(make)), Plan(checkpoint=strategy)).task, 1)
    assert distance(lean.gradients[0], plain.gradients[0]) < 1e-10
    assert all(torch.allclose(lean.buffers[name], plain.buffers[name], rtol=1e-10) for name in plain.buffers)


def small(library, name):
    """Models of transformers that have their blocks in stages -> the model, and how many blocks it has."""
    if name == "resnet":
        config = library.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 3], layer_type="basic")
        return library.ResNetForImageClassification(config), 5
    if name == "swin":
        config = library.SwinConfig(image_size=32, embed_dim=8, depths=[2, 2], num_heads=[1, 2], window_size=4)
        return library.SwinForImageClassification(config), 4
    config = library.SegformerConfig(
        num_encoder_blocks=2, depths=[2, 2], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[3, 3], strides=[2, 2],
        num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=8,
    )  # fmt: skip
    return library.SegformerForImageClassification(config), 4


@pytest.mark.parametrize("name", ["resnet", "swin", "segformer"])
def test_the_blocks_of_transformers_in_stages_are_found_and_train_as_plainly(name):
    library = pytest.importorskip("transformers")

    def made():
        torch.manual_seed(0)
        model, _ = small(library, name)
        batch = torch.randn(2, 3, 32, 32), torch.randint(2, (2,))
        return Task(model.train(), lambda m, b: m(pixel_values=b[0], labels=b[1]).loss, batch, SGD(lr=0.1))

    found = [block for chain in find_chains(made()) for block in chain]
    assert len(found) == small(library, name)[1]
    plain, lean = run(doubled(made()), 1), run(apply(doubled(made()), Plan(checkpoint="residual-2*")).task, 1)
    assert distance(lean.gradients[0], plain.gradients[0]) < 1e-10
