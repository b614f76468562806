"""Built-in tasks: names, sizes, random batches and what is refused."""

import pytest
import torch

from shoestring import SGD, Adam, ShoestringError, builtin
from shoestring.tokens import EOS, PAD


def test_the_image_tasks_train_as_in_the_paper():
    task = builtin("wrn-28-2", device="meta")
    assert task.name == "wrn-28-2"
    assert task.count(task.batch) == 100
    assert task.batch[0].shape == (100, 3, 32, 32)
    assert task.optimizer == SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)


@pytest.mark.parametrize("tokens", [1, 19, 333, 4000])
def test_the_translation_task_has_as_many_target_tokens_as_asked(tokens):
    task = builtin("dynamicconv-iwslt", tokens=tokens, device="meta")
    assert task.count(task.batch) == tokens
    assert task.optimizer == Adam(lr=5e-4, betas=(0.9, 0.98), weight_decay=1e-4)


def test_sentences_end_with_eos_and_the_target_is_read_one_word_late():
    source, target_in, target_out = builtin("dynamicconv-iwslt", tokens=500, device="meta").batch
    for ids in (source, target_out):
        lengths = (ids != PAD).sum(1)
        assert (ids.gather(1, lengths[:, None] - 1) == EOS).all()
        assert ((ids != PAD) == (torch.arange(ids.shape[1]) < lengths[:, None])).all()
    assert (target_in[:, 0] == EOS).all()
    assert torch.equal(target_in[:, 1:], target_out[:, :-1].masked_fill(target_out[:, 1:] == PAD, PAD))
    assert 20 <= (source != PAD).sum(1).double().mean() <= 30


def test_a_given_length_makes_all_sentences_equal():
    batch = builtin("dynamicconv-iwslt", tokens=4000, length=250, device="meta").batch
    assert [ids.shape for ids in batch] == [(16, 250)] * 3
    assert not any((ids == PAD).any() for ids in batch)


@pytest.mark.parametrize("name", ["wrn", "wrn-28", "wrn--28-2", "wrn-28-2x", "", "vgg"])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(ShoestringError, match=r"no built-in .*wrn-28-2.*resnet18.*dynamicconv.*vit"):
        builtin(name)


@pytest.mark.parametrize("batch", [0, -5, 10**9, 2.5, "many", True])
def test_a_batch_out_of_range_names_the_bound(batch):
    with pytest.raises(ShoestringError, match=rf"batch {batch} is out of range: .*81,380"):
        builtin("wrn-28-2", batch=batch)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tokens": -4000}, "tokens -4000 is out of range: give a whole number from 1 to 1,000,000"),
        ({"length": 2000}, "length 2000 is out of range: give a whole number from 1 to 1,024"),
        ({"length": 0}, "length 0 is out of range"),
        ({"source_vocabulary": 4}, "source_vocabulary 4 is out of range: give a whole number from 5"),
        ({"batch": 10}, "dynamicconv-iwslt has no option 'batch': it takes tokens, length"),
        ({"seed": -1}, "seed -1 is out of range"),
    ],
)
def test_a_wrong_size_of_the_translation_task_is_refused(options, message):
    with pytest.raises(ShoestringError, match=message):
        builtin("dynamicconv-iwslt", **options)


def test_an_option_that_a_model_does_not_have_lists_those_it_has():
    with pytest.raises(ShoestringError, match="no option 'tokens': it takes batch, classes, image"):
        builtin("wrn-28-2", tokens=4000)


@pytest.mark.parametrize("device", ["gpu", "cpu:x"])
def test_a_device_that_does_not_exist_is_refused(device):
    with pytest.raises(ShoestringError, match=f"device {device} cannot be used here"):
        builtin("wrn-28-2", device=device)
