"""A batch of any structure is taken apart and put together again, and keeps its type."""

import collections
import types
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from shoestring import SGD, Plan, ShoestringError, Task, apply, plan
from shoestring.profiling import profile
from shoestring.structure import flatten, leaves, mapped, named_leaves, tensors
from shoestring.training.budget import batch_bytes

X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6.0)


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Record:
    x: Tensor
    y: Tensor
    name: str = "n"
    shape: tuple = field(init=False)

    def __post_init__(self):
        self.shape = tuple(self.x.shape)
        self.note = "kept"


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    y: Tensor


class Encoding(collections.UserDict):
    """As transformers' BatchEncoding: items are attributes too, and something else is known beside them."""

    def __init__(self, data=None, words=()):
        super().__init__(data)
        self.words = words

    def __getattr__(self, name):
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None


class Wrapped(MutableMapping):
    """A mapping around a dict, of which a shallow copy would share the items."""

    def __init__(self, items):
        self.inner = dict(items)

    def __getitem__(self, key):
        return self.inner[key]

    def __setitem__(self, key, value):
        self.inner[key] = value

    def __delitem__(self, key):
        del self.inner[key]

    def __iter__(self):
        return iter(self.inner)

    def __len__(self):
        return len(self.inner)


class Attributes(dict):
    __getattr__ = dict.__getitem__


BATCHES = {
    "list": [X, Y],
    "tuple": (X, Y),
    "dict": {"x": X, "y": Y},
    "named tuple": Pair(X, Y),
    "dataclass": Record(X, Y),
    "frozen dataclass": Frozen(X, Y),
    "UserDict": Encoding({"x": X, "y": Y}, words=("a", "b")),
    "mapping": Wrapped({"x": X, "y": Y}),
    "read-only mapping": types.MappingProxyType({"x": X, "y": Y}),
    "dict with attributes": Attributes(x=X, y=Y),
    "OrderedDict": collections.OrderedDict(x=X, y=Y),
    "ChainMap": collections.ChainMap({"x": X}, {"y": Y}),
    "nested": {"inner": Record(X, Y), "list": [Pair(X, Y)], "none": None},
}
each_batch = pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)


def part(batch: Any, name: str) -> Tensor:
    """What a loss reads: by position, by key or as an attribute."""
    if isinstance(batch, dict) and "inner" in batch:
        return part(batch["inner"], name)
    if type(batch) in (list, tuple):
        return batch["xy".index(name)]
    return batch[name] if isinstance(batch, Mapping) else getattr(batch, name)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return (model(part(batch, "x")).squeeze(1) - part(batch, "y")).square().mean()


def task(batch: Any, **changes: Any) -> Task:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    return Task(model, loss, batch, SGD(lr=0.01), **changes)


@each_batch
def test_a_structure_keeps_its_type_and_the_original_its_tensors(batch):
    before = list(leaves(batch))
    doubled = mapped(lambda leaf: 2 * leaf if isinstance(leaf, Tensor) else leaf, batch)
    assert type(doubled) is type(batch)
    assert all(torch.equal(new, 2 * old) for new, old in zip(tensors(doubled), tensors(batch), strict=True))
    assert all(new is old for new, old in zip(leaves(batch), before, strict=True))


@each_batch
def test_a_structure_is_rebuilt_from_its_leaves_alone(batch):
    found, rebuild = flatten(batch)
    again = rebuild([-leaf if isinstance(leaf, Tensor) else leaf for leaf in found])
    assert type(again) is type(batch)
    assert torch.equal(part(again, "x"), -X) and torch.equal(part(again, "y"), -Y)


def test_what_rebuilds_a_structure_holds_none_of_its_tensors():
    import gc
    import weakref

    batch = {"record": Record(torch.zeros(3), torch.zeros(3)), "words": Encoding({"x": torch.zeros(3)})}
    found, rebuild = flatten(batch)
    watch = [weakref.ref(tensor) for tensor in tensors(batch)]
    del batch, found
    gc.collect()
    assert all(tensor() is None for tensor in watch) and rebuild is not None


