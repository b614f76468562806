"""Calls of kernels that were prepared do what the ops do, from tensors of the same shapes."""

import fuzz
import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shoestring.kernels import conv, norm
from shoestring.kernels.core import core
from shoestring.kernels.prepared import prepare
from shoestring.measuring.counted import is_available, measure_counted

pytestmark = pytest.mark.skipif(core is None, reason="the reference implementations are not prepared")
ops = torch.ops.shoestring
assert conv and norm, "which define the ops"


def made(seed: int = 0) -> dict[str, tuple]:
    """Ops of each kind, one that returns a tensor, several, or nothing, and arguments for them."""
    generator = torch.Generator().manual_seed(seed)
    maps = [torch.randn(2, 8, 6, 6, generator=generator) for _ in range(3)]
    vectors = [torch.rand(8, generator=generator) + 0.5 for _ in range(4)]
    weight, pair = torch.randn(8, 8, 3, 3, generator=generator), [1, 1]
    return {
        "statistics": (ops.batch_norm_statistics.default, maps[0]),
        "fold": (ops.batch_norm_fold.default, *vectors),
        "learn": (ops.batch_norm_learn.default, *vectors, 0.1, 1e-5, 72),
        "backward": (ops.batch_norm_backward.default, *maps, *vectors, True, None, None, 72),
        "convolution": (
            ops.conv_forward.default, *maps[:2], weight, None, pair, pair, pair, 1, *vectors[:2], True, 400_000,
        ),
    }  # fmt: skip


def copies(args: tuple) -> list:
    return [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]


@pytest.mark.parametrize("kind", made())
def test_a_prepared_call_gives_and_changes_what_the_op_does(kind):
    op, *args = made()[kind]
    call = prepare(op, args)
    assert call is not None
    op, *others = made(1)[kind]  # other values of the same shapes
    ours, plain = copies(others), copies(others)
    found, expected = (pytree.tree_leaves([one(*given), given]) for one, given in ((call, ours), (op, plain)))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) if isinstance(other, torch.Tensor) else one == other


class Both(TorchDispatchMode):
    """Does each call of a kernel a second time, prepared, on copies; the two must leave the same."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        call, twins = prepare(func, args), copies(args)
        is_like = [t.stride() for t in twins if isinstance(t, torch.Tensor)] == [
            t.stride() for t in args if isinstance(t, torch.Tensor)
        ]
        result = func(*args, **(kwargs or {}))
        if call is not None and is_like:
            self.prepared += 1
            found, expected = pytree.tree_leaves([call(*twins), twins]), pytree.tree_leaves([result, args])
            for one, other in zip(found, expected, strict=True):
                if isinstance(other, torch.Tensor):
                    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        return result


@pytest.mark.parametrize("family", fuzz.FAMILIES)
def test_random_calls_that_are_prepared_give_the_same_bits(family):
    with Both() as both:
        for number in range(12):
            fuzz.check(family, number, fences=False)
    assert both.prepared or family in ("index", "gradients", "linear", "update")  # of several launches, or not by forms


def test_what_a_body_copies_is_left_to_it():
    op, *args = made()["convolution"]
    args[1] = args[1].transpose(2, 3)  # has to be made contiguous first
    assert prepare(op, args) is None


@pytest.mark.parametrize("kind", ["double", "pytorch"])
def test_what_the_core_does_not_run_is_not_prepared(kind):
    op, *args = made()["statistics"]
    assert prepare(*((op, [args[0].double()]) if kind == "double" else (torch.ops.aten.relu.default, args))) is None


@pytest.mark.skipif(not is_available(), reason="torch's allocator cannot be counted here")
def test_a_prepared_call_allocates_what_the_op_allocates():
    op, *args = made()["convolution"]
    call = prepare(op, args)
    assert measure_counted(lambda: call(*args)).peak_bytes == measure_counted(lambda: op(*args)).peak_bytes > 0
