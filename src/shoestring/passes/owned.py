"""Gradients that a backward function may write its result into, because nobody else can see them.

Autograd hands a function the gradient of its output. It may belong to others too: to the other branch of a sum, to a
hook of the user's that kept it or a view of it, to `autograd.grad`. All of them count as references: to the tensor in
Python, to it in C++, or to its storage. If there are only those of a gradient on its way from one node to the next,
which are counted once on such a gradient, the function holds the last one.
"""

import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes

RUNS = 20  # the interpreter may call a function in another way once it has called it often


class References(NamedTuple):
    """How many there are to a tensor from Python and from C++, and to its storage."""

    python: int
    native: int
    storage: int


Backward = Callable[[Any, Tensor, Any], Any]


def told_if_owned(backward: Backward) -> Any:
    """`backward(ctx, grad, owned)` -> the backward of a function with one output; `owned`: it may write into `grad`."""
    return _counted(lambda ctx, grad, found: backward(ctx, grad, _are(found, usual_references()) and _is_dense(grad)))


def is_owned(tensor: Tensor) -> bool:
    """Whether the variable that a caller passes is the only reference to a tensor and to its values."""
    return _are(_references(tensor), _lone_references())


@cache
def _lone_references() -> References | None:
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        lone = torch.empty(1)
        return _told(lone)


def _told(tensor: Tensor) -> References | None:
    """The references to a caller's variable, by the same calls as in `is_owned`."""
    return _references(tensor)


def _are(found: References | None, wanted: References | None) -> bool:
    """Whether references are known, and these."""
    return found is not None and found == wanted


def _counted(backward: Backward) -> Any:
    """`backward(ctx, grad, references to grad)` -> the backward of a function; always by the same calls."""

    @once_differentiable
    def counted(ctx: Any, grad: Tensor) -> Any:
        return backward(ctx, grad, _references(grad))

    return counted


def _references(tensor: Tensor) -> References | None:
    if not hasattr(tensor, "_use_count"):  # an older PyTorch: nothing is known to be owned
        return None
    storage = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return References(sys.getrefcount(tensor), tensor._use_count(), storage)


def _is_dense(tensor: Tensor) -> bool:
    """Whether each element has a place of its own: an expanded tensor cannot be written to."""
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


class _Noting(torch.autograd.Function):
    """x times 1; its backward notes the references to a gradient that nobody else holds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, noted: list[References]) -> Tensor:
        ctx.noted = noted
        return x.clone()

    @staticmethod
    @_counted
    def backward(ctx: Any, grad: Tensor, found: References) -> Any:
        ctx.noted.append(found)
        return None, None


@cache
def usual_references() -> References | None:
    """Those of a gradient that nobody else holds; the fewest that were seen. Called before a pass: it makes passes."""
    noted: list[References] = []
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(1, requires_grad=True)
        for _ in range(RUNS):
            _Noting.apply(x, noted).mul(2).sum().backward()
    return min(noted) if None not in noted else None
