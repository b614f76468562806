"""What a step is made of is counted to the byte: by hand where that is short, and by the meter."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import zoo
from metering import measured
from shoestring import SGD, Adam, Task
from shoestring.ledger import Category, Phase
from shoestring.profiling import profile

FLOAT = 4


def square(model, batch):
    output = model(batch)
    return (output[0] if isinstance(output, tuple) else output).square().mean()


def task(model, batch, loss=square, optimizer=None, **fields) -> Task:
    return Task(model, loss, batch, optimizer or SGD(), **fields)


def born(result, category, module=None):
    """The bytes of each storage of a category, in order of birth."""
    found = [e for e in result.ledger.entries if e.category == category and module in (None, e.module)]
    return [entry.bytes for entry in found]


def alive_after_forward(result):
    """The activations that the last step's backward pass found alive, by operation."""
    start = [e.born for e in result.ledger.entries if e.phase == Phase.BACKWARD]
    forward = max(e.born for e in result.ledger.entries if e.phase == Phase.FORWARD)
    time = min(t for t in start if t > forward)
    live = [e for e in result.ledger.live_at(time) if e.category == Category.ACTIVATION]
    return {entry.operation.split(".")[0]: entry.bytes for entry in live}


def assert_as_measured(subject: Task) -> None:
    wrapped_number = 8  # a Python number in an operation with a tensor becomes a tensor for a moment
    peak = measured(subject).tensor_peak_bytes
    assert profile(subject).tensor_peak_bytes == pytest.approx(peak, rel=0, abs=wrapped_number)


# -- the model -----------------------------------------------------------------------------------------------
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


def test_tied_weights_are_one_storage_with_one_gradient_and_one_state():
    result = profile(task(Tied(), torch.randint(50, (4, 6)), optimizer=SGD(momentum=0.9)))
    assert born(result, Category.MODEL) == [50 * 8 * FLOAT]
    assert sorted(set(born(result, Category.OPTIMIZER))) == [50 * 8 * FLOAT]
    assert result.bytes_by_category["gradient"] <= 50 * 8 * FLOAT
    assert_as_measured(task(Tied(), torch.randint(50, (4, 6)), optimizer=SGD(momentum=0.9)))


def test_a_weight_that_is_another_ones_view_is_the_same_storage():
    class Transposed(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.Linear(64, 16, bias=False)
            self.up = nn.Linear(16, 64, bias=False)
            self.up.weight = nn.Parameter(self.down.weight.detach().t())

        def forward(self, x):
            return self.up(self.down(x))

    assert born(profile(task(Transposed(), torch.randn(4, 64))), Category.MODEL) == [64 * 16 * FLOAT]


def test_buffers_are_part_of_the_model_and_updated_in_place():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8))
    result = profile(task(model, torch.randn(4, 3, 8, 8)))
    weights, statistics, counter = 3 * 8 * 9 * FLOAT + 2 * 8 * FLOAT, 2 * 8 * FLOAT, 8
    assert sum(born(result, Category.MODEL)) == weights + statistics + counter
    assert_as_measured(task(model, torch.randn(4, 3, 8, 8)))


def test_frozen_parameters_have_neither_gradient_nor_state():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    model[0].requires_grad_(False)
    result = profile(task(model, torch.randn(8, 16), optimizer=Adam()))
    trained = 32 * 4 * FLOAT
    assert max(born(result, Category.GRADIENT)) == trained
    assert born(result, Category.OPTIMIZER, "0") == born(result, Category.GRADIENT, "0") == []
    assert_as_measured(task(model, torch.randn(8, 16), optimizer=Adam()))


def test_a_module_that_is_used_twice_is_counted_once_and_keeps_both_activations():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(32, 32, bias=False)

        def forward(self, x):
            return self.layer(torch.tanh(self.layer(x)))

    result = profile(task(Twice(), torch.randn(16, 32)))
    assert born(result, Category.MODEL) == [32 * 32 * FLOAT]
    assert alive_after_forward(result)["tanh"] == 16 * 32 * FLOAT
    assert_as_measured(task(Twice(), torch.randn(16, 32)))


# -- what the forward pass keeps -----------------------------------------------------------------------------
def test_a_saved_view_pins_its_whole_base():
    class FirstRow(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return torch.exp(self.layer(x))[:1].sin()  # sin saves the slice, and with it all of exp's output

    batch = torch.randn(1000, 8)
    assert alive_after_forward(profile(task(FirstRow(), batch)))["exp"] == 1000 * 8 * FLOAT
    assert_as_measured(task(FirstRow(), batch))


@pytest.mark.parametrize("inplace", [False, True])
def test_an_operation_in_place_makes_no_second_map(inplace):
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace), nn.Conv2d(8, 8, 1))
    kept = alive_after_forward(profile(task(model, torch.randn(4, 3, 16, 16))))
    assert ("relu" in kept) is not inplace
    assert_as_measured(task(model, torch.randn(4, 3, 16, 16)))


