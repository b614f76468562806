"""Sparse layers compute what dense ones with zeros compute, and are made, saved and loaded without a dense weight."""

import copy
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from metering import measured, predicted
from shoestring import SGD, Plan, ShoestringError, Task, apply, builtin
from shoestring.errors import NoEffect
from shoestring.finite import Buffers
from shoestring.kernels.sparse_index import decode
from shoestring.measuring import measure_heap
from shoestring.models import materialise
from shoestring.models.dynamicconv import DynamicConvTransformer, Settings
from shoestring.profiling import profile
from shoestring.step import Stepper
from shoestring.techniques import sparsity
from shoestring.techniques.sparsity.conversion import convert_to_dense, from_dense
from shoestring.techniques.sparsity.layer import SparseLayer, expected_index_bytes
from shoestring.techniques.sparsity.layers import SparseConv2d, SparseEmbedding, SparseLinear
from shoestring.techniques.technique import Risk


def layers_of(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, SparseLayer)}


def positions(layer):
    return decode(layer.index, layer.numel).long()


def in_fp64(task):
    return task.with_(model=task.model.double(), batch=(task.batch[0].double(), task.batch[1]))


def gradients(model, loss, batch):
    model.zero_grad()
    loss(model, batch).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


# -- what a layer computes -------------------------------------------------------------------------------------
CONVOLUTIONS = [
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 3, "padding": "same", "dilation": 2, "bias": False},
    {"kernel_size": (1, 3), "stride": (2, 1), "padding": "valid"},
]


@pytest.mark.parametrize("options", CONVOLUTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_sparse_convolution_is_the_dense_one_with_zeros(options, dtype):
    torch.manual_seed(0)
    sparse = SparseConv2d(nn.Conv2d(5, 7, **options).to(dtype), 60)
    assert_same_as_dense(sparse, torch.randn(2, 5, 9, 8, dtype=dtype))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(6, 12), (2, 3, 12)])
def test_a_sparse_linear_layer_is_the_dense_one_with_zeros(shape, bias):
    torch.manual_seed(0)
    assert_same_as_dense(SparseLinear(nn.Linear(12, 5, bias), 20), torch.randn(shape))


@pytest.mark.parametrize("padding", [None, 0, 3, 8])
def test_a_sparse_embedding_is_the_dense_one_with_zeros(padding):
    torch.manual_seed(0)
    sparse = SparseEmbedding(nn.Embedding(9, 12, padding_idx=padding), 50)
    dense, ids = sparse.to_dense(), torch.tensor([[3, 0, 8, 3], [1, 1, 1, 3]])
    gradient = torch.randn(2, 4, 12)
    for layer in (sparse, dense):
        layer(ids).backward(gradient)
    assert torch.equal(sparse(ids), dense(ids))
    torch.testing.assert_close(sparse.values.grad, dense.weight.grad.flatten()[positions(sparse)])
    assert padding is None or not (positions(sparse) // 12 == padding).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "dense, shape",
    [
        (nn.Linear(120, 9), (300, 120)),
        (nn.Linear(5_000, 3), (2, 70, 5_000)),  # more than the cache holds, and more than one tile
        (nn.Conv2d(5, 7, 3, padding=1), (2, 5, 8, 8)),
        (nn.Conv2d(5, 7, 3, padding=1), (2, 5, 9, 7)),
        (nn.Conv2d(5, 7, 3, stride=2), (2, 5, 16, 16)),
        (nn.Conv2d(600, 4, 1), (1, 600, 6, 40)),
    ],
    ids=["linear", "long linear", "conv", "odd conv", "strided conv", "deep conv"],
)
def test_a_bias_is_added_before_the_sum_is_rounded_to_16_bits(dense, shape, dtype):
    """Whole numbers, whose sums are exact in FP32 and not in 16 bits."""
    torch.manual_seed(0)
    x = torch.randint(-9, 10, shape).to(dtype)
    for parameter in dense.parameters():
        nn.init.uniform_(parameter, -40, 40).data.round_()
    sparse = from_dense(nn.ModuleList([copy.deepcopy(dense).to(dtype)]), 60, layers=("0",))[0]
    plain = copy.deepcopy(sparse).to_dense().double()
    exact = plain(x.double())
    bias = sparse.bias if x.dim() < 4 else sparse.bias.view(-1, 1, 1)
    assert not torch.equal(exact.sub(bias).to(dtype) + bias, exact.to(dtype))  # rounding twice would show
    y = sparse(x)
    assert y.dtype == dtype and torch.equal(y, exact.to(dtype))