def test_what_an_object_knows_beside_its_tensors_is_kept():
    record = mapped(lambda leaf: leaf, {"r": BATCHES["dataclass"]})["r"]
    assert (record.note, record.name, record.shape) == ("kept", "n", (6, 2))
    encoding = mapped(lambda leaf: leaf + 1, BATCHES["UserDict"])
    assert encoding.words == ("a", "b") and torch.equal(encoding.x, X + 1)


def test_lists_are_made_anew_and_other_objects_stay_themselves_where_nothing_in_them_changed():
    record, numbers = Record(X, Y), [1, 2]
    again = mapped(lambda leaf: leaf, [record, numbers])
    assert again[0] is record and again[1] == numbers and again[1] is not numbers


def test_paths_name_keys_fields_and_places():
    tree = {"a": Record(X, Y), "b": [Pair(X, Y), 3]}
    assert [path for path, _ in named_leaves(tree)] == [
        "a.x", "a.y", "a.name", "a.shape.0", "a.shape.1", "b.0.x", "b.0.y", "b.1",
    ]  # fmt: skip


def test_modules_classes_and_texts_are_leaves():
    held = [nn.Linear(1, 1), Record, "text", b"bytes", None]
    assert list(leaves(held)) == held


def test_a_mapping_that_cannot_be_made_again_says_what_to_do():
    class Odd(Mapping):
        def __init__(self, a, b):
            self.inner = {"a": a, "b": b}

        __getitem__ = Wrapped.__getitem__
        __iter__ = Wrapped.__iter__
        __len__ = Wrapped.__len__

    with pytest.raises(ShoestringError, match=r"a Odd in the batch cannot be made from a dict .* register it with"):
        mapped(lambda leaf: leaf + 1, Odd(X, Y))


# -- wherever a batch is walked --------------------------------------------------------------------------------------
@each_batch
def test_a_task_counts_profiles_plans_and_trains_on_a_batch_of_any_structure(batch):
    whole = task(batch)
    assert whole.count(batch) == 6
    assert batch_bytes(batch) == sum(t.nbytes for t in tensors(batch)) > 0
    traced = profile(whole)
    assert traced.bytes_by_category["input"] == X.nbytes + Y.nbytes
    assert plan(whole, "1GB").techniques() == {}
    before = whole.model[0].weight.detach().clone()
    assert torch.isfinite(apply(whole, Plan(checkpoint="every-2")).step(batch))
    assert not torch.equal(whole.model[0].weight, before)


@each_batch
def test_pieces_have_the_type_of_the_batch_and_add_up_to_it(batch):
    lean = apply(task(batch), Plan(microbatch=4))
    pieces = list(lean.task.split(batch))
    assert [type(piece) for piece in pieces] == [type(batch)] * 2
    assert [len(part(piece, "x")) for piece in pieces] == [4, 2]
    plain = task(batch)
    assert float(apply(plain, Plan()).step(batch)) == pytest.approx(float(lean.step(batch)), rel=1e-6)
    assert torch.allclose(lean.model[0].weight, plain.model[0].weight, atol=1e-7)


def test_a_model_in_16_bits_takes_a_batch_that_it_is_handed_whole():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, batch):
            return (self.layer(batch["x"]).squeeze(1) - batch["y"]).square().mean()

    torch.manual_seed(0)
    lean = apply(Task(Whole(), lambda m, b: m(b), BATCHES["UserDict"], SGD(lr=0.01)), Plan(precision="bf16"))
    assert torch.isfinite(lean.step(BATCHES["UserDict"]))


def test_a_block_that_is_run_again_takes_a_dataclass():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, pair):
            return Frozen(torch.tanh(self.layer(pair.x)), pair.y)

    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))

        def forward(self, pair):
            for block in self.blocks:
                pair = block(pair)
            return (pair.x.sum(1) - pair.y).square().mean()

    def made():
        torch.manual_seed(0)
        return Task(Blocks(), lambda m, b: m(b), Frozen(X, Y), SGD(lr=0.01))

    plain, lean = made(), apply(made(), Plan(checkpoint="residual-2"))
    apply(plain, Plan()).step(plain.batch)
    lean.step(plain.batch)
    for wanted, found in zip(plain.model.parameters(), lean.model.parameters(), strict=True):
        assert torch.equal(wanted, found)
