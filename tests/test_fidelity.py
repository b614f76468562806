"""Fidelity: compressed gradients beside exact ones, of the same weights, batch and random numbers, in a training that
nothing of it changes."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoestring import SGD, Plan, ShoestringError, Task, apply
from shoestring.errors import NoEffect
from shoestring.fidelity import probe
from shoestring.models.images import classification_loss
from shoestring.step import Stepper
from shoestring.techniques.activations.gradients import Overlap, gradients, total, untouched


class Net(nn.Module):
    """A stem, two branches that read one map, a layer whose map is small, dropout, and a classifier."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.left, self.right = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.small = nn.Conv2d(8, 64, 3, padding=1)
        self.tiny = nn.Conv2d(64, 8, 3, padding=1)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        x = self.stem(x)
        x = F.dropout(F.relu(self.left(x) + self.right(x)), 0.2, self.training)
        x = F.relu(self.small(F.avg_pool2d(x, 8)))
        return self.head(F.relu(self.tiny(x)).mean((2, 3)))


def task(count=32):
    torch.manual_seed(0)
    batch = torch.randn(count, 3, 16, 16), torch.randint(10, (count,))
    return Task(Net(), classification_loss, batch, SGD(lr=0.1, momentum=0.9), name="net")


def found(one, steps=3, words=("int4", "pool4"), every=2):
    return probe(one, [one.batch] * steps, steps, words, every, peak=lambda task: 123)


@pytest.fixture(scope="module")
def fidelity():
    return found(task(256))


def test_a_layers_cosine_and_norm_ratio_are_those_of_its_weights_gradients_averaged_over_the_probed_steps(fidelity):
    """Made once more by hand: the gradients of both passes at the same weights, with the same dropout."""
    one, cosines, ratios = task(256), [], []
    stepper, lean = Stepper(one), apply(one, Plan(activations="int4")).task
    for step in range(3):
        if step % 2 == 0:
            pair = []
            for each in (one, lean):
                with untouched(one.model):
                    pair.append(gradients(each, one.batch)["left.weight"].flatten().double())
            cosines.append(F.cosine_similarity(*pair, dim=0).item())
            ratios.append((pair[1].norm() / pair[0].norm()).item())
        stepper.step(one.batch)
    (row,) = [row for row in fidelity.layers if (row.module, row.codec) == ("left", "int4")]
    assert row.cosine == pytest.approx(sum(cosines) / 2, abs=1e-9)
    assert row.norm_ratio == pytest.approx(sum(ratios) / 2, abs=1e-9)
    assert 0.9 < row.cosine < 1


def test_the_training_has_the_bits_of_one_that_is_not_probed():
    plain, probed = task(), task()
    stepper = Stepper(plain)
    torch.manual_seed(1)
    for _ in range(3):
        stepper.step(plain.batch)
    drawn = torch.rand(1)
    torch.manual_seed(1)
    found(probed, words=("int2",), every=1)
    assert torch.equal(torch.rand(1), drawn)  # the generator is where it would have been
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(tensor, probed.model.state_dict()[name]), name
    assert not any(parameter.grad is not None for parameter in probed.model.parameters())


def test_running_statistics_and_generators_do_not_move_in_a_probe_even_where_a_buffer_is_large_or_replaced():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("large", torch.zeros(9000))
            self.register_buffer("replaced", torch.zeros(2))

        def forward(self, x):
            self.large += 1
            self.replaced = self.replaced + 1
            return (x * self.weight * torch.rand(3)).mean()

    model = Odd()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with untouched(model):
        gradients(Task(model, lambda model, x: model(x), torch.ones(2, 3), SGD()), torch.ones(2, 3))
        assert model.large[0] == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_layers_are_the_modules_whose_input_is_compressed_and_bytes_those_of_that_input(fidelity):
    rows = {(row.module, row.codec): row for row in fidelity.layers}
    assert {module for module, _ in rows} == {"left", "right", "tiny"}  # the stem reads the batch, small a small map
    maps = 256 * 8 * 16 * 16 * 4
    assert rows["left", "int4"].exact_bytes == rows["right", "pool4"].exact_bytes == maps
    assert rows["left", "pool4"].stored_bytes == maps // 16
    assert rows["left", "int4"].stored_bytes == maps * (4 + 1 / 8) / 32


def test_a_layer_that_a_codec_stores_as_it_is_is_said_to_be_exact(fidelity):
    """The maps that `tiny` reads are 2 x 2: there is no block of 4 x 4."""
    (row,) = [row for row in fidelity.layers if (row.module, row.codec) == ("tiny", "pool4")]
    assert row.stored_bytes == row.exact_bytes == 256 * 64 * 2 * 2 * 4
    assert row.cosine == pytest.approx(1) and row.norm_ratio == pytest.approx(1)


