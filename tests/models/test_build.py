"""A model built without memory and one built with it hold the same bits."""

import pytest
import torch
from torch import nn

import transformers_zoo
from shoestring import ShoestringError, builtin
from shoestring.models import materialise
from shoestring.models.build import leaves_first, materialise_module

NAMES = ["wrn-10-1", "resnet18", "resnet18-imagenet", "vit-tiny", "dynamicconv-iwslt"]


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


# -- a model's own start ---------------------------------------------------------------------------------------
class Small(nn.Module):
    """Starts its linear layers with a small deviation, module by module, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(40, 40), nn.LayerNorm(40), nn.Linear(40, 40))
        self.gain = nn.Parameter(torch.empty(3))
        self.register_buffer("positions", torch.empty(4, dtype=torch.int64))
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
        elif module is self:
            nn.init.constant_(self.gain, 3.0)
            self.positions.copy_(torch.arange(4))


class Whole(nn.Module):
    """Starts all of its children at once; `called` is the method's name."""

    def __init__(self, called):
        super().__init__()
        self.first, self.last = nn.Linear(40, 40), nn.Linear(40, 40)
        setattr(self, called, self.start)
        self.start()

    def start(self):
        nn.init.normal_(self.first.weight, std=0.02)
        nn.init.zeros_(self.last.weight)


def from_meta(build):
    with torch.device("meta"):
        model = build()
    return materialise(model)


def test_a_model_that_starts_its_modules_one_by_one_starts_them_from_meta_too(recwarn):
    model = from_meta(Small)
    assert model.inner[0].weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert not model.inner[2].bias.any() and torch.equal(model.inner[1].weight, torch.ones(40))
    assert torch.equal(model.gain, torch.full((3,), 3.0)) and torch.equal(model.positions, torch.arange(4))
    assert not torch.equal(model.inner[0].weight, model.inner[2].weight)
    assert not recwarn


def test_such_a_model_holds_the_same_bits_in_whatever_order_it_is_built():
    with torch.device("meta"):
        model = Small()
    for path, module in reversed(leaves_first(model)):
        materialise_module(module, path, "cpu", 0, {}, model._init_weights)
    assert same(tensors(model), tensors(from_meta(Small)))


@pytest.mark.parametrize("called", ["reset_parameters", "_reset_parameters", "init_weights"])
def test_a_model_that_starts_all_at_once_does_so_from_meta_too(called, recwarn):
    model = from_meta(lambda: nn.Sequential(Whole(called)))
    assert model[0].first.weight.std().item() == pytest.approx(0.02, rel=0.1) and not model[0].last.weight.any()
    assert not recwarn


def test_pytorchs_own_transformer_starts_as_it_does_off_meta(recwarn):
    build = lambda: nn.Transformer(64, 2, 1, 1, 64)  # noqa: E731
    assert from_meta(build).encoder.layers[0].linear1.weight.std().item() == pytest.approx(
        build().encoder.layers[0].linear1.weight.std().item(), rel=0.1
    )


def test_what_only_the_constructor_did_is_told_by_name():
    def build():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        nn.init.zeros_(model[1].weight)
        return model

    with pytest.warns(UserWarning, match=r"^1.weight: initialised by their layers' own reset_parameters\(\)"):
        from_meta(build)


def test_a_start_of_all_leaves_real_modules_alone():
    with torch.device("meta"):
        model = Whole("reset_parameters")
    model.first = nn.Linear(40, 40)
    before = model.first.weight.clone()
    with pytest.warns(UserWarning, match="last.weight"):
        materialise(model)
    assert torch.equal(model.first.weight, before)


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "gpt2", "vit", "convnext", "segformer", "switch"])
def test_a_model_of_transformers_starts_as_its_own_code_says(name):
    direct = transformers_zoo.make(name).model
    with torch.device("meta"):
        later = transformers_zoo.make(name).model
    assert all(tensor.is_meta for tensor in later.parameters())
    materialise(later)
    for (key, a), (_, b) in zip(tensors(later).items(), tensors(direct).items(), strict=True):
        a, b = a.detach().double(), b.detach().double()
        close = 0.3 * b.std() if a.numel() > 500 else 2 * b.std()
        assert a.std(correction=0) == pytest.approx(b.std(correction=0).item(), abs=float(close) + 1e-6), key
        assert b.std(correction=0) > 0 or torch.equal(a, b), key


def tensors(model):
    return dict(model.named_parameters()) | dict(model.named_buffers())


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)
