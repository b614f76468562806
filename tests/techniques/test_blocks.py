"""Blocks found from the module structure."""

import pytest
import torch
from torch import nn

import shoestring
from shoestring import SGD, ShoestringError, Task
from shoestring.patching import patched
from shoestring.techniques.checkpoint.blocks import block_costs, find_blocks


class Block(nn.Module):
    def __init__(self, inside=1):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(inside)))


def test_repeated_children_of_a_sequential_are_blocks():
    assert find_blocks(nn.Sequential(Block(), Block(), nn.Linear(2, 2))) == [["0", "1"]]


def test_children_of_another_class_are_left_out():
    model = nn.Sequential(Block(), nn.TransformerEncoderLayer(2, 1), Block())
    assert find_blocks(model) == [["0", "2"]]


def test_layers_are_no_blocks():
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == []


def test_blocks_inside_a_block_are_part_of_it():
    inner = [nn.ModuleList([Block(), Block()]) for _ in range(2)]
    outer = nn.Sequential(*(nn.Sequential(blocks) for blocks in inner))
    assert find_blocks(outer) == [["0", "1"]]


@pytest.mark.parametrize(
    ("name", "runs"), [("wrn-16-2", [6]), ("resnet18", [8]), ("vit-tiny", [12]), ("dynamicconv-iwslt", [7, 6])]
)
def test_the_built_in_models_have_their_blocks(name, runs):
    assert [len(run) for run in find_blocks(shoestring.builtin(name, device="meta").model)] == runs


def test_names_pick_blocks_by_hand():
    model = nn.ModuleDict({"a": Block(), "b": Block(), "c": nn.Linear(2, 2)})
    assert find_blocks(model, ("[ab]",)) == [["a", "b"]]
    assert find_blocks(model, ("*",)) == [["a", "b", "c"]]  # what is inside a block is part of it
    with pytest.raises(ShoestringError, match="no module 'd'"):
        find_blocks(model, ("d",))


def test_a_patched_module_is_itself_again_whatever_was_raised():
    module = nn.Identity()
    with pytest.raises(ValueError, match="no"), patched(module, lambda forward, args, kwargs: "patched"):
        assert module(1) == "patched"
        raise ValueError("no")
    assert "forward" not in vars(module)
    assert module(1) == 1


def test_a_forward_that_the_user_patched_comes_back():
    module = nn.Identity()
    module.forward = lambda x: 2 * x
    with patched(module, lambda forward, args, kwargs: forward(*args) + 1):
        assert module(1) == 3
    assert module(1) == 2


class Frozen(nn.Module):
    """Four blocks, of which the first runs without recording."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(4))

    def forward(self, x):
        with torch.no_grad():
            x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x)
        return x


def test_each_block_has_its_costs_also_one_that_is_not_recorded():
    task = Task(Frozen(), lambda model, x: model(x).square().mean(), torch.randn(5, 8), SGD())
    costs = block_costs(task, [f"blocks.{n}" for n in range(4)])
    assert [cost.flops for cost in costs] == [2 * 5 * 2 * 8 * 16] * 4
    assert [cost.input_bytes for cost in costs] == [4 * 5 * 8] * 4
    assert costs[0].inside_bytes < costs[1].inside_bytes < costs[2].inside_bytes == costs[3].inside_bytes
