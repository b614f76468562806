"""A trace goes the way of the run: it knows what comes from the batch, and says what nobody can know."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import rnn

import transformers_zoo
from metering import measured, predicted
from shoestring import SGD, Task
from shoestring.profiling import profile


def square(model, batch):
    return model(batch).square().mean()


def mean(model, batch):
    return model(*batch).square().mean()


# -- what comes from the batch ---------------------------------------------------------------------------------
class Masked(nn.Module):
    """Goes another, larger way where something is masked; `asks` is how it finds out."""

    def __init__(self, asks):
        super().__init__()
        self.asks, self.inner, self.more = asks, nn.Linear(64, 64), nn.Linear(64, 512)

    def forward(self, x, mask):
        x = self.inner(x)
        return x if self.asks(mask) else self.more(x).relu()


ASKS = {
    "all": lambda mask: mask.all(),
    "compared": lambda mask: torch.all(mask == 1),
    "item": lambda mask: (mask == 0).sum().item() == 0,
    "list": lambda mask: 0 not in mask.flatten().tolist(),
    "equal": lambda mask: torch.equal(mask, torch.ones_like(mask)),
    "lengths": lambda mask: int(mask.sum(-1).min()) == mask.shape[1],
    "in place": lambda mask: not mask.clone().mul_(-1).add_(1).any(),
    "a view": lambda mask: bool(mask[:, -1].view(-1, 1).expand(-1, 3).min()),
    "unique": lambda mask: torch.unique(mask).numel() == 1,
    "nonzero": lambda mask: mask.nonzero().shape[0] == mask.numel(),
    "a float": lambda mask: float((1.0 - mask.float()).max()) == 0.0,
}


@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.float32])
@pytest.mark.parametrize("asks", ASKS)
def test_a_model_that_looks_at_its_mask_is_traced_on_the_way_that_it_goes(asks, kind):
    def task(mask):
        torch.manual_seed(0)
        return Task(Masked(ASKS[asks]), mean, (torch.randn(8, 10, 64), mask), SGD())

    if kind == torch.bool and asks == "in place":
        pytest.skip("PyTorch does not multiply truth values by -1")
    ones = torch.ones(8, 10, dtype=kind)
    padded = ones.clone()
    padded[2, 5:] = 0
    whole, cut = profile(task(ones)), profile(task(padded))
    assert cut.peak_bytes > 2 * whole.peak_bytes
    assert not any("tell" in words or "draw" in words for words in whole.unseen + cut.unseen)


@pytest.mark.parametrize("loss", [
    lambda m, b: m(b[0])[b[1] > 3].mean(),
    lambda m, b: m(b[0]).masked_select((b[1] > 3)[:, None]).mean(),
    lambda m, b: m(b[0]).index_select(0, (b[1] > 3).nonzero()[:, 0]).mean(),
    lambda m, b: m(b[0]).repeat_interleave(b[1], 0).mean(),
    lambda m, b: torch.cat([part.mean(0) for part in m(b[0]).split(b[1].tolist())]).mean(),
], ids=["mask", "masked_select", "nonzero", "repeats", "lengths"])  # fmt: skip
def test_sizes_that_the_batch_decides_are_those_of_the_run(loss):
    counts = torch.tensor([1, 5, 2, 7, 4, 1, 6, 6])
    task = Task(nn.Linear(256, 256), loss, (torch.randn(32, 256), counts.repeat_interleave(4)), SGD())
    if loss.__code__.co_names[-3:] == ("split", "tolist", "mean"):
        task = task.with_(batch=(torch.randn(32, 256), counts))
    result = profile(task)
    assert result.tensor_peak_bytes == pytest.approx(measured(task).tensor_peak_bytes, rel=0.005)
    assert not any("depends" in words or "the most" in words for words in result.unseen)


class Packed(nn.Module):
    """Sequences of different lengths, packed for a recurrent layer and unpacked again."""

    def __init__(self, kind, width=64, **how):
        super().__init__()
        self.recurrent = getattr(nn, kind)(width, 32, **how)
        self.first = how.get("batch_first", False)

    def forward(self, x, lengths):
        given = x if self.first else x.transpose(0, 1)
        packed = rnn.pack_padded_sequence(given, lengths, batch_first=self.first, enforce_sorted=False)
        made, _ = self.recurrent(packed)
        return rnn.pad_packed_sequence(made, batch_first=self.first)[0]


@pytest.mark.parametrize("kind, how", [
    ("LSTM", {"batch_first": True}),
    ("GRU", {"bidirectional": True}),
    ("RNN", {"num_layers": 2, "batch_first": True, "width": 1024}),  # more than is computed for real
], ids=["LSTM", "GRU", "RNN"])  # fmt: skip
def test_packed_sequences_take_what_their_lengths_say(kind, how):
    def task(*lengths):
        x = torch.randn(8, 10, how.get("width", 64))
        return Task(Packed(kind, **how), mean, (x, torch.tensor(lengths)), SGD())

    uneven, even = task(10, 3, 7, 1, 5, 2, 4, 2), task(*[10] * 8)
    results = predicted(uneven), predicted(even)
    assert results[0].peak_bytes == pytest.approx(measured(uneven).peak_bytes, rel=0.01)  # 0.8% more in torch 2.8
    assert results[1].peak_bytes > 1.1 * results[0].peak_bytes
    assert not any("the most" in words or "tell" in words for words in results[0].unseen)
    assert "_pad_packed_sequence" not in vars(torch._VF)


def test_packed_sequences_whose_lengths_nobody_knows_are_bounded_and_it_is_said():
    def loss(model, batch):
        seen = (batch @ model.recurrent.weight_ih_l0.sum(0) > 0).sum(1)
        return mean(model, (batch, seen.clamp(min=1)))

    torch.manual_seed(0)
    task = Task(Packed("LSTM", batch_first=True), loss, torch.randn(8, 10, 64), SGD())
    result = predicted(task)
    assert result.peak_bytes >= measured(task).peak_bytes
    assert any("_pack_padded_sequence" in words for words in result.unseen)


def test_a_check_of_the_labels_is_passed_as_in_the_run():
    def loss(model, batch):
        inputs, labels = batch
        if labels.max() >= 10:
            raise ValueError("a label is too large")
        return F.cross_entropy(model(inputs), labels)

    task = Task(nn.Linear(4, 10), loss, (torch.randn(8, 4), torch.randint(10, (8,))), SGD())
    assert profile(task).peak_bytes > 0
    with pytest.raises(ValueError, match="a label is too large"):
        profile(task.with_(batch=(torch.randn(8, 4), torch.full((8,), 10))))


def test_the_batch_and_the_buffers_are_not_changed_by_what_is_computed_beside_the_trace():
    class Counting(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x, ids):
            self.calls += 1
            ids.mul_(0)
            return super().forward(x) if self.calls > 1 and not ids.any() else super().forward(super().forward(x))

    task = Task(Counting(), mean, (torch.randn(8, 4), torch.arange(8)), SGD())
    profile(task)
    assert int(task.model.calls) == 0 and torch.equal(task.batch[1], torch.arange(8))


# -- what is drawn ---------------------------------------------------------------------------------------------
class LayerDrop(nn.Module):
    """Skips whole layers at random."""

    def __init__(self, skips, layers=4):
        super().__init__()
        self.skips, self.layers = skips, nn.ModuleList(nn.Linear(64, 64) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            if not self.skips():
                x = layer(x).relu()
        return x if x.requires_grad else self.layers[0](x)


DRAWS = {
    "rand": lambda p: torch.rand([]) < p,
    "rand of one": lambda p: torch.rand(1).item() < p,
    "uniform": lambda p: torch.empty(()).uniform_(0, 1) < p,
    "bernoulli": lambda p: bool(torch.empty(1).bernoulli_(p)),
    "integers": lambda p: int(torch.randint(0, 100, ())) < 100 * p,
    "kept": lambda p: not torch.rand([]) >= p,
    "python": lambda p: random.random() < p,
    "python, uniform": lambda p: random.uniform(0, 1) < p,
    "numpy": lambda p: np.random.uniform(0, 1) < p,
    "numpy, rand": lambda p: np.random.rand() < p,
}


@pytest.mark.parametrize("draw", DRAWS)
def test_where_layers_are_dropped_at_random_all_are_counted_and_it_is_said(draw):
    def task(p):
        torch.manual_seed(0)
        return Task(LayerDrop(lambda: DRAWS[draw](p)), square, torch.randn(128, 64), SGD())

    never, sometimes = profile(task(0.0)), profile(task(0.3))
    assert sometimes.peak_bytes == never.peak_bytes
    assert any("a random draw at test_values.py" in words for words in sometimes.unseen)
    assert not any("draw" in words for words in never.unseen)
    assert never.peak_bytes == pytest.approx(measured(task(0.0)).tensor_peak_bytes, rel=0.01)


def test_each_place_that_draws_goes_the_larger_way_of_its_own():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            x = torch.relu(x + self.a.bias)
            if torch.rand([]) < 0.5:
                x = self.a(x).relu()
            if torch.rand([]) > 0.5:
                x = self.b(x).relu()
            return x

    class All(Both):
        def forward(self, x):
            return self.b(self.a(torch.relu(x + self.a.bias)).relu()).relu()

    tasks = [Task(kind(), square, torch.randn(256, 64), SGD()) for kind in (Both, All)]
    assert profile(tasks[0]).peak_bytes == profile(tasks[1]).peak_bytes


def test_a_loop_that_waits_for_a_draw_ends():
    def loss(model, batch):
        while torch.rand([]) > 0.5:
            batch = batch + 1
        while random.random() < 0.5:
            batch = batch + 1
        return square(model, batch)

    assert profile(Task(nn.Linear(4, 4), loss, torch.randn(8, 4), SGD())).peak_bytes > 0


def test_the_random_numbers_of_python_and_numpy_go_on_as_if_nothing_had_been_profiled():
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.rand()
    random.seed(1)
    np.random.seed(1)
    profile(Task(LayerDrop(lambda: random.random() + np.random.rand() < 0.3), square, torch.randn(8, 64), SGD()))
    assert (random.random(), np.random.rand()) == expected


# -- what is learned -------------------------------------------------------------------------------------------
class Experts(nn.Module):
    """Sends each token to the expert that its router prefers; `how` its tokens are picked."""

    def __init__(self, how, experts=4):
        super().__init__()
        self.how, self.router = how, nn.Linear(32, experts)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(experts))

    def forward(self, x):
        chosen, out = self.router(x).argmax(-1), torch.zeros_like(x)
        for number in self.how["which"](chosen, len(self.experts)):
            rows = self.how["rows"](chosen, number)
            out = out.index_put((rows,), self.experts[number](x[rows]).relu())
        return out + self.router(x).mean()


WHICH = {
    "all": lambda chosen, count: range(count),
    "hit": lambda chosen, count: F.one_hot(chosen, count).sum(0).nonzero()[:, 0].tolist(),
    "unique": lambda chosen, count: [n for n in range(count) if torch.unique(chosen).numel()],
}
ROWS = {
    "where": lambda chosen, number: torch.where(chosen == number)[0],
    "nonzero": lambda chosen, number: (chosen == number).nonzero()[:, 0],
    "mask": lambda chosen, number: chosen == number,
}


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("rows", ROWS)
def test_experts_that_a_router_chooses_are_bounded_and_it_is_said(which, rows):
    torch.manual_seed(0)
    task = Task(Experts({"which": WHICH[which], "rows": ROWS[rows]}), square, torch.randn(64, 32), SGD(momentum=0.9))
    result = predicted(task)
    assert result.peak_bytes >= measured(task).peak_bytes
    assert any("the most that it can be" in words for words in result.unseen)
    gradients = {e.module for e in result.ledger.entries if e.category == "gradient"}
    assert gradients >= {f"experts.{number}" for number in range(4)}


def test_a_way_that_ends_in_an_error_is_not_taken():
    def loss(model, batch):
        out = square(model, batch)
        if torch.isnan(out).any():
            raise RuntimeError("the loss is not a number")
        return out

    result = profile(Task(nn.Linear(4, 4), loss, torch.randn(8, 4), SGD()))
    assert any("a value that the batch does not tell is read at test_values.py" in words for words in result.unseen)


def test_a_branch_on_what_is_learned_goes_the_larger_way_and_says_so():
    def loss(model, batch):
        out = model(batch)
        return square(model, batch.repeat(9, 1)) if out.sum() < 0 else out.square().mean()

    always = Task(nn.Linear(64, 64), lambda model, batch: square(model, batch.repeat(9, 1)), torch.randn(64, 64), SGD())
    result = profile(always.with_(loss=loss))
    assert result.peak_bytes >= profile(always).peak_bytes
    assert any("the way that needs more memory is counted" in words for words in result.unseen)


# -- models of transformers ------------------------------------------------------------------------------------
MORE = [pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "whisper", "t5")]


@pytest.mark.parametrize("name", ["llama, padded", "bart", "wav2vec2", "mixtral", *MORE])
def test_a_model_of_transformers_is_as_measured(name):
    task = transformers_zoo.make(name)
    result = predicted(task)
    for module in task.model.modules():  # a run in which no layer is dropped
        for home in (module, getattr(module, "config", None)):
            if hasattr(home, "layerdrop"):
                home.layerdrop = 0.0
    assert result.peak_bytes == pytest.approx(measured(task).peak_bytes, rel=0.001)


@pytest.mark.parametrize("name", ["mixtral, one expert after the other", "qwen2-moe"])
def test_a_mixture_of_experts_of_transformers_is_bounded(name):
    task = transformers_zoo.make(name)
    result = predicted(task)
    assert measured(task).peak_bytes <= result.peak_bytes < 2 * measured(task).peak_bytes
    assert any("the most that it can be" in words for words in result.unseen)
