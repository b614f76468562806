"""Microbatches: what a piece is, and that pieces add up to the batch."""

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
from shoestring.techniques.microbatch import ByExamples, ByTokens, sentence_lengths, trim
from shoestring.techniques.risk import Risk
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
    labels, mask = torch.tensor([[6, 7, PAD, PAD], [6, PAD, PAD, PAD]]), torch.ones(2, 4)
    trimmed = trim((ids, labels, mask, torch.ones(2)), PAD)
    assert [tuple(t.shape) for t in trimmed] == [(2, 3), (2, 3), (2, 3), (2,)]
    assert torch.equal(trimmed[0], ids[:, :3])
    assert trimmed[1].is_contiguous()


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
    assert microbatch.risk(convolutional(), 10) == Risk.NEUTRAL
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
    with pytest.raises(ShoestringError, match="do not go with checkpointing"):
        microbatch.apply(task, microbatch.Settings(4, simulated=True))
