"""The state that a run needs in order to continue as if it had never stopped: plain data and tensors.

Anything with `state()` and `restore(state)` takes part; a state is built of dicts, lists, tuples, tensors, numbers,
strings and None. `pack` separates the tensors from the rest, which is JSON; `unpack` joins them.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..distributed import empty_shard, is_sharded, local, whole
from ..errors import ShoestringError
from ..finite import statistics_of
from ..task import Task
from .tensorfile import TensorFile, as_bytes, pieces


class Stateful(Protocol):
    """A part of a run that changes during training, such as a loss scale or the generator that draws masks."""

    def state(self) -> Any:
        """-> what `restore` needs; tensors may be the live ones, because they are written at once."""
        ...

    def restore(self, state: Any) -> None: ...


# -- states as JSON and tensors ---------------------------------------------------------------------------
def pack(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """A state -> the same as JSON, in which tensors are replaced by their names, and the tensors by name.

    >>> pack({"step": 3, "mean": torch.zeros(2)})
    ({'step': 3, 'mean': {'$tensor': 'mean'}}, {'mean': tensor([0., 0.])})
    """
    tensors: dict[str, Tensor] = {}
    return _packed(state, "", tensors), tensors


def _packed(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    def inside(key: Any, part: Any) -> Any:
        return _packed(part, f"{path}.{key}" if path else str(key), tensors)

    if isinstance(value, Tensor):
        while path in tensors:  # {"a": {"b": ...}, "a.b": ...}
            path += "'"
        tensors[path] = value
        return {"$tensor": path} | _layout(value)
    if isinstance(value, dict):
        plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        parts = [[key, inside(key, part)] for key, part in value.items()]
        return dict(parts) if plain else {"$items": parts}
    if isinstance(value, tuple):
        return {"$tuple": [inside(key, part) for key, part in enumerate(value)]}
    if isinstance(value, list):
        return [inside(key, part) for key, part in enumerate(value)]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise ShoestringError(
        f"{path or 'a state'} cannot be saved: a {type(value).__name__} is neither a tensor nor plain data; "
        "turn it into numbers, strings, lists or dicts in state()"
    )


def _layout(tensor: Tensor) -> dict[str, Any]:
    """Strides and device, recorded only if not contiguous or not CPU: safetensors does not store them; and whether
    each process has only its rows."""
    record: dict[str, Any] = {}
    if not tensor.is_contiguous():
        record["strides"] = list(tensor.stride())
    if tensor.device.type != "cpu":
        record["device"] = str(tensor.device)
    if is_sharded(tensor):
        record["sharded"] = True
    return record


def unpack(packed: Any, file: TensorFile | None, live: Any = None) -> Any:
    """The JSON of a state, and the file of its tensors -> the state.

    `live` is a state of the same structure: its tensors are filled in place wherever type and shape agree.
    """

    def inside(part: Any, key: Any) -> Any:
        return unpack(part, file, _part(live, key))

    if isinstance(packed, list):
        return [inside(part, key) for key, part in enumerate(packed)]
    if not isinstance(packed, dict):
        return packed
    if "$tensor" in packed:
        assert file is not None, "a state with tensors has a file: manifest.py"
        return _read(file, packed, live)
    if "$tuple" in packed:
        return tuple(inside(part, key) for key, part in enumerate(packed["$tuple"]))
    items = packed["$items"] if "$items" in packed else packed.items()
    return {key: inside(part, key) for key, part in items}


def _part(live: Any, key: Any) -> Any:
    try:
        return live[key]
    except (KeyError, IndexError, TypeError):
        return None


def _read(file: TensorFile, packed: dict[str, Any], live: Any) -> Tensor:
    name = packed["$tensor"]
    entry = file.entries[name]
    fits = isinstance(live, Tensor) and (live.dtype, tuple(live.shape)) == (entry.dtype, entry.shape)
    if fits:
        tensor = live
    elif "sharded" in packed:
        tensor = empty_shard(entry.shape, entry.dtype)
    elif "strides" in packed:
        tensor = torch.empty_strided(entry.shape, packed["strides"], dtype=entry.dtype)
    else:
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
    if not fits and "device" in packed:
        tensor = tensor.to(packed["device"])
    file.read_into(name, tensor)
    return tensor


# -- the parts that every run has -------------------------------------------------------------------------
def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, including buffers that state_dict() leaves out; shared ones once."""
    return dict(chain(model.named_parameters(), model.named_buffers()))


def aliases(model: nn.Module) -> tuple[dict[str, str], list[str]]:
    """A model -> the names that its plain state_dict() has for tensors that are held twice, each with the name under
    which a save has it; and the buffers that state_dict() leaves out."""
    first: dict[int, str] = {}
    tied, unsaved = {}, []
    for path, module in model.named_modules(remove_duplicate=False):
        dense = getattr(module, "dense_parameters", {})
        for own, tensor in chain(module._parameters.items(), module._buffers.items()):
            name = f"{path}.{dense[own][0] if own in dense else own}".lstrip(".")
            if own in module._non_persistent_buffers_set:
                unsaved.append(name)
            elif tensor is not None and first.setdefault(id(tensor), name) != name:
                tied[name] = first[id(tensor)]
    return tied, unsaved