def assert_same_as_dense(sparse, x):
    dense = copy.deepcopy(sparse).to_dense()
    outputs, inputs = [], [x.clone().requires_grad_() for _ in range(2)]
    for layer, one in zip((sparse, dense), inputs, strict=True):
        y = layer(one)
        y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape))
        outputs.append(y)
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    torch.testing.assert_close(sparse.values.grad, dense.weight.grad.flatten()[positions(sparse)])
    if sparse.bias is not None:
        assert sparse.bias is not dense.bias
        torch.testing.assert_close(sparse.bias.grad, dense.bias.grad)


# -- a model of them -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("strategy", ["none", "no-bn", "residual-1", "residual-2*"])
def test_a_sparse_model_has_the_gradients_of_the_dense_one_at_its_nonzeros_under_any_checkpointing(strategy):
    torch.manual_seed(0)
    task = sparsity.apply(in_fp64(builtin("wrn-10-1", batch=4)), sparsity.Settings(30))
    dense = convert_to_dense(task.model)
    expected = gradients(dense, task.loss, task.batch)
    lean = apply(task, Plan(checkpoint=strategy, microbatch=None))
    found = {}
    lean.stepper.optimizer.step = lambda: found.update({name: p.grad for name, p in lean.model.named_parameters()})
    lean.step(task.batch)
    for name, layer in layers_of(lean.model).items():
        whole = expected.pop(f"{name}.weight").flatten()
        torch.testing.assert_close(found[f"{name}.values"], whole[positions(layer)])
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


def test_a_wide_resnet_keeps_its_first_convolution_classifier_and_norms_dense():
    task = sparsity.apply(builtin("wrn-28-2", device="meta"), sparsity.Settings(30))
    layers = layers_of(task.model)
    assert sum(layer.numel for layer in layers.values()) == 1_451_520
    assert sum(layer.values.numel() for layer in layers.values()) == round(0.3 * 1_451_520)
    assert type(task.model.fc) is nn.Linear and isinstance(task.model.conv, nn.Conv2d)
    shares = [layer.values.numel() / layer.numel for layer in layers.values()]
    assert max(shares) - min(shares) < 1e-3


def test_a_dynamicconv_transformer_keeps_its_kernel_projections_norms_and_biases_dense():
    task = sparsity.apply(builtin("dynamicconv-iwslt", device="meta"), sparsity.Settings(30))
    layers = layers_of(task.model)
    share = sum(layer.numel for layer in layers.values()) / 38_685_184
    assert round(100 * share, 2) == 98.38
    assert sum(layer.values.numel() for layer in layers.values()) == round(0.3 * sum(x.numel for x in layers.values()))
    assert type(task.model.encoder.layers[0].conv.conv.kernels) is nn.Linear
    assert isinstance(task.model.decoder.embed.tokens, SparseEmbedding)


def test_a_transformer_of_sparse_layers_trains_as_the_dense_one_with_zeros():
    sizes = Settings(40, 50, 16, 24, 2, (3, 5), (3,), 0.0, 0.0, 0.0)
    torch.manual_seed(0)
    model = from_dense(DynamicConvTransformer(sizes), 40)
    dense = convert_to_dense(model)
    source, target = torch.randint(4, 40, (3, 6)), torch.randint(4, 50, (3, 5))
    source[0, 4:] = 1  # padding
    found, expected = (
        gradients(m, lambda m, batch: m(*batch).square().mean(), (source, target)) for m in (model, dense)
    )
    for name, layer in layers_of(model).items():
        whole = expected.pop(f"{name}.weight").flatten()
        torch.testing.assert_close(found[f"{name}.values"], whole[positions(layer)])
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


