"""A model built without memory and one built with it hold the same bits."""

import pytest
import torch
from torch import nn

from shoestring import ShoestringError, builtin
from shoestring.models import materialise
from shoestring.models.build import leaves_first, materialise_module

NAMES = ["wrn-10-1", "resnet18", "vit-tiny", "dynamicconv-iwslt"]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_from_meta_holds_the_same_bits_as_one_built_at_once(name):
    direct, later = builtin(name, seed=3), builtin(name, seed=3, device="meta")
    assert all(tensor.is_meta for tensor in [*later.model.parameters(), *later.model.buffers()])
    assert not any(tensor.is_meta for tensor in later.batch)
    assert same(tensors(materialise(later.model, seed=3)), tensors(direct.model))
    assert same(dict(enumerate(later.batch)), dict(enumerate(direct.batch)))


def test_another_seed_gives_other_weights():
    first, second = builtin("wrn-10-1", seed=0).model, builtin("wrn-10-1", seed=1).model
    assert not torch.equal(first.conv.weight, second.conv.weight)


def test_the_order_in_which_modules_are_built_does_not_matter():
    forward, backward = (builtin("wrn-10-1", device="meta").model for _ in range(2))
    materialise(forward)
    for path, module in reversed(leaves_first(backward)):
        materialise_module(module, path, "cpu", 0, {})
    assert same(tensors(forward), tensors(backward))


def test_building_leaves_the_random_state_of_the_caller_alone():
    before = torch.get_rng_state()
    builtin("wrn-10-1")
    assert torch.equal(torch.get_rng_state(), before)


def test_fixed_tables_are_computed_again_and_not_saved():
    model = materialise(builtin("dynamicconv-iwslt", tokens=30, device="meta").model)
    table = model.encoder.embed.positions.table
    assert table is model.decoder.embed.positions.table
    torch.testing.assert_close(table[3, 0], torch.tensor(3.0).sin())
    torch.testing.assert_close(table[7, -1], torch.tensor(7e-4).cos())
    assert not any("table" in name for name in model.state_dict())


def test_tied_parameters_stay_tied_and_the_rest_of_their_module_is_filled():
    with torch.device("meta"):
        model = nn.ModuleDict({"first": nn.Linear(6, 6), "second": nn.Linear(6, 6)})
        model["first"].weight = model["second"].weight
    materialise(model)
    assert model["first"].weight is model["second"].weight
    assert 0 < model["first"].weight.abs().max() <= 6**-0.5
    assert 0 < model["first"].bias.abs().max() <= 6**-0.5


def test_frozen_parameters_stay_frozen_and_types_stay():
    model = nn.Linear(4, 4, device="meta", dtype=torch.float64).requires_grad_(False)
    materialise(model)
    assert not model.weight.requires_grad
    assert model.weight.dtype is torch.float64


def test_real_modules_are_left_as_they_are():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    weight = model[0].weight.clone()
    materialise(model)
    assert torch.equal(model[0].weight, weight)
    assert not model[1].weight.is_meta


def test_attention_starts_as_torch_builds_it():
    assert torch.equal(materialise(nn.MultiheadAttention(8, 2, device="meta")).out_proj.bias, torch.zeros(8))


def test_a_recurrent_layer_runs_with_the_weights_that_it_was_given():
    layer = materialise(nn.LSTM(3, 4, device="meta"))
    before = layer(torch.ones(2, 1, 3))[0]
    assert before.isfinite().all() and before.abs().max() > 0
    nn.init.zeros_(layer.weight_ih_l0)
    assert not torch.equal(layer(torch.ones(2, 1, 3))[0], before)


def test_a_module_that_cannot_fill_itself_is_named():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(3, device="meta"))

    with pytest.raises(ShoestringError, match=r"'1' \(Scale\) owns 'gain' but has no reset_parameters"):
        materialise(nn.Sequential(nn.Linear(2, 2), Scale()))


def tensors(model):
    return dict(model.named_parameters()) | dict(model.named_buffers())


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)
