"""A call of a kernel with all done beforehand that depends on shapes alone, for calls that are made again and again.

A kernel's body checks, looks up its plan, allocates outputs and scratch, and launches. For tensors of the same shapes
that is the same each time but for addresses, and takes longer than many a kernel on a small microbatch.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .calls import suits
from .define import body_of

_aten = torch.ops.aten
# The operators that make a tensor and write nothing into it.
ALLOCATIONS = {_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default,
               _aten.empty_strided.default, _aten.new_empty_strided.default}  # fmt: skip


def prepare(op: Any, args: Sequence[Any]) -> Callable | None:
    """An op of ours and its arguments -> a function of such arguments that does the same, in as many threads as now;
    None if its body does more than to allocate and to launch one kernel, or is not what runs."""
    body = body_of(op)
    if body is None or not suits(args):
        return None
    blanks = [_blank(arg) if isinstance(arg, Tensor) else arg for arg in args]
    with _Allocations() as seen:
        launches: list[tuple] = []
        result = body(lambda *call: launches.append(call), *blanks)
    if seen.more or len(launches) != 1:
        return None
    return _prepared(launches[0], blanks, seen.made, result)


def _blank(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


class _Allocations(TorchDispatchMode):
    """The tensors that a body makes, and whether it calls any other operator."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []
        self.more = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in ALLOCATIONS:
            self.made.append(result)
        else:
            self.more |= not func.is_view  # a body may look at a part of a tensor
        return result


def _prepared(launch: tuple, given: list[Any], made: list[Tensor], result: Any) -> Callable | None:
    """The one launch of a body, with the body's arguments, allocations and result -> what `prepare` gives."""
    kernel, *template = launch
    read: list[tuple[int, int]] = []  # the number of an argument, and its place in the launch
    makes: list[tuple] = []  # the form of a tensor, and its place
    tensors = [(place, value) for place, value in enumerate(template) if isinstance(value, Tensor)]
    used = [value for _, value in tensors if _index(made, value) is not None]
    for place, value in tensors:
        if (number := _index(given, value)) is not None:
            read.append((number, place))
        elif _index(used, value) is not None:
            makes.append((tuple(value.shape), tuple(value.stride()), value.dtype, place))
        else:
            return None
    returned = [_index(used, one) for one in (result if isinstance(result, tuple) else (result,)) if one is not None]
    if None in returned:
        return None
    template = [0 if value is None or isinstance(value, Tensor) else value for value in template]
    return _function(kernel, template, read, makes, cast(list[int], returned))


def _index(tensors: Sequence[Any], wanted: Tensor) -> int | None:
    """Which of them begins where `wanted` does: PyTorch may make other objects of a tensor."""
    key = wanted.untyped_storage()._cdata if wanted.storage_offset() == 0 else None
    same = (isinstance(one, Tensor) and one.untyped_storage()._cdata == key for one in tensors)
    return next((number for number, is_same in enumerate(same) if is_same), None)


def _function(
    kernel: Callable, template: list[Any], read: list[tuple[int, int]], makes: list[tuple], returned: list[int]
) -> Callable:
    empty, first = torch.empty_strided, returned[0] if len(returned) == 1 else None

    def call(*args: Any) -> Any:
        values, made = template.copy(), []
        for number, place in read:
            values[place] = args[number].data_ptr()
        for shape, stride, dtype, place in makes:
            tensor = empty(shape, stride, dtype=dtype)
            made.append(tensor)
            values[place] = tensor.data_ptr()
        kernel(*values)
        return made[first] if first is not None else [made[number] for number in returned] if returned else None

    return call