def test_a_model_on_meta_stays_there_and_the_first_task_stays_dense():
    task = builtin("wrn-10-1", device="meta")
    lean = apply(task, Plan(nonzero=20))
    assert all(p.is_meta for p in lean.model.parameters())
    assert not layers_of(task.model) and layers_of(lean.model)
    assert profile(lean.task).bytes_by_category["model"] < 0.3 * profile(task).bytes_by_category["model"]


def test_materialised_values_are_drawn_as_the_dense_layer_draws_them_and_follow_from_the_seed():
    models = [sparse_wrn(seed) for seed in (0, 0, 1)]
    first, again, other = (model.blocks[4].conv1 for model in models)
    assert torch.equal(first.values, again.values) and torch.equal(first.index, again.index)
    assert not torch.equal(first.values, other.values) and not torch.equal(first.index, other.index)
    assert first.values.std().item() == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.03)  # variance 2 / fan-out


def sparse_wrn(seed):
    task = sparsity.apply(builtin("wrn-16-1", device="meta"), sparsity.Settings(20))
    return materialise(task.model, seed=seed)


def test_positions_are_drawn_evenly_over_the_weight():
    torch.manual_seed(0)
    drawn = torch.cat([positions(SparseLinear(nn.Linear(200, 200), 4_000)) for _ in range(20)])
    counts = torch.histc(drawn.float(), 20, 0, 40_000)
    assert (counts - 4_000).abs().max() < 5 * 4_000**0.5


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 60_000), st.floats(0.001, 1))
def test_a_layer_has_as_many_nonzeros_as_wanted_and_about_the_index_that_is_predicted(numel, density):
    count = max(1, round(numel * density))
    layer = SparseLinear(nn.Linear(numel, 1, bias=False, device="meta"), count)
    predicted = layer.index.numel()
    materialise(layer)
    assert len(positions(layer).unique()) == count == layer.values.numel()
    assert abs(layer.index.numel() - predicted) <= 0.02 * predicted + 40


def test_the_index_is_a_bitmap_or_gaps_whichever_is_shorter():
    assert expected_index_bytes(80_000, 40_000) == 10_000
    assert expected_index_bytes(80_000, 4_000) == 4_000
    assert expected_index_bytes(80_000, 0) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the heap meter needs LD_PRELOAD")
def test_no_dense_weight_or_mask_is_made_when_a_layer_is_made_and_rewired():
    """Of 4 million positions, 2% nonzero: 16 MB dense, 4 MB as a mask of bytes."""
    life = Path(__file__).with_name("sparse_layer_life.py")
    reading = measure_heap(f"{life}:life", [2_000, 80_000])
    assert reading.end_bytes == pytest.approx(4 * 80_000 + 80_000, rel=0.05)  # values, and gaps of a byte
    assert reading.peak_bytes < 2_500_000  # two bitmaps of 0.5 MB, and the values before and after


@pytest.mark.parametrize("plan", [Plan(nonzero=30), Plan(nonzero=10, checkpoint="residual-2*", microbatch=4)])
def test_the_predicted_peak_of_a_sparse_step_is_the_measured_one(plan):
    lean = apply(builtin("wrn-10-1", batch=12, image=16), plan).task
    assert predicted(lean).peak_bytes == pytest.approx(measured(lean).peak_bytes, rel=0.02)


def test_the_predicted_peak_of_sparse_linear_layers_and_embeddings_is_the_measured_one():
    model = nn.Sequential(nn.Embedding(3_000, 64), nn.Linear(64, 4_000), nn.ReLU(), nn.Linear(4_000, 10))
    batch = torch.randint(3_000, (40,)), torch.randint(10, (40,))
    task = Task(model, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), batch, SGD(lr=0.1))
    lean = sparsity.apply(task, sparsity.Settings(20))
    assert predicted(lean).peak_bytes == pytest.approx(measured(lean).peak_bytes, rel=0.02)


# -- which layers ----------------------------------------------------------------------------------------------
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.across, self.out = nn.Linear(20, 30), nn.Linear(30, 20), nn.Linear(20, 30)
        self.out.weight = self.into.weight

    def forward(self, x):
        return self.out(self.across(self.into(x)))