def fingerprint(model: nn.Module) -> str:
    """A model before training -> SHA-256 of the names, types and shapes of its tensors.

    If a module has extra state, which is saved with it, its tensors may have different shapes each time it is built, as
    those of sparse layers do: only their names and types count.
    """
    modules = [(path, _tensors_of(module)) for path, module in model.named_modules()]
    return hashlib.sha256(json.dumps(modules).encode()).hexdigest()


def run_id(model: nn.Module, settings: Mapping[str, Any], data: str) -> str:
    """What a run begins with -> SHA-256 of its settings, its data's fingerprint and every bit of its weights.

    Runs of the same id end in the same bits, so equal runs still leave equal saves.
    """
    digest = hashlib.sha256(json.dumps([settings, data], sort_keys=True).encode())
    for tensor in model_tensors(model).values():
        for piece in pieces(whole(tensor.detach())):
            digest.update(as_bytes(piece.cpu().contiguous()))
    return digest.hexdigest()


def _tensors_of(module: nn.Module) -> list[Any]:
    own = chain(module._parameters.items(), module._buffers.items())
    fixed = not has_extra_state(module)
    return [(name, str(t.dtype), list(t.shape) if fixed else None) for name, t in own if t is not None]


def has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


@dataclass(frozen=True)
class ExtraState:
    """A module's extra state: what PyTorch saves besides its tensors (`get_extra_state`)."""

    module: nn.Module

    def state(self) -> Any:
        return self.module.get_extra_state()

    def restore(self, state: Any) -> None:
        self.module.set_extra_state(state)


def first_poisoned(model: nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    """What is no longer finite and must not be saved, in words; checked chunk by chunk. Buffers may hold infinities, as
    masks do, except batch-norm statistics."""
    states = (value for state in optimizer.state.values() for value in state.values())
    kinds = {
        "the weights are": model.parameters(),
        "the optimizer's state is": (value for value in states if isinstance(value, Tensor)),
        "the statistics of batch norm are": statistics_of(model),
    }
    return next((words for words, tensors in kinds.items() if not all(map(_is_finite, tensors))), None)


def _is_finite(tensor: Tensor) -> bool:
    return all(bool(torch.isfinite(piece).all()) for piece in pieces(local(tensor.detach())))


@dataclass(frozen=True)
class ModelState:
    """The model's tensors; restored in place."""

    model: nn.Module

    def state(self) -> dict[str, Tensor]:
        return model_tensors(self.model)

    def restore(self, state: dict[str, Tensor]) -> None:
        """Tensors whose size changed in training (those of sparse layers) take the saved ones' memory."""
        for name, tensor in model_tensors(self.model).items():
            if state[name] is not tensor:
                tensor.data = state[name].to(tensor.device)


@dataclass(frozen=True)
class OptimizerState:
    """The optimizer's state per parameter, and its settings per group of parameters.

    PyTorch's load_state_dict would cast the state to the parameter's type, so it is not used; an optimizer that
    overrides it is restored by its own.
    """

    optimizer: torch.optim.Optimizer

    def state(self) -> dict[str, Any]:
        if self._has_its_own():
            return {"own": self.optimizer.state_dict()}
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        parts = enumerate(map(self.optimizer.state.get, self._parameters()))
        return {"state": {index: part for index, part in parts if part}, "groups": groups}

    def restore(self, state: dict[str, Any]) -> None:
        if self._has_its_own():
            return self.optimizer.load_state_dict(state["own"])
        for index, parameter in enumerate(self._parameters()):
            self.optimizer.state[parameter] = state["state"].get(index, {})
        for group, saved in zip(self.optimizer.param_groups, state["groups"], strict=True):
            group.update(saved)

    def _has_its_own(self) -> bool:
        return type(self.optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]


def find_stateful(task: Task) -> dict[str, Stateful]:
    """The parts of a task that have state: contexts, hooks, the split, the loss, modules."""
    parts: dict[str, Any] = {f"context{number}": context for number, context in enumerate(task.contexts)}
    parts |= {f"after_update{number}": hook for number, hook in enumerate(task.after_update)}
    parts |= {"split": task.split, "loss": task.loss}
    parts |= {f"module {name}": module for name, module in task.model.named_modules()}
    extra = {f"extra {name}": m for name, m in task.model.named_modules() if has_extra_state(m)}
    found = {name: part for name, part in parts.items() if _is_stateful(part)}
    return found | {name: ExtraState(module) for name, module in extra.items()}


def _is_stateful(part: Any) -> bool:
    return callable(getattr(part, "state", None)) and callable(getattr(part, "restore", None))


@dataclass(frozen=True)
class Parts:
    """Several parts by name, saved and restored as one."""

    parts: Mapping[str, Stateful]

    def state(self) -> dict[str, Any]:
        return {name: part.state() for name, part in self.parts.items()}

    def restore(self, state: dict[str, Any]) -> None:
        for name, part in self.parts.items():
            part.restore(state[name])
