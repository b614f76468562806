"""Signature: one call of an operator as plain data, the key under which its measured scratch is looked up.

The profiler makes signatures from fake tensors and a calibration runs them with real ones; neither imports
the other. Only what determines an operator's scratch is recorded: a tensor's shape, strides and type, not its values.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MakeTensor = Callable[[list[int], list[int], torch.dtype], Any]
_NAMED = {
    "dtype": torch.dtype,
    "device": torch.device,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


@dataclass(frozen=True)
class Signature:
    """An operator's name, such as "aten.convolution.default", and its arguments as canonical JSON.

    Text, not nested tuples: to Python `True == 1 == 1.0`, to an operator they are three different arguments.
    `str(signature)` is the key of a workspace table.
    """

    op: str
    arguments: str

    def __str__(self) -> str:
        return f"{self.op} {self.arguments}"

    def to_json(self) -> dict[str, Any]:
        """-> {"op": ..., "args": [...], "kwargs": {...}}; a tensor is {"shape", "stride", "dtype"}."""
        return {"op": self.op, **json.loads(self.arguments)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Signature":
        return cls(record["op"], _text(record.get("args", []), record.get("kwargs", {})))

    def function(self) -> Any:
        """The operator itself; ValueError if this torch has none of that name."""
        function: Any = torch.ops
        for part in self.op.split("."):
            function = getattr(function, part, None)
        if not isinstance(function, torch._ops.OpOverload):
            raise ValueError(f"torch has no operator called {self.op!r}")
        return function

    def call_arguments(self, make_tensor: MakeTensor) -> tuple[list[Any], dict[str, Any]]:
        """-> args and kwargs for the operator, each tensor made by `make_tensor(shape, stride, dtype)`.

        ValueError if an argument could not be recorded as data.
        """
        record = json.loads(self.arguments)
        kwargs = {name: _decode(value, make_tensor) for name, value in record["kwargs"].items()}
        return [_decode(value, make_tensor) for value in record["args"]], kwargs


class Bound(int):
    """A number in a table that was not measured but bounded: the call could not be run here, and needs at most this."""


def output_key(signature: Signature, number: int) -> str:
    """The key of a table's entry for a flat output whose size only the library knows: its number of elements.

    PyTorch's fakes leave such an output empty: the workspace that oneDNN's LSTM keeps for its backward pass.
    """
    return f"output {number} of {signature}"


def call_of(key: str) -> str:
    """A key of a table -> the key of the call that it belongs to.

    >>> call_of(output_key(Signature("aten.relu.default", "{}"), 3))
    'aten.relu.default {}'
    """
    return key.split(" of ", 1)[1] if key.startswith("output ") else key


def signature_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Signature:
    """An operator (or its name) and the arguments it was called with, real or fake -> its signature.

    >>> signature_of(torch.ops.aten.relu.default, [torch.empty(2, 3)]).to_json()["args"]
    [{'dtype': 'float32', 'shape': [2, 3], 'stride': [3, 1]}]
    """
    encoded = {name: _encode(value) for name, value in (kwargs or {}).items()}
    return Signature(str(func), _text([_encode(value) for value in args], encoded))


def _text(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    return json.dumps({"args": args, "kwargs": kwargs}, sort_keys=True, separators=(",", ":"))


def _encode(value: Any) -> Any:
    if isinstance(value, Tensor) and value.layout == torch.strided:
        return {"shape": list(value.shape), "stride": list(value.stride()), "dtype": _name(value.dtype)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    for kind, type_ in _NAMED.items():
        if isinstance(value, type_):
            return {kind: _name(value)}
    if isinstance(value, Tensor) and value.layout == torch.sparse_coo:
        held = value._indices(), value._values()
        return {"unknown": "sparse tensor", "bytes": sum(part.numel() * part.itemsize for part in held)}
    return {"unknown": type(value).__name__}


def _decode(value: Any, make_tensor: MakeTensor) -> Any:
    if isinstance(value, list):
        return [_decode(item, make_tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if "shape" in value:
        return make_tensor(value["shape"], value["stride"], _named("dtype", value["dtype"]))
    if "unknown" in value:
        raise ValueError(f"an argument of type {value['unknown']} cannot be made from a signature")
    kind, name = next(iter(value.items()))
    return torch.device(name) if kind == "device" else _named(kind, name)


def _name(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _named(kind: str, name: str) -> Any:
    value = getattr(torch, name, None)
    if not isinstance(value, _NAMED[kind]):
        raise ValueError(f"torch has no {kind} called {name!r}")
    return value