def tied_task():
    torch.manual_seed(0)
    return Task(Tied(), lambda model, batch: model(batch).square().mean(), torch.randn(4, 20), SGD(lr=0.1))


def test_layers_are_selected_by_name_or_type():
    task = sparsity.apply(builtin("wrn-10-1", device="meta"), sparsity.Settings(30, layers=("blocks.?.conv2",)))
    assert list(layers_of(task.model)) == [f"blocks.{i}.conv2" for i in range(3)]
    task = sparsity.apply(builtin("wrn-10-1", device="meta"), sparsity.Settings(30, layers=("Linear", "conv")))
    assert set(layers_of(task.model)) == {"fc", "conv"}


def test_layers_that_share_a_weight_share_its_nonzeros():
    task = sparsity.apply(tied_task(), sparsity.Settings(50, layers=("into", "out")))
    model = task.model
    assert model.into.values is model.out.values and model.into.index is model.out.index
    assert sum(p.numel() for p in model.parameters()) == 300 + 30 + 30 + 30 * 20 + 20
    Stepper(task).step(task.batch)
    dense = convert_to_dense(model)
    assert dense.into.weight is dense.out.weight
    torch.testing.assert_close(dense(task.batch), model(task.batch))


def test_a_weight_shared_with_a_dense_layer_stays_dense_unless_asked():
    assert list(layers_of(from_dense(tied_task().model, 50))) == ["across"]
    with pytest.raises(ShoestringError, match="into shares its weight with out: make both sparse"):
        from_dense(tied_task().model, 50, layers=("into",))


class Standardised(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, self.weight - self.weight.mean(), self.bias)


@pytest.mark.parametrize(
    "module, words",
    [
        (nn.Conv2d(4, 4, 3, groups=2), "it has 2 groups, and only 1 is supported"),
        (nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), "its padding is reflect"),
        (nn.Conv2d(4, 4, 4, padding="same"), "uneven"),
        (Standardised(4, 4, 3), "forward of its own"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), "not a plain parameter"),
        (nn.MultiheadAttention(4, 1), "no Conv2d, Linear or Embedding"),
        (nn.MultiheadAttention(4, 1).out_proj, "reads its weight itself"),
        (SparseLinear(nn.Linear(4, 4), 5), "sparse already"),
        (nn.Embedding(9, 4, max_norm=1.0), "its max_norm is not supported"),
        (nn.Embedding.from_pretrained(torch.ones(9, 4), padding_idx=1), "the row of its padding is not zero"),
    ],
)
def test_a_layer_that_cannot_be_sparse_is_refused_by_name(module, words):
    with pytest.raises(ShoestringError, match=f"^layer cannot be made sparse: .*{words}"):
        from_dense(nn.ModuleDict({"layer": module}), 50, layers=("layer",))


@pytest.mark.parametrize("nonzero", [0, -5, 100.1, float("nan")])
def test_a_density_of_none_or_over_100_percent_is_refused(nonzero):
    with pytest.raises(ShoestringError, match="% of nonzeros cannot be trained"):
        sparsity.apply(builtin("wrn-10-1", device="meta"), sparsity.Settings(nonzero))


def test_wrong_settings_are_refused():
    task = builtin("wrn-10-1", device="meta")
    with pytest.raises(NoEffect, match="100% of nonzeros is the dense model"):
        sparsity.apply(task, sparsity.Settings(100))
    with pytest.raises(ShoestringError, match="no rewiring 'often': use one of dsr, set, static"):
        sparsity.apply(task, sparsity.Settings(30, method="often"))
    with pytest.raises(ShoestringError, match="positions='first' is not known: use one of largest, random"):
        sparsity.apply(task, sparsity.Settings(30, positions="first"))
    with pytest.raises(ShoestringError, match="no layer of name or type 'conv9'"):
        sparsity.apply(task, sparsity.Settings(30, layers=("conv9",)))
    with pytest.raises(ShoestringError, match="no layer to make sparse"):
        from_dense(nn.Sequential(nn.Linear(3, 3)), 30)
    with pytest.raises(ShoestringError, match="0 is too small to keep a weight at 1%"):
        from_dense(nn.Sequential(nn.Linear(3, 3), nn.Linear(100, 100)), 1, layers=("*",))


