"""Models without memory (on the meta device), and from there to ones with weights, module by module."""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ShoestringError


def on_meta(build: Callable[..., nn.Module], *sizes: Any) -> nn.Module:
    """`build(*sizes)` without memory for its parameters and buffers."""
    with torch.device("meta"):
        return build(*sizes)


def check_count(what: str, count: int, largest: int, least: int = 1) -> None:
    """Raises unless `count` is a whole number from `least` to `largest`."""
    if not isinstance(count, int) or isinstance(count, bool) or not least <= count <= largest:
        raise ShoestringError(
            f"{what} {count} is out of range: give a whole number from {least} to {largest:,}"
        )


def materialise(model: nn.Module, device: str | torch.device = "cpu", seed: int = 0) -> nn.Module:
    """A model on the meta device -> the same model, in place, with memory on `device` and fresh weights.

    Each module's weights depend on `seed` and the module's path alone, so building the model in any order, or
    only a part of it, gives the same bits. Parameters that modules share stay shared: the first module to be
    filled fills them.
    """
    real: dict[Tensor, Tensor] = {}
    for path, module in leaves_first(model):
        materialise_module(module, path, device, seed, real)
    return model


def materialise_module(
    module: nn.Module, path: str, device: str | torch.device, seed: int, real: dict[Tensor, Tensor]
) -> None:
    """Gives the meta tensors that `module` itself owns memory on `device`, and fills them.

    `real` maps meta tensors to those that took their place; share it between modules that share tensors.
    """
    owned = meta_tensors(module)
    if not owned:
        return
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is None:
        where = f"module {path!r}" if path else "the model"
        raise ShoestringError(
            f"{where} ({type(module).__name__}) owns {owned[0][0]!r} but has no"
            " reset_parameters(): add one that fills its parameters and buffers, or build the model off meta"
        )
    for name, tensor in owned:  # by setattr, for modules that keep tensors in a second place (LSTM)
        if tensor not in real:  # a shared tensor that has its values already stays out of the reset's reach
            real[tensor] = empty_twin(tensor, device)
            setattr(module, name, real[tensor])
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed_for(path, seed))
        reset()
    for name, tensor in owned:
        setattr(module, name, real[tensor])


def leaves_first(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every (path, module), children before parents, since some parents (attention) fill children."""
    return list(model.named_modules())[::-1]


def meta_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters and buffers on meta that `module` itself owns, by name."""
    return [
        (name, tensor)
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None and tensor.is_meta
    ]


def empty_twin(tensor: Tensor, device: str | torch.device) -> Tensor:
    """A tensor or parameter of the same shape, type and strides on `device`, its values not yet set."""
    twin = torch.empty_like(tensor, device=device)
    return nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin


def seed_for(path: str, seed: int) -> int:
    """The seed of the module at `path`: 63 bits that depend on both."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{path}".encode(), digest_size=8).digest(), "little") >> 1
