"""How a dense layer's weights start, written down so that a sparse one can start the same at its nonzeros only.

The layer's own `reset_parameters` runs on fake tensors, and what it does to each is recorded: ("normal_", (0.0,
0.08)), say. Done to a tensor of another size it draws from the same distribution, element by element.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ...errors import ShoestringError

Step = tuple[str, tuple[Any, ...]]  # the name of a tensor's method, and its arguments


def record_reset(module: nn.Module, name: str) -> dict[str, tuple[Step, ...]]:
    """A dense layer -> for each of its parameters, the steps that fill it. `name` is for error messages."""
    twin = copy.copy(module)
    with FakeTensorMode():  # not meta: on it, PyTorch's initialisers do nothing where they need values
        fakes = {key: nn.Parameter(torch.empty(p.shape, dtype=p.dtype)) for key, p in _parameters(module).items()}
        vars(twin)["_parameters"] = dict(module._parameters) | fakes
        recorder = _FillRecorder(name, fakes)
        try:
            with torch.no_grad(), recorder:
                twin.reset_parameters()  # type: ignore[operator]
        except DataDependentOutputException as error:
            raise _refusal(name) from error
    return {key: tuple(steps) for key, steps in recorder.steps.items()}


def fill(tensor: Tensor, steps: Sequence[Step]) -> None:
    """Does the steps to a tensor of any size."""
    with torch.no_grad():
        for method, arguments in steps:
            getattr(tensor, method)(*arguments)


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {key: parameter for key, parameter in module._parameters.items() if parameter is not None}


class _FillRecorder(TorchDispatchMode):
    def __init__(self, name: str, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self.name, self.parameters = name, parameters
        self.steps: dict[str, list[Step]] = {key: [] for key in parameters}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            self._record(func._schema.name.split("::")[1], args)
        return out

    def _record(self, method: str, args: tuple) -> None:
        target, arguments = args[0], args[1:]
        for key, parameter in self.parameters.items():
            if not _share(target, parameter):
                continue
            if target.numel() == parameter.numel() and not any(isinstance(a, Tensor) for a in arguments):
                self.steps[key].append((method, arguments))
            elif not _is_zeroed_row(method, arguments):
                raise _refusal(self.name)


def _refusal(name: str) -> ShoestringError:
    return ShoestringError(
        f"the first values of {name} cannot be drawn one by one, and so not at its nonzeros alone: "
        "build the model off the meta device, or leave the layer out"
    )


def _share(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _is_zeroed_row(method: str, arguments: tuple) -> bool:
    """The row of an embedding's padding: a sparse one never has nonzeros there."""
    return method == "zero_" or (method == "fill_" and arguments == (0,))