def filled_by(fill):
    class Layer(nn.Linear):
        def reset_parameters(self):
            fill(self.weight)
            nn.init.constant_(self.bias, 3)

    return Layer


def test_values_follow_every_step_of_the_dense_layers_own_initialisation():
    layer = SparseLinear(filled_by(lambda w: w.data.uniform_(0, 1).mul_(2).add_(5).clamp_(max=6.9))(99, 99), 5_000)
    assert layer.values.min() >= 5 and layer.values.mean().item() == pytest.approx(6, abs=0.1)
    assert layer.values.max().item() == pytest.approx(6.9) and (layer.bias == 3).all()


@pytest.mark.parametrize("fill", [nn.init.orthogonal_, nn.init.trunc_normal_])
def test_first_values_that_cannot_be_drawn_at_nonzeros_alone_are_refused(fill):
    layer = filled_by(fill)
    with torch.device("meta"):
        model = nn.Sequential(layer(8, 8), nn.Linear(8, 2))
    with pytest.raises(ShoestringError, match="the first values of 0 cannot be drawn one by one"):
        from_dense(model, 50)
    assert layers_of(from_dense(nn.Sequential(layer(8, 8), nn.Linear(8, 2)), 50))  # they are there already


# -- dense and back --------------------------------------------------------------------------------------------
def test_the_largest_weights_are_kept_of_a_trained_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(150, 200), nn.Linear(200, 2))
    weight = model[0].weight.detach().clone()
    sparse = from_dense(model, 10)[0]
    kept = weight.flatten()[positions(sparse)]
    assert torch.equal(kept, sparse.values) and len(kept) == 3_000
    assert torch.equal(kept.abs().sort().values, weight.flatten().abs().sort().values[-3_000:])


def test_of_equal_weights_the_wanted_number_is_kept():
    model = nn.Sequential(nn.Linear(30, 10), nn.Linear(10, 2))
    nn.init.ones_(model[0].weight)
    assert torch.equal(positions(from_dense(model, 20)[0]), torch.arange(60))


def test_random_weights_are_kept_of_a_new_model_and_nothing_else_changes():
    task = builtin("wrn-10-1")
    before = copy.deepcopy(task.model)
    lean = sparsity.apply(task, sparsity.Settings(25))
    dense = convert_to_dense(lean.model).state_dict()
    for name, tensor in before.state_dict().items():
        zeros = (dense[name] == 0).float().mean().item()
        assert torch.equal(torch.where(dense[name] == 0, dense[name], tensor), dense[name])
        assert ("blocks" in name and "conv" in name) == (zeros == pytest.approx(0.75, abs=0.01))


def test_a_dense_copy_has_plain_layers_and_the_same_outputs():
    task = sparsity.apply(builtin("wrn-10-1", batch=2), sparsity.Settings(30))
    dense = convert_to_dense(task.model)
    assert layers_of(task.model) and not layers_of(dense)
    fresh = builtin("wrn-10-1").model
    fresh.load_state_dict(dense.state_dict())
    for model in (task.model, dense, fresh):
        model.eval()
    torch.testing.assert_close(dense(task.batch[0]), task.model(task.batch[0]))
    torch.testing.assert_close(fresh(task.batch[0]), task.model(task.batch[0]))


@pytest.mark.parametrize("form", ["fp16", "bf16"])
def test_a_dense_copy_of_a_model_in_16_bits_takes_and_gives_fp32_like_it(form):
    lean = apply(builtin("wrn-10-1", batch=2), Plan(nonzero=30, precision=form))
    dense, x = convert_to_dense(lean.model).eval(), lean.task.batch[0].float()
    y = lean.model.eval()(x)
    assert y.dtype == dense(x).dtype == torch.float32
    torch.testing.assert_close(dense(x), y, rtol=0.05, atol=0.05)
    layer = dense.blocks[0].conv1
    assert type(layer) is nn.Conv2d and layer.weight.dtype.itemsize == 2
    assert layer(torch.zeros(1, 16, 4, 4)).dtype == torch.float32  # called by itself, too