def test_dropout_keeps_its_mask_as_a_whole_map():
    model = nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.3), nn.Linear(256, 4))
    kept = alive_after_forward(profile(task(model, torch.randn(32, 64))))
    assert kept["empty_like"] == kept["mul"] == 32 * 256 * FLOAT  # the mask, as floats, and what it leaves
    assert_as_measured(task(model, torch.randn(32, 64)))


class Cube(torch.autograd.Function):
    """x -> x**3, keeping x alone."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * x * x * gradient


def test_a_custom_autograd_function_keeps_what_it_saves():
    class Cubed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 64)

        def forward(self, x):
            return Cube.apply(self.layer(x)).sum(1)

    kept = alive_after_forward(profile(task(Cubed(), torch.randn(8, 16))))
    assert kept["addmm"] == 8 * 64 * FLOAT and "mul" not in kept
    assert_as_measured(task(Cubed(), 0.1 * torch.randn(8, 16)))  # cubes of more would diverge in the second step


@dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor


Pair = namedtuple("Pair", "logits hidden")


@pytest.mark.parametrize("wrap", [lambda a, b: (a, b), Output, Pair, lambda a, b: {"logits": a, "hidden": b}])
def test_whatever_holds_a_models_outputs_keeps_them_alive(wrap):
    class Returns(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(16, 64), nn.Linear(64, 4)

        def forward(self, x):
            hidden = torch.tanh(self.body(x))
            return wrap(self.head(hidden), hidden)

    def loss(model, batch):
        output = model(batch)
        if isinstance(output, dict):
            return output["logits"].square().mean()
        return (output[0] if isinstance(output, tuple) else output.logits).square().mean()

    assert_as_measured(task(Returns(), torch.randn(8, 16), loss))


def test_multihead_attention_is_counted_in_its_parts():
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=False)[0]

    result = profile(task(Attends(), torch.randn(4, 10, 32)))
    assert sum(born(result, Category.MODEL)) == (4 * 32 * 32 + 4 * 32) * FLOAT
    assert any(row["module"] == "attention" for row in result.by_module)
    assert_as_measured(task(Attends(), torch.randn(4, 10, 32)))


# -- recomputation -------------------------------------------------------------------------------------------
class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.first = nn.Linear(16, 128)
        self.block = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Dropout(0.1), nn.Linear(128, 128))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.block, self.first(x), use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_in_the_users_model_counts_as_recomputation(use_reentrant):
    subject = task(Checkpointed(use_reentrant), torch.randn(32, 16))
    result = profile(subject)
    one_layer = 2 * 32 * 128 * 128
    assert result.flops["recompute"] == one_layer * (2 if use_reentrant else 1)  # the last one is not needed
    assert {e.module for e in result.ledger.entries if e.phase == Phase.RECOMPUTE} >= {"block.1"}
    assert "tanh" not in alive_after_forward(result)
    assert_as_measured(subject)


def test_a_gradient_made_in_a_recomputed_module_is_attributed_to_it():
    result = profile(task(Checkpointed(False), torch.randn(32, 16)))
    made = [e for e in result.ledger.entries if e.operation.startswith("tanh_backward")]
    assert {entry.module for entry in made} == {"block.1"}


# -- the batch -----------------------------------------------------------------------------------------------
def test_pieces_of_a_split_batch_are_views_and_count_once():
    batch = torch.randn(30, 16)
    subject = task(nn.Linear(16, 4), batch, split=lambda batch: batch.split(10))
    assert born(profile(subject), Category.INPUT) == [batch.numel() * FLOAT]


@pytest.mark.parametrize("size", [8, 12, 5])
def test_accumulated_gradients_are_as_measured(size):
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    assert_as_measured(task(model, torch.randn(24, 32), split=lambda batch: batch.split(size)))


def test_smaller_pieces_need_less_but_the_same_gradient():
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 32))
    whole = profile(task(model, torch.randn(64, 32)))
    parts = profile(task(model, torch.randn(64, 32), split=lambda batch: batch.split(8)))
    assert parts.peak_bytes < whole.peak_bytes
    assert max(born(parts, Category.GRADIENT)) == max(born(whole, Category.GRADIENT))


def test_a_batch_of_sparse_indices_counts_indices_and_values():
    batch = torch.eye(20).to_sparse()
    subject = task(nn.Linear(20, 4), batch, lambda model, batch: (batch @ model.weight.t()).square().mean())
    assert born(profile(subject), Category.INPUT) == [2 * 20 * 8, 20 * FLOAT]


def test_a_sparse_gradient_of_an_embedding_has_rows_for_the_batch_alone():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10_000, 16, sparse=True)

        def forward(self, ids):
            return self.embed(ids)

    result = profile(task(Bag(), torch.randint(10_000, (4, 5))))
    assert sorted(set(born(result, Category.GRADIENT))) == [20 * 8, 20 * 16 * FLOAT]  # indices and values
    assert_as_measured(task(Bag(), torch.randint(10_000, (4, 5))))


# -- the update ----------------------------------------------------------------------------------------------
def two_layers():
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


OPTIMIZERS = {
    "sgd": SGD(),
    "nesterov": SGD(momentum=0.9, nesterov=True, weight_decay=1e-4),
    "adam": Adam(),
    "adamw": Adam(decoupled=True, weight_decay=0.01),
    "adam-foreach": lambda parameters: torch.optim.Adam(parameters, foreach=True),
    "sgd-foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
    "amsgrad": lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "adafactor": torch.optim.Adafactor,
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optimizer_is_counted_with_its_temporaries(optimizer):
    assert_as_measured(task(two_layers(), torch.randn(2, 64), optimizer=optimizer))


def test_foreach_needs_temporaries_of_all_layers_at_once():
    def peak(foreach):
        made = task(two_layers(), torch.randn(2, 64), optimizer=lambda p: torch.optim.Adam(p, foreach=foreach))
        return profile(made).peak_bytes

    assert peak(True) > peak(False)


def test_state_of_an_optimizer_belongs_to_the_parameters_module():
    result = profile(task(two_layers(), torch.randn(2, 64), optimizer=SGD(momentum=0.9)))
    assert born(result, Category.OPTIMIZER, "2") == [64 * 64 * FLOAT, 64 * FLOAT]


def test_state_that_an_optimizer_makes_when_it_is_built_is_no_part_of_the_model():
    result = profile(task(two_layers(), torch.randn(2, 64), optimizer=torch.optim.Adagrad))
    weights = 2 * (64 * 64 + 64) * FLOAT
    assert sum(born(result, Category.MODEL)) == weights
    assert sum(born(result, Category.OPTIMIZER, "0")) >= weights / 2


def test_clipping_the_gradient_is_counted():
    batch = torch.randn(2, 64)
    clipped = profile(task(two_layers(), batch, clip=1.0))
    plain = profile(task(two_layers(), batch))
    assert any("norm" in entry.operation for entry in clipped.ledger.entries)
    assert clipped.peak_bytes >= plain.peak_bytes
    assert_as_measured(task(two_layers(), batch, clip=1.0))


def test_the_second_step_has_the_optimizers_state_in_place():
    subject = task(two_layers(), torch.randn(256, 64), optimizer=SGD(momentum=0.9))
    first, both = profile(subject, steps=1), profile(subject)
    assert both.peak_bytes - first.peak_bytes == 2 * (64 * 64 + 64) * FLOAT


# -- attribution ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", zoo.ZOO, ids=lambda make: make.__name__)
def test_every_byte_at_the_peak_has_a_category_and_a_module(make):
    result = profile(make())
    assert sum(result.bytes_by_category.values()) == result.peak_bytes
    assert sum(row["bytes"] for row in result.by_module) == result.peak_bytes
    paths = dict(make().model.named_modules())
    assert {row["module"] for row in result.by_module} <= set(paths)


def test_flops_are_those_of_the_matrix_products():
    flops = profile(task(nn.Linear(32, 16, bias=False), torch.randn(8, 32))).flops
    assert flops["forward"] == 2 * 8 * 32 * 16
    assert flops["backward"] == flops["forward"]  # the input needs no gradient: one product, not two
    assert (flops["recompute"], flops["ratio"]) == (0, 1)


def test_flops_of_attention_are_two_products_forward_and_five_backward():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return F.scaled_dot_product_attention(self.scale * x, self.scale * x, self.scale * x)

    flops = profile(task(Attention(), torch.randn(2, 4, 16, 8))).flops
    assert flops["forward"] == 2 * (2 * 2 * 4 * 16 * 16 * 8)
    assert flops["backward"] == flops["forward"] * 5 / 2


@pytest.mark.parametrize("pieces", [1, 4], ids=["whole batch", "microbatches"])
def test_the_nodes_of_autograds_graph_are_those_of_one_forward_pass(pieces):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2, bias=False))
    one = task(model, torch.randn(4, 8)).with_(split=lambda batch: batch.chunk(pieces))
    leaves, transposed, products, others = 3, 2, 2, len(["ReLU", "square", "mean"])
    assert profile(one).nodes == profile(one, brief=True).nodes == leaves + transposed + products + others
