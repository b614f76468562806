"""Keepers: who decides what is kept of a saved tensor, and that nobody is given another one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from shoestring import ShoestringError
from shoestring.passes.saved_tensors import AsIs, Deduplicated, OneUse, store, storing


class Copy:
    """Keeps a copy, and counts how many were made."""

    made = 0

    def __init__(self, tensor):
        Copy.made += 1
        self.copy = tensor.clone()

    def take(self):
        return self.copy


@pytest.fixture(autouse=True)
def count():
    Copy.made = 0


def test_without_a_keeper_a_tensor_is_kept_whole():
    x = torch.ones(3)
    assert store(x).take() is x


def test_the_innermost_keeper_decides():
    with storing(AsIs), storing(Copy):
        assert isinstance(store(torch.ones(3)), Copy)
        with storing(AsIs):
            assert isinstance(store(torch.ones(3)), AsIs)
    assert isinstance(store(torch.ones(3)), AsIs)


def test_what_pytorchs_operations_save_goes_through_the_keeper():
    w, x = nn.Parameter(torch.ones(3)), torch.arange(3.0)
    with storing(Copy):
        (x.square() * w).sum().backward()
    assert Copy.made == 1  # x's square; w is a parameter
    assert torch.equal(w.grad, x.square())


def test_a_keeper_that_raises_leaves_no_keeper_behind():
    def refuse(tensor):
        raise ShoestringError("no")

    with pytest.raises(ShoestringError, match="no"), storing(refuse):
        nn.Parameter(torch.ones(3)).exp()
    assert isinstance(store(torch.ones(3)), AsIs)
    nn.Parameter(torch.ones(3)).exp().sum().backward()


@pytest.mark.parametrize("kept", [AsIs, lambda x: OneUse(Copy(x))])
def test_a_tensor_is_given_back_once(kept):
    once = kept(torch.ones(3))
    once.take()
    with pytest.raises(ShoestringError, match="asked for a second time"):
        once.take()


def test_a_second_backward_pass_is_refused():
    w, x = nn.Parameter(torch.ones(3)), torch.arange(3.0)
    with storing(AsIs):
        loss = (x.square() * w).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(ShoestringError, match=r"call loss\.backward\(\) once"):
            loss.backward()


def test_a_tensor_that_is_changed_in_place_after_it_was_kept_is_refused():
    w, x = nn.Parameter(torch.ones(3)), torch.arange(3.0)
    with storing(AsIs):
        loss = (x * w).sum()
        x.add_(1)
        with pytest.raises(ShoestringError, match=r"shape \(3,\) .* was changed in place"):
            loss.backward()


def test_a_copy_is_what_the_tensor_was_when_it_was_kept():
    w, x = nn.Parameter(torch.ones(3)), torch.arange(3.0)
    with storing(Copy):
        loss = (x * w).sum()
        x.add_(1)
        loss.backward()
    assert torch.equal(w.grad, torch.arange(3.0))


def test_a_tensor_that_two_operations_save_is_packed_once():
    shared, x = Deduplicated(), torch.randn(100)
    first, second = shared.once(x, Copy), shared.once(x.view(100), Copy)
    assert first is second
    assert Copy.made == 1


def test_a_tensor_that_changed_is_packed_again():
    shared, x = Deduplicated(), torch.zeros(100)
    first = shared.once(x, Copy)
    x.add_(1)
    assert shared.once(x, Copy) is not first


def test_a_new_tensor_in_the_place_of_one_that_died_is_packed_anew():
    shared, kept = Deduplicated(), []
    for value in range(20):  # the allocator gives the same memory again and again
        kept.append(shared.once(torch.full((1000,), float(value)), Copy))
    assert [float(k.take()[0]) for k in kept] == list(range(20))


def test_what_nobody_wants_any_more_is_forgotten():
    shared, x = Deduplicated(), torch.randn(100)
    shared.once(x, Copy)
    assert not shared._packed


ROW = torch.arange(12.0).view(3, 4)
SAVE_THEIR_OUTPUT = {
    "tanh": torch.tanh,
    "softmax": lambda x: x.softmax(-1),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "cross entropy": lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2]), reduction="none"),
    "a view of it": lambda x: x.exp().t(),
    "in place": lambda x: (x * 2).sigmoid_(),
}


@pytest.mark.parametrize("store_one", [AsIs, lambda x: OneUse(AsIs(x))], ids=["whole", "once"])
@pytest.mark.parametrize("operation", SAVE_THEIR_OUTPUT.values(), ids=list(SAVE_THEIR_OUTPUT))
def test_a_graph_that_is_dropped_before_its_backward_pass_leaves_nothing(operation, store_one):
    w, alive = nn.Parameter(torch.ones(4)), []

    def remember(tensor):
        alive.append(StorageWeakRef(tensor.untyped_storage()))
        return store_one(tensor)

    with storing(remember):
        loss = operation(ROW * w).square().sum()
    assert len(alive) > 1
    held = {StorageWeakRef(ROW.untyped_storage()).cdata, StorageWeakRef(w.untyped_storage()).cdata}
    assert any(not one.expired() for one in alive if one.cdata not in held)
    del loss
    assert all(one.expired() for one in alive if one.cdata not in held)