@pytest.mark.parametrize("form", ["fp16", "bf16"])
def test_layers_of_a_model_in_16_bits_can_be_sparse_and_still_take_fp32(form):
    first, second = (builtin("wrn-10-1", batch=2) for _ in range(2))
    wanted = sparsity.effect(first, 30).layers
    narrow = apply(second, Plan(precision=form)).task
    assert sparsity.effect(narrow, 30).layers == wanted  # as the planner asks
    sparse = sparsity.apply(narrow, sparsity.Settings(30)).model
    assert set(layers_of(sparse)) == set(wanted)
    assert sparse.blocks[0].conv1(torch.zeros(1, 16, 4, 4)).dtype == torch.float32
    assert sparse(first.batch[0]).dtype == torch.float32


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_a_layer_with_a_users_hook_is_refused(kind):
    model = nn.ModuleDict({"layer": nn.Linear(4, 4)})
    getattr(model["layer"], f"register_{kind}_hook")(lambda *given: None)
    with pytest.raises(ShoestringError, match="layer cannot be made sparse: it has hooks"):
        from_dense(model, 50, layers=("layer",))


def test_an_encoder_layer_of_pytorch_runs_with_sparse_layers_in_training_and_evaluation():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0, batch_first=True)
    model = from_dense(nn.Sequential(layer, nn.Linear(16, 2)), 50)
    assert set(layers_of(model)) == {"0.linear1", "0.linear2"}
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(model.eval()(x), convert_to_dense(model).train()(x))


# -- saving and loading ----------------------------------------------------------------------------------------
def sparse_pair(nonzero=30, width=60):
    return from_dense(nn.Sequential(nn.Linear(width, 40), nn.Linear(40, 40), nn.Linear(40, 2)), nonzero)


def test_a_state_dict_has_the_entries_of_the_plain_model_zeros_and_all():
    task = builtin("wrn-10-1", batch=2)
    plain = {name: tensor.shape for name, tensor in task.model.state_dict().items()}
    lean = sparsity.apply(task, sparsity.Settings(30))
    state = lean.model.state_dict()
    assert {name: tensor.shape for name, tensor in state.items()} == plain
    fresh = builtin("wrn-10-1").model
    fresh.load_state_dict(state)
    assert all(torch.equal(fresh.get_parameter(f"{name}.weight"), layer.dense_weight())
               for name, layer in layers_of(lean.model).items())  # fmt: skip
    x = task.batch[0]
    torch.testing.assert_close(fresh.eval()(x), lean.model.eval()(x))
    on_meta = sparsity.apply(builtin("wrn-10-1", device="meta"), sparsity.Settings(30)).model.state_dict()
    assert {name: tensor.shape for name, tensor in on_meta.items()} == plain


def rewired_pair(dtype=torch.float32):
    """Another distribution of the nonzeros than that of a new model, and some of them zero just now."""
    torch.manual_seed(0)
    model, generator = sparse_pair().to(dtype), np.random.default_rng(0)
    model[0].rewire(60, 110, generator)
    model[1].rewire(80, 30, generator)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("way", ["as it is", "torch.save", "safetensors"])
def test_a_state_dict_is_loaded_to_the_bit_whatever_the_layers_share_of_the_nonzeros(tmp_path, dtype, way):
    one, two = rewired_pair(dtype), sparse_pair().to(dtype)
    values, state = two[0].values, one.state_dict()
    if way == "torch.save":
        torch.save(state, tmp_path / "state")
        state = torch.load(tmp_path / "state", weights_only=True)
    elif way == "safetensors":
        safetensors.torch.save_file(state, tmp_path / "state")
        state = safetensors.torch.load_file(tmp_path / "state")
    two.load_state_dict(state)
    assert two[0].values is values  # an optimizer keeps hold of it
    assert (one[0].values == 0).sum() == 110  # which are places too
    for a, b in zip(layers_of(one).values(), layers_of(two).values(), strict=True):
        assert torch.equal(a.index, b.index) and torch.equal(a.values, b.values) and torch.equal(a.bias, b.bias)