def test_the_whole_has_all_gradients_and_all_that_is_saved_once_per_storage(fidelity):
    assert [row.codec for row in fidelity.whole] == ["int4", "pool4"]
    one, lean = task(256), apply(task(256), Plan(activations="int4")).task
    for row in fidelity.whole:
        assert row.stored_bytes < row.exact_bytes and row.peak_bytes == 123
    by_hand = []
    for each in (one, lean):
        with untouched(each.model):
            torch.manual_seed(0)
            made = gradients(each, each.batch).values()
            by_hand.append(torch.cat([gradient.flatten().double() for gradient in made]))
    near = F.cosine_similarity(*by_hand, dim=0).item()
    assert fidelity.probes[0].cosines["int4"] == pytest.approx(near, abs=0.01)
    assert fidelity.whole[0].cosine == pytest.approx(sum(p.cosines["int4"] for p in fidelity.probes) / 2)
    # `left` and `right` read one map, which is stored once: the ReLU's bits, norms and small tensors are the rest.
    saved = {row.codec: row.exact_bytes - row.stored_bytes for row in fidelity.whole}
    assert saved["int4"] >= 256 * 8 * 16 * 16 * 4 * (1 - (4 + 1 / 8) / 32)


def test_steps_and_probes_are_counted(fidelity):
    assert fidelity.steps == 3 and [one.step for one in fidelity.probes] == [0, 2]
    assert set(fidelity.to_json()) >= {"layers", "whole", "steps"}
    assert set(fidelity.to_json()["layers"][0]) == {
        "module", "codec", "cosine", "norm_ratio", "exact_bytes", "stored_bytes",
    }  # fmt: skip
    assert set(fidelity.to_json()["whole"][0]) == {"codec", "cosine", "exact_bytes", "stored_bytes", "peak_bytes"}


def test_a_codec_without_effect_is_named_with_the_reason_and_the_others_are_compared():
    result = found(task(256), steps=1, words=("pool64", "int8"))
    assert [row.codec for row in result.whole] == ["int8"]
    assert "nothing that" in result.without_effect["pool64"]


def test_a_model_without_a_layer_to_compress_is_refused():
    flat = Task(nn.Linear(4, 2), lambda model, x: model(x).square().mean(), torch.ones(8, 4), SGD())
    with pytest.raises(NoEffect, match=r"for its backward pass has 65\.54 KB, the least"):
        found(flat)


@pytest.mark.parametrize("word", ["half", "offload", "int3", "pool", "pool2=int4", ""])
def test_a_word_that_compresses_nothing_is_refused_before_any_work(word):
    with pytest.raises(ShoestringError, match=f"there is no codec {word!r} that compresses"):
        found(task(), words=("int4", word))


def test_no_steps_are_refused():
    with pytest.raises(ShoestringError, match="0 steps"):
        found(task(), steps=0)


def test_a_weight_that_is_computed_first_counts_as_its_modules_and_a_layer_that_nobody_reads_not_at_all():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv2d(3, 8, 3, padding=1)
            self.normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 3, padding=1))
            self.unread, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 10)

        def forward(self, x):
            x = F.relu(self.first(x))
            self.unread(x)
            return self.head(F.relu(self.normed(x)).mean((2, 3)))

    torch.manual_seed(0)
    odd = task(32).with_(model=Odd())
    result = found(odd, steps=1, words=("int4",))
    (row,) = result.layers
    assert row.module == "normed" and 0.9 < row.cosine < 1


def test_overlaps_add_up_and_gradients_of_zero_are_equal():
    a, b = torch.randn(30), torch.randn(30)
    whole = Overlap.of(a, b)
    parts = total([Overlap.of(a[:10], b[:10]), Overlap.of(a[10:], b[10:])])
    assert parts == pytest.approx(whole)
    assert whole.cosine == pytest.approx(F.cosine_similarity(a.double(), b.double(), 0).item())
    zero = torch.zeros(3)
    assert Overlap.of(zero, zero).cosine == Overlap.of(zero, zero).norm_ratio == 1
    assert Overlap.of(torch.ones(3), zero).cosine == 0
    assert math.isfinite(Overlap.of(zero, torch.ones(3)).norm_ratio)


def test_gradients_of_sparse_embeddings_are_compared_too():
    embedding = nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([1, 3])).sum().backward()
    assert Overlap.of(embedding.weight.grad, embedding.weight.grad).cosine == pytest.approx(1)
