"""Models without memory (on the meta device), and how they get weights, module by module."""

import hashlib
import warnings
from collections.abc import Callable
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ShoestringError


def on_meta(build: Callable[..., nn.Module], *sizes: Any) -> nn.Module:
    """`build(*sizes)` on the meta device: parameters and buffers without memory."""
    with torch.device("meta"):
        return build(*sizes)


def check_count(what: str, count: int, largest: int, least: int = 1, why: str = "") -> None:
    """Raises unless `count` is a whole number from `least` to `largest`; `why` tells why no more."""
    if not isinstance(count, int) or isinstance(count, bool) or not least <= count <= largest:
        most = f"{largest:,}, {why}" if why else f"{largest:,}"
        raise ShoestringError(f"{what} {count} is out of range: give a whole number from {least} to {most}")


def materialise(model: nn.Module, device: str | torch.device = "cpu", seed: int = 0) -> nn.Module:
    """A model on the meta device -> the same model, in place, with memory on `device` and fresh weights.

    Each module initialises its own tensors with `reset_parameters()`, or the model does with `_init_weights(module)`,
    as in transformers. The values depend only on `seed` and the module's path, so building the model in any order, or
    only a part of it, gives the same bits. A module that initialises its children as a whole, with `reset_parameters()`
    or `init_weights()`, does so last. Shared parameters stay shared: the first module to be filled fills them. Anything
    else that a constructor did to values is lost on the meta device: a warning names it.
    """
    real: dict[Tensor, Tensor] = {}
    written = {tensor: tensor._version for _, module in leaves_first(model) for _, tensor in meta_tensors(module)}
    was_meta = {path for path, module in model.named_modules() if _is_all_meta(module)}
    for path, module in leaves_first(model):
        materialise_module(module, path, device, seed, real, _own_start(model, path))
    for path, module in leaves_first(model):  # those with children only, which they may start together
        own = _own_start(model, path)
        start = partial(own, module) if own else _reset(module)
        if path in was_meta and start is not None and not (module._parameters or module._buffers):
            _run(start, path, seed)
    _check_filled(model, {real[tensor]: times for tensor, times in written.items()})
    return model


def materialise_module(
    module: nn.Module,
    path: str,
    device: str | torch.device,
    seed: int,
    real: dict[Tensor, Tensor],
    own_start: Callable[[nn.Module], Any] | None = None,
) -> None:
    """Gives the meta tensors that `module` itself owns memory on `device`, and fills them.

    `real` maps meta tensors to those that replaced them; share it between modules that share tensors. `own_start` is
    the model's initialisation of a module, run after the module's own.
    """
    owned = meta_tensors(module)
    if not owned:
        return
    reset = _reset(module)
    if reset is None and own_start is None:
        raise _cannot_fill(path, module, owned[0][0])
    for name, tensor in owned:  # by setattr, for modules that keep tensors in a second place (LSTM)
        if tensor not in real:  # a shared tensor that has its values already stays out of the reset's reach
            real[tensor] = empty_twin(tensor, device)
            setattr(module, name, real[tensor])
    if reset is not None:
        _run(reset, path, seed)
    for name, tensor in owned:
        setattr(module, name, real[tensor])
    if own_start is not None:  # of modules that share a tensor the first in the model is the last to be filled: it wins
        _run(partial(own_start, module), path, seed)


def _run(start: Callable[[], Any], path: str, seed: int) -> None:
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed_for(path, seed))
        start()


def _reset(module: nn.Module) -> Callable[[], Any] | None:
    """The method that initialises a module, if it has one that needs no arguments."""
    found = (getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters", "init_weights"))
    return next((method for method in found if callable(method) and not _required(method)), None)


def _own_start(model: nn.Module, path: str) -> Callable[[nn.Module], Any] | None:
    """The `_init_weights(module)` of the nearest module around `path`, itself included, that has one."""
    names = path.split(".") if path else []
    for end in range(len(names), -1, -1):
        method = getattr(model.get_submodule(".".join(names[:end])), "_init_weights", None)
        if callable(method) and _required(method) == 1:
            return method
    return None


def _required(method: Callable) -> int:
    """The number of required arguments."""
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return sum(p.default is Parameter.empty and p.kind in kinds for p in signature(method).parameters.values())


def _is_all_meta(module: nn.Module) -> bool:
    return all(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])


def _check_filled(model: nn.Module, written: dict[Tensor, int]) -> None:
    """Refuses a tensor that nothing filled; warns about those that the constructor wrote more often than we did.

    PyTorch counts the writes to a tensor, on the meta device too: `written` are the counts from there.
    """
    lost = []
    for path, module in model.named_modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None or tensor not in written:
                continue
            if tensor._version == 0 and tensor.numel():
                raise _cannot_fill(path, module, name)
            if written[tensor] > tensor._version:
                lost.append(f"{path}.{name}".strip("."))
    if lost:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        warnings.warn(
            f"{', '.join(lost[:3])}{more}: initialised by their layers' own reset_parameters(): what the model's "
            "constructor did to them was lost on the meta device; move it to a method init_weights(), or build the "
            "model off meta",
            stacklevel=3,
        )


def _cannot_fill(path: str, module: nn.Module, name: str) -> ShoestringError:
    where = f"module {path!r}" if path else "the model"
    return ShoestringError(
        f"{where} ({type(module).__name__}) owns {name!r} but has no"
        " reset_parameters(): add one that fills its parameters and buffers, or build the model off meta"
    )


def leaves_first(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every (path, module), children before parents, because some parents (attention) fill children."""
    return list(model.named_modules())[::-1]


def meta_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The meta parameters and buffers that `module` itself owns, by name."""
    return [
        (name, tensor)
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None and tensor.is_meta
    ]


def empty_twin(tensor: Tensor, device: str | torch.device) -> Tensor:
    """An uninitialised tensor or parameter of the same shape, type and strides on `device`."""
    twin = torch.empty_like(tensor, device=device)
    return nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin


def seed_for(path: str, seed: int) -> int:
    """The seed of the module at `path`: 63 bits that depend on both."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{path}".encode(), digest_size=8).digest(), "little") >> 1
