"""Data may be anything that can be iterated repeatedly, of a known length or not, and resumes at any batch."""

import pytest
import torch
from small import Noise, loss, right_answers, task
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from shoestring import SGD, Plan, ShoestringError, Task, apply, train
from shoestring.training.resumable import Stream


def batches():
    """Four batches, each with noise of its own: drawn anew in every pass."""
    for number in range(4):
        images, labels = Noise().read(0, number)
        yield images + 0.1 * torch.randn(images.shape), labels


class Batches(IterableDataset):
    def __iter__(self):
        return batches()


class Examples(IterableDataset):
    """Twelve examples, of which a DataLoader makes batches of three."""

    def __iter__(self):
        for images, labels in batches():
            yield from zip(images[:3], labels[:3], strict=True)


class Iterable:
    """Nothing but __iter__."""

    def __iter__(self):
        return batches()


KINDS = {
    "a function": lambda: batches,
    "an IterableDataset": Batches,
    "a DataLoader of one": lambda: DataLoader(Batches(), batch_size=None),
    "a DataLoader that makes batches": lambda: DataLoader(Examples(), batch_size=3),
    "an iterable": Iterable,
}


class Killed(Exception):
    pass


def kill(event):
    if event.update == 6:
        raise Killed


@pytest.mark.parametrize("kind", KINDS)
def test_data_without_a_length_is_gone_through_again_and_resumed_to_the_bit(kind, tmp_path):
    how = {"updates": 10, "save_every": 3, "evaluation": right_answers()}
    whole, resumed = task(), task()
    record = train(whole, KINDS[kind](), run=tmp_path / "whole", **how)
    assert record.updates == 10 and record.quality is not None
    with pytest.raises(Killed):
        train(task(), KINDS[kind](), run=tmp_path / "run", listeners=[kill], **how)
    train(resumed, KINDS[kind](), run=tmp_path / "run", resume=True, **how)
    log, again = ((tmp_path / name / "log.jsonl").read_text() for name in ("whole", "run"))
    assert log == again
    for a, b in zip(whole.model.state_dict().values(), resumed.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_every_pass_has_random_numbers_of_its_own_and_the_models_are_left_alone():
    stream = Stream(batches, seed=3, updates=9)
    torch.manual_seed(0)
    read = [stream.read(0, number)[0] for number in range(9)]
    state = torch.rand(2)
    torch.manual_seed(0)
    assert torch.equal(state, torch.rand(2))
    assert not torch.equal(read[0], read[4]) and not torch.equal(read[4], read[8])
    assert torch.equal(Stream(batches, seed=3, updates=9).read(0, 8)[0], read[8])
    assert not torch.equal(Stream(batches, seed=4, updates=9).read(0, 8)[0], read[8])


@pytest.mark.parametrize(
    "data, how, words",
    [
        (batches(), {"updates": 3}, "a generator, can be iterated only once.*pass the function that makes it"),
        (iter([1, 2]), {"epochs": 1}, "a list_iterator, can be iterated only once"),
        (batches, {"epochs": 2}, "a function, has no length, .*train for updates=N"),
        (DataLoader(Batches(), batch_size=None), {"epochs": 1}, "a DataLoader, has no length"),
        ([], {"epochs": 1}, "a list, holds no batch"),
        (3, {"epochs": 1}, "a int, cannot be iterated: pass a list"),
        (lambda: iter(()), {"updates": 2}, "the data ended early: it should have at least one batch, and gave 0"),
        (lambda: 3, {"updates": 2}, "the data is a function that made a int: return"),
    ],
)
def test_what_cannot_be_data_is_refused_with_what_to_pass(data, how, words):
    with pytest.raises(ShoestringError, match=words):
        train(task(), data, **how)


class Short(list):
    def __len__(self):
        return 5


def test_data_that_is_shorter_than_it_says_is_told():
    with pytest.raises(ShoestringError, match="ended early: it should have 5 batches, and gave 2"):
        train(task(), Short([Noise().read(0, 0), Noise().read(0, 1)]), epochs=1)


# -- models without a size ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("layer", [nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d()])
def test_a_lazy_layer_without_a_size_is_named_and_trains_once_it_has_one(layer):
    model, batch = nn.Sequential(layer, nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)), Noise().read(0, 0)
    with pytest.raises(ShoestringError, match=r"0\.weight of a lazy layer has no size yet: run the model on a batch"):
        Task(model, loss, batch, SGD(0.1))
    model(batch[0])
    for plan in (Plan(), Plan(precision="bf16", optimizer="8bit")):
        assert apply(Task(model, loss, batch, SGD(0.1, 0.9)), plan).step(batch).isfinite()
