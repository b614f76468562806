"""Microbatches: what a piece is, and that pieces add up to the batch."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from runs import distance, doubled, run
from torch import nn

import shoestring
from shoestring import SGD, Plan, ShoestringError, Task, apply
from shoestring.errors import NoEffect
from shoestring.models.dynamicconv import DynamicConvTransformer, Settings
from shoestring.models.translation import count_target_tokens, random_pairs, translation_loss
from shoestring.techniques import microbatch
from shoestring.techniques.microbatch.pieces import ByExamples, ByTokens, sentence_lengths, trim
from shoestring.techniques.technique import Risk
from shoestring.tokens import PAD


def translation(lengths=(5, 20)):
    """A DynamicConv Transformer without dropout, whose pieces must add up to the batch exactly."""
    torch.manual_seed(0)
    sizes = Settings(40, 30, 16, 32, 2, (3, 7), (3,), 0.0, 0.0, 0.0, most_positions=64)
    pairs = random_pairs(torch.Generator().manual_seed(0), 200, lengths, sizes)
    return Task(DynamicConvTransformer(sizes), translation_loss, pairs, SGD(lr=0.1), count_target_tokens, PAD)


def convolutional(momentum=0.1):
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=momentum), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)
    batch = torch.randn(10, 3, 6, 6), torch.randint(5, (10,))
    return Task(nn.Sequential(*layers), lambda m, b: F.cross_entropy(m(b[0]), b[1]), batch, SGD(lr=0.1, momentum=0.9))


def test_pieces_are_views_of_the_batch_and_the_last_is_what_remains():
    images, labels = torch.randn(7, 3), torch.arange(7)
    pieces = list(ByExamples(3)({"x": images, "y": labels, "scale": torch.tensor(2.0), "name": "n"}))
    assert [len(piece["x"]) for piece in pieces] == [3, 3, 1]
    assert torch.equal(torch.cat([piece["y"] for piece in pieces]), labels)
    assert pieces[1]["x"].untyped_storage().data_ptr() == images.untyped_storage().data_ptr()
    assert all(piece["scale"] == 2 and piece["name"] == "n" for piece in pieces)
    assert not pieces[1]["x"]._is_view()  # for autograd, whose notes on a view are larger than the view


def test_a_piece_of_what_is_differentiated_is_too():
    images = torch.randn(4, 3, requires_grad=True)
    pieces = list(ByExamples(2)(images))
    sum(piece.square().sum() for piece in pieces).backward()
    assert torch.equal(images.grad, 2 * images)


# -- what is cut ----------------------------------------------------------------------------------------------------
def first_piece(batch, shared=()):
    return next(iter(ByExamples(2, shared=shared)(batch)))


def test_a_mask_as_long_as_the_batch_is_cut_unless_it_is_named_as_shared():
    batch = {"ids": torch.zeros(4, 4), "inner": {"mask": torch.ones(4, 4)}}
    assert first_piece(batch)["inner"]["mask"].shape == (2, 4)
    by_function = lambda path, value: path == "inner.mask" and value.shape == (4, 4)  # noqa: E731
    for shared in (["mask"], ["inner.mask"], ["inner"], by_function):
        piece = first_piece(batch, shared)
        assert piece["inner"]["mask"] is batch["inner"]["mask"]
        assert piece["ids"].shape == (2, 4)


@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_with_an_entry_for_each_example_are_cut(kind):
    boxes = kind(torch.zeros(n, 4) for n in (1, 3, 2))
    batch = {"x": torch.zeros(3, 5), "ids": kind("abc"), "boxes": boxes, "sizes": np.arange(3), "pair": kind([7, 8])}
    piece = first_piece(batch)
    assert piece["ids"] == kind("ab") and piece["boxes"] == boxes[:2] and piece["sizes"].tolist() == [0, 1]
    assert piece["pair"] == batch["pair"]
    assert first_piece(batch, ["ids", "boxes"])["ids"] == kind("abc")


def test_a_list_of_columns_is_no_list_of_examples():
    x, y, z = torch.zeros(2, 3), torch.zeros(2), torch.ones(2, 1)
    piece = next(iter(ByExamples(1)([x, y])))  # a DataLoader's batch of two examples
    assert [tuple(part.shape) for part in piece] == [(1, 3), (1,)]
    piece = next(iter(ByExamples(1)({"x": x, "more": [y, z]})))
    assert [tuple(part.shape) for part in piece["more"]] == [(1,), (1, 1)]


def test_what_broadcasts_goes_to_each_piece():
    batch = {"x": torch.zeros(4, 3), "positions": torch.zeros(1, 3), "scale": torch.tensor(2.0), "flag": True}
    piece = first_piece(batch)
    assert all(piece[name] is batch[name] for name in ("positions", "scale", "flag"))


def test_a_tensor_that_does_not_match_the_batch_is_refused_by_its_path():
    batch = {"x": torch.zeros(4, 3), "loss": {"weights": torch.ones(10)}}
    task = Task(nn.Linear(3, 1), lambda m, b: m(b["x"]).mean(), batch, SGD())
    words = r"4 examples, by the first dimension of batch 'x', and batch 'loss.weights' has 10, .*shared=\['weights'\]"
    with pytest.raises(ShoestringError, match=words):
        apply(task, Plan(microbatch=2))
    lean = apply(task.with_(shared=["weights"]), Plan(microbatch=2))
    assert [len(piece["loss"]["weights"]) for piece in lean.task.split(batch)] == [10, 10]


def test_a_name_that_nothing_in_the_batch_has_is_refused():
    batch = {"x": torch.zeros(4, 3), "mask": torch.ones(3)}
    task = Task(nn.Linear(3, 1), lambda m, b: m(b["x"]).mean(), batch, SGD(), shared=["maks", "mask"])
    with pytest.raises(ShoestringError, match="names 'maks', and the batch has only x, mask"):
        apply(task, Plan(microbatch=2))


def test_pieces_of_unequal_size_add_up_to_the_batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    batch = torch.randn(10, 6), torch.randint(3, (10,))
    task = doubled(Task(model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), batch, SGD(lr=0.0)))
    whole, pieces = run(task, 1), run(apply(task, Plan(microbatch=4)).task, 1)
    assert distance(pieces.gradients[0], whole.gradients[0]) < 1e-14
    torch.testing.assert_close(pieces.losses, whole.losses, rtol=1e-14, atol=0)


# -- by tokens ------------------------------------------------------------------------------------------------------
def test_pieces_by_tokens_add_up_to_the_batch():
    whole = run(doubled(translation()), 1)
    lean = apply(doubled(translation()), Plan(microbatch=60))
    assert len(list(lean.task.split(lean.task.batch))) > 3
    pieces = run(lean.task, 1)
    assert distance(pieces.gradients[0], whole.gradients[0]) < 1e-12
    torch.testing.assert_close(pieces.losses, whole.losses, rtol=1e-12, atol=0)


def test_a_piece_has_at_most_so_many_tokens_padding_counted():
    task = translation()
    pieces = list(ByTokens(60, PAD)(task.batch))
    assert sum(len(source) for source, *_ in pieces) == len(task.batch[0])
    for source, _, target in pieces:
        assert len(source) * max(source.shape[1], target.shape[1]) <= 60


def test_the_next_sentence_would_not_have_fitted():
    task = translation()
    lengths, start = sentence_lengths(task.batch, PAD), 0
    for source, *_ in list(ByTokens(60, PAD)(task.batch))[:-1]:
        stop = start + len(source)
        assert (stop + 1 - start) * max(lengths[start : stop + 1]) > 60
        start = stop


def test_columns_that_are_padding_throughout_are_left_out_of_a_piece():
    ids = torch.tensor([[5, 6, 7, PAD], [5, 6, PAD, PAD]])
    labels, mask = torch.tensor([[6, 7, PAD, PAD], [6, PAD, PAD, PAD]]), ids != PAD
    trimmed = trim((ids, labels, mask, torch.ones(2)), PAD)
    assert [tuple(t.shape) for t in trimmed] == [(2, 3), (2, 3), (2, 3), (2,)]
    assert torch.equal(trimmed[0], ids[:, :3])
    assert trimmed[1].is_contiguous()


def test_labels_that_are_ignored_and_holes_of_a_mask_are_no_tokens():
    ids = torch.tensor([[5, 6, 7, PAD], [5, 6, PAD, PAD]])
    batch = {"ids": ids, "labels": ids.masked_fill(ids == PAD, -100), "attention_mask": (ids != PAD).long()}
    assert sentence_lengths(batch, PAD) == [3, 2]
    assert [t.shape[1] for t in trim(batch, PAD).values()] == [3, 3, 3]


@pytest.mark.parametrize(
    "other",
    [torch.arange(12.0).view(3, 4), torch.zeros(3, 2, 4), torch.ones(4, 4), torch.arange(4)[None]],
    ids=["features", "a tensor of three dimensions", "a mask for all", "positions"],
)
def test_columns_are_left_alone_where_another_tensor_has_as_many(other):
    ids = torch.tensor([[5, 6, 7, PAD], [5, 6, PAD, PAD], [5, PAD, PAD, PAD]])
    pieces = list(ByTokens(4, PAD, ("other",))({"ids": ids, "other": other} if len(other) == 4 else (ids, other)))
    assert len(pieces) == 3  # what is not cut off is counted
    for piece in pieces:
        found, beside = piece.values() if isinstance(piece, dict) else piece
        assert found.shape == (1, 4) and beside.shape[-1] == other.shape[-1]


def test_labels_beyond_the_sentence_keep_their_column():
    ids, labels = torch.tensor([[5, PAD, PAD]]), torch.tensor([[6, 7, PAD]])
    assert [t.shape[1] for t in trim((ids, labels), PAD)] == [2, 2]


def test_a_batch_of_nothing_but_padding_keeps_a_column():
    assert trim(torch.full((2, 3), PAD), PAD).shape == (2, 1)


def test_without_padding_a_token_is_a_token():
    assert sentence_lengths(torch.ones(4, 7, dtype=torch.int64), None) == [7] * 4


def test_the_builtin_translation_goes_by_tokens():
    task = shoestring.builtin("dynamicconv-iwslt", tokens=300, device="meta")
    split = apply(task, Plan(microbatch=100)).task.split
    assert isinstance(split, ByTokens)
    assert 2 * 100 < 300 < microbatch.units(task)


def test_examples_can_be_asked_for_where_tokens_are_usual():
    lean = microbatch.apply(translation(), microbatch.Settings(3, by="examples"))
    assert [len(source) for source, *_ in lean.split(lean.batch)][:2] == [3, 3]


def test_a_microbatch_smaller_than_a_sentence_is_refused_with_the_longest():
    with pytest.raises(ShoestringError, match=r"4 tokens is smaller than sentence \d+ .* use at least 20, the longest"):
        apply(translation(), Plan(microbatch=4))


def test_images_cannot_be_cut_by_tokens():
    with pytest.raises(ShoestringError, match="holds no whole numbers of shape"):
        microbatch.apply(convolutional(), microbatch.Settings(4, by="tokens"))


# -- bad sizes ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [0, -3, 11])
def test_a_size_that_does_not_go_into_the_batch_is_refused(size):
    with pytest.raises(ShoestringError, match="does not go into a batch of 10 examples: use 1 to 10"):
        apply(convolutional(), Plan(microbatch=size))


def test_the_whole_batch_as_a_microbatch_has_no_effect():
    with pytest.raises(NoEffect, match="10 examples is the whole batch"):
        apply(convolutional(), Plan(microbatch=10))


def test_an_unknown_unit_is_refused():
    with pytest.raises(ShoestringError, match="by examples or by tokens, not by 'lines'"):
        microbatch.apply(convolutional(), microbatch.Settings(4, by="lines"))


def test_risk_depends_on_batch_norm_and_size():
    assert microbatch.risk(translation(), 30) == Risk.EXACT
    assert microbatch.risk(convolutional(), 10) == Risk.APPROXIMATE
    assert microbatch.risk(convolutional(), 4) == Risk.APPROXIMATE


# -- simulated ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("momentum", [0.1, None])
def test_simulated_microbatches_train_as_true_ones(momentum):
    true = run(microbatch.apply(doubled(convolutional(momentum)), microbatch.Settings(4)))
    simulated = run(microbatch.apply(doubled(convolutional(momentum)), microbatch.Settings(4, simulated=True)))
    for found, wanted in zip(simulated.gradients, true.gradients, strict=True):
        assert distance(found, wanted) < 1e-10
    assert simulated.buffers["1.num_batches_tracked"] == true.buffers["1.num_batches_tracked"] == 6
    for name, wanted in true.buffers.items():
        torch.testing.assert_close(simulated.buffers[name], wanted, rtol=1e-12, atol=1e-12)


def test_simulated_microbatches_are_not_plain_training():
    plain = run(doubled(convolutional()), 1)
    simulated = run(microbatch.apply(doubled(convolutional()), microbatch.Settings(4, simulated=True)), 1)
    assert distance(simulated.gradients[0], plain.gradients[0]) > 1e-3


def test_simulated_microbatches_run_the_batch_at_once():
    task = microbatch.apply(convolutional(), microbatch.Settings(4, simulated=True))
    assert len(list(task.split(task.batch))) == 1


def test_simulation_without_batch_norm_has_no_effect():
    model = nn.Sequential(nn.Linear(4, 2))
    task = Task(model, lambda m, b: m(b).sum(), torch.randn(6, 4), SGD())
    with pytest.raises(NoEffect, match="Sequential has no batch norm"):
        microbatch.apply(task, microbatch.Settings(2, simulated=True))


def test_simulation_does_not_go_with_checkpointing():
    task = apply(convolutional(), Plan(checkpoint="no-bn")).task
    with pytest.raises(ShoestringError, match="do not work with checkpoint no-bn"):
        microbatch.apply(task, microbatch.Settings(4, simulated=True))