def test_an_optimizers_state_fits_the_model_that_was_loaded_beside_it():
    one, two = rewired_pair(), sparse_pair()
    first = torch.optim.Adam(one.parameters())
    one(torch.randn(3, 60)).sum().backward()
    first.step()
    two.load_state_dict(one.state_dict())
    second = torch.optim.Adam(two.parameters())
    second.load_state_dict(first.state_dict())
    two(torch.randn(3, 60)).sum().backward()
    second.step()


def test_a_state_dict_of_another_density_or_shape_or_a_dense_one_is_refused():
    model, plain = sparse_pair(), nn.Sequential(nn.Linear(60, 40), nn.Linear(40, 40), nn.Linear(40, 2))
    with pytest.raises(ShoestringError, match=r"0 is of 1,200 nonzeros in all here and of 800 in the save"):
        model.load_state_dict(sparse_pair(nonzero=20).state_dict())
    with pytest.raises(ShoestringError, match=r"0 has shape \(40, 60\) here and \(40, 70\) in the save"):
        model.load_state_dict(sparse_pair(width=70).state_dict())
    for state in (plain.state_dict(), dict(plain.state_dict())):
        with pytest.raises(ShoestringError, match="0 is sparse here and dense in the save, where 2,400 of 2,400"):
            model.load_state_dict(state)


def test_entries_that_are_missing_or_too_many_are_told_by_their_plain_names():
    model = sparse_pair()
    state = model.state_dict()
    weight = state.pop("0.weight")
    with pytest.raises(RuntimeError, match=r'Missing key.*"0\.weight"'):
        model.load_state_dict(state)
    before = model[0].values.clone()
    assert model.load_state_dict(state, strict=False).missing_keys == ["0.weight"]
    assert torch.equal(model[0].values, before)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"0\.other"'):
        model.load_state_dict(state | {"0.weight": weight, "0.other": weight})


def test_a_weight_on_the_row_of_the_padding_is_refused():
    layer = nn.Sequential(SparseEmbedding(nn.Embedding(9, 4, padding_idx=2), 10))
    with pytest.raises(ShoestringError, match="0 is sparse here and dense in the save"):
        layer.load_state_dict({"0.weight": torch.eye(9, 4)})


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda layer: layer.index.bitwise_not_(), "holds 1680 nonzeros but there are 720 values"),
        (lambda layer: setattr(layer.index, "data", layer.index[:-1]), "SparseLinear: the sparse index"),
        (lambda layer: setattr(layer.values, "data", layer.values[1:]), "holds 720 nonzeros but there are 719 values"),
    ],
)
def test_a_damaged_index_is_refused(damage, words):
    layer = sparse_pair()[0]
    damage(layer)
    with pytest.raises(ShoestringError, match=words):
        layer.set_extra_state(layer.get_extra_state())


# -- code that reads a weight itself -----------------------------------------------------------------------------
class Reading(nn.Module):
    """Uses the weight of `embed` or `inner` in one of the ways in which models do."""

    def __init__(self, how):
        super().__init__()
        self.how, self.embed = how, nn.Embedding(50, 16)
        self.inner, self.other, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, ids):
        h = self.other(self.inner(self.embed(ids)))
        if self.how == "tied":
            return F.linear(self.out(h), self.embed.weight)
        if self.how == "type":
            h = h.to(self.inner.weight.dtype)
        if self.how == "getattr":
            h = h + getattr(self.inner, "weight").mean()  # noqa: B009
        if self.how == "get_parameter":
            h = h + self.get_parameter("inner.weight").mean()
        return self.out(h) @ torch.ones(16, 50)


def reading_task(how, loss=None):
    torch.manual_seed(0)
    ids = torch.randint(50, (3, 7))
    plain = lambda model, batch: F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())  # noqa: E731
    return Task(Reading(how), loss or plain, ids, SGD(lr=0.1))


def penalised(model, batch):
    decay = sum(m.weight.square().sum() for m in (model.inner, model.other))
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten()) + decay


