"""How tensors reach the compiled kernels: storage codes, layouts, and one body for a kernel and its fake."""

from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from ..errors import ShoestringError
from .core import core

# The storage types that kernels widen to FP32; the codes of csrc/vector.h.
Launch = Callable[..., None]  # runs a compiled kernel, or skips it in a trace
CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def code(x: Tensor) -> int:
    """A tensor's storage code in the compiled core."""
    return CODES[x.dtype]


def address(x: Tensor | None) -> int:
    """Where a tensor's values are; 0 for None."""
    return 0 if x is None else x.data_ptr()


def float32(x: Any) -> Any:
    """A vector of coefficients, or None, as the kernels read it: contiguous FP32."""
    if x is None or (x.dtype == torch.float32 and x.is_contiguous()):
        return x
    return x.to(torch.float32).contiguous()


def layout(x: Tensor) -> torch.memory_format:
    """The layout in which PyTorch's operators store what they make of a map: channels_last if its strides are in that
    order, gaps or not, and in no other. (One pixel is both, and may have the strides of either.)"""
    plain = x.is_contiguous() and (x.dim() < 4 or x.stride(1) != 1)
    return torch.contiguous_format if plain else suggest_memory_format(x)


def planar(x: Tensor) -> bool:
    """Whether a map's channels lie outside its pixels."""
    return layout(x) == torch.contiguous_format


def dense(x: Tensor, form: torch.memory_format | None = None) -> Tensor:
    """The tensor itself if it lies in the layout `form` (its own by default) without gaps, else a copy."""
    return x.contiguous(memory_format=layout(x) if form is None else form)


def in_memory_order(x: Tensor, form: torch.memory_format) -> Tensor:
    """A map in the layout `form` -> a view of it that is contiguous."""
    return x if form == torch.contiguous_format else x.movedim(1, -1)


def require_same(what: str, x: Tensor, **others: Tensor | None) -> None:
    """Refuses tensors whose shape or dtype differs from x's."""
    for name, other in others.items():
        if other is not None and (other.shape != x.shape or other.dtype != x.dtype):
            raise ShoestringError(
                f"{what}: {name} is {other.dtype} {tuple(other.shape)} but x {x.dtype} {tuple(x.shape)}: "
                "pass tensors of one shape and dtype"
            )


def require_dtype(what: str, **tensors: Tensor) -> None:
    """Refuses tensors that the kernel reads with one storage code and that are not of one dtype."""
    if len({tensor.dtype for tensor in tensors.values()}) > 1:
        told = ", ".join(f"{name} is {tensor.dtype}" for name, tensor in tensors.items())
        raise ShoestringError(f"{what} takes one dtype, but {told}: convert one of them")


def require_contiguous(what: str, **tensors: Tensor) -> None:
    """Refuses tensors that the kernel reads or writes from their first address on, and that have gaps."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ShoestringError(f"{what}: {name} has strides {tuple(tensor.stride())}: make it contiguous")


def require_in_place(what: str, out: Tensor) -> None:
    """Refuses an output that cannot be written where it lies."""
    if not out.is_contiguous(memory_format=layout(out)):
        raise ShoestringError(f"{what}: out has strides {tuple(out.stride())}, with gaps: pass None or a dense tensor")


class Forms(TypedDict):
    """An op's implementations, as `define` takes them."""

    reference: Callable
    compiled: Callable
    fake: Callable
    body: Callable


def forms(body: Callable, reference: Callable) -> Forms:
    """A kernel's body, written once, and its reference implementation -> what `define` takes.

    `body(launch, *args)` allocates outputs and scratch and ends in launch(kernel, ...), where tensors stand
    for their addresses. The compiled form runs the kernel there and the fake does not, so both allocate the
    same bytes. Tensors that the core does not read (FP64, or another device's) take the reference in both.
    """

    def compiled(*args: Any) -> Any:
        return body(_run, *args) if suits(args) else reference(*args)

    def fake(*args: Any) -> Any:
        return body(_skip, *args) if suits(args) else reference(*args)

    return {"reference": reference, "compiled": compiled, "fake": fake, "body": body}


def suits(args: Sequence[Any]) -> bool:  # a plain loop: a lean step asks thousands of times
    """Whether the core reads these arguments of a kernel."""
    for a in args:
        if isinstance(a, Tensor) and (a.dtype == torch.float64 or not a.is_cpu):
            return False
    return core is not None


def _run(kernel: Callable, *args: Any) -> None:
    kernel(*[0 if a is None else a.data_ptr() if isinstance(a, Tensor) else a for a in args])


def _skip(kernel: Callable, *args: Any) -> None:
    pass