@pytest.mark.parametrize(
    "how, dense, reader",
    [
        ("tied", "embed", "Reading.forward"),
        ("type", "inner", "Reading.forward"),
        ("getattr", "inner", "Reading.forward"),
        ("get_parameter", "inner", "Reading.get_parameter"),
    ],
)
def test_a_layer_whose_weight_other_code_reads_stays_dense_and_the_reader_is_named(how, dense, reader):
    task = reading_task(how)
    with pytest.warns(UserWarning, match=f"{dense} stays dense, for {reader} reads its weight"):
        lean = apply(task, Plan(nonzero=30))
    assert set(layers_of(lean.model)) == {"embed", "inner", "other"} - {dense}
    twin = task.with_(model=convert_to_dense(lean.model))
    torch.testing.assert_close(lean.step(task.batch), Stepper(twin).step(task.batch))
    with pytest.raises(ShoestringError, match=f"{dense} cannot be made sparse: {reader} reads its weight: leave it"):
        sparsity.apply(reading_task(how), sparsity.Settings(30, layers=(dense,)))


def test_layers_that_a_loss_reads_stay_dense():
    with pytest.warns(UserWarning, match="inner stays dense, for <genexpr> reads its weight, and 1 more"):
        lean = sparsity.apply(reading_task("", penalised), sparsity.Settings(30))
    assert set(layers_of(lean.model)) == {"embed"}


def test_layers_that_nobody_reads_are_sparse_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lean = sparsity.apply(reading_task(""), sparsity.Settings(30))
    assert set(layers_of(lean.model)) == {"embed", "inner", "other"}
    assert nn.Module.__getattr__.__name__ == "__getattr__"  # nothing is left of the watch


def test_a_sparse_layer_has_no_weight_to_read_or_to_tie_and_says_what_to_do():
    layer = SparseLinear(nn.Linear(4, 4), 5)
    assert not hasattr(layer, "weight") and getattr(layer, "weight", None) is None
    with pytest.raises(ShoestringError, match="leave this layer dense"):
        layer.weight  # noqa: B018
    with pytest.raises(ShoestringError, match="tie weights before"):
        layer.weight = nn.Parameter(torch.ones(4, 4))


class Listing(nn.Module):
    """Holds the weight of a layer a second time, where no module does."""

    def __init__(self, wrap):
        super().__init__()
        self.into, self.across, self.out = nn.Linear(20, 30), nn.Linear(30, 20), nn.Linear(20, 20)
        self.held = wrap(self.into.weight)


@pytest.mark.parametrize("wrap", [lambda w: [w], lambda w: {"w": (w,)}, lambda w: nn.Parameter(w.data),
                                  lambda w: nn.ParameterList([w])])  # fmt: skip
def test_a_weight_whose_memory_is_held_elsewhere_stays_dense(wrap):
    assert set(layers_of(from_dense(Listing(wrap), 50))) == {"across"}


def test_two_parameters_over_one_memory_stay_dense():
    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20), nn.Linear(20, 20), nn.Linear(20, 2))
    model[1].weight = nn.Parameter(model[0].weight.data)
    assert set(layers_of(from_dense(model, 50))) == {"2"}


@pytest.mark.parametrize("model", ["wrn-10-1", "vit-tiny"])
def test_sparsity_is_approximate_in_every_layer_and_at_every_density(model):
    task = builtin(model, batch=1, device="meta")
    assert {sparsity.risk(task, nonzero) for nonzero in (99, 50, 30, 10)} == {Risk.APPROXIMATE}


def test_the_planner_tries_no_sparsity_where_no_layer_can_be_sparse():
    task = builtin("wrn-10-1", batch=1, device="meta").with_(model=nn.ReLU())
    with pytest.raises(NoEffect, match="ReLU has no layer to make sparse"):
        sparsity.options(task)


@pytest.mark.parametrize("channels", [3, 16])
def test_a_map_of_other_channels_than_the_layer_reads_is_refused(channels):
    layer = SparseConv2d(nn.Conv2d(8, 4, 3), 60)
    with pytest.raises(ShoestringError, match=r"8 channels got an input of \(2, \d+, 6, 6\)"):
        layer(torch.randn(2, channels, 6, 6))


def test_a_step_keeps_no_copy_of_an_index_in_case_it_breaks_off():
    task = sparsity.apply(builtin("wrn-10-1", batch=2), sparsity.Settings(10))
    copies = [copy for _, copy in Buffers(task.model, set()).copies]
    assert copies and torch.uint8 not in {copy.dtype for copy in copies}
