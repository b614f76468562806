"""The boundary of a model in 16 bits: whatever module of it is called, inside a step or not, takes and gives FP32.

A module is called from outside if no other of its model's is running: the model itself, or its encoder if a loss calls
that. Its floating inputs become 16 bits. Its outputs become FP32 if FP32 came in, or ids alone; a layer that is given
16 bits, or an embedding, answers in 16 bits: it is one of those that a method of the model calls one by one. Inside, a
layer takes what its weights are, for a model may make FP32 tensors of its own (timesteps, noise) on the way.

These are hooks that stay with the model, so that it can be called, copied and saved like any other.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ambient import Ambient
from ..structure import mapped, tensors


class Layer(nn.Module):
    """A layer of our own: its floating inputs are cast to the dtype of its weights, as those of PyTorch's layers."""


LAYERS = (
    nn.Linear, nn.modules.conv._ConvNd, nn.Bilinear, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, Layer,
)  # fmt: skip


class OutsideCall(NamedTuple):
    """The call from outside that is running: of which module, how deep in itself, and whether it answers in FP32."""

    module: nn.Module
    depth: int
    widens: bool


@dataclass(frozen=True)
class CastInputs:
    """A forward pre-hook: floating inputs become `dtype` at the boundary, and where a layer needs it."""

    dtype: torch.dtype
    is_model: bool

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        call = Ambient.now().outside_call
        if call is not None and call.module is module:
            Ambient.change(outside_call=call._replace(depth=call.depth + 1))
        if call is None and not is_backward():
            Ambient.change(outside_call=OutsideCall(module, 0, self._widens(module, (args, kwargs))))
            return cast((args, kwargs), self.dtype)
        return cast((args, kwargs), self.dtype) if isinstance(module, LAYERS) else None

    def _widens(self, module: nn.Module, given: Any) -> bool:
        types = {tensor.dtype for tensor in tensors(given) if is_floating(tensor)}
        is_layer = next(module.children(), None) is None
        return self.is_model or bool(types - {self.dtype}) or not (types or is_layer)


@dataclass(frozen=True)
class CastOutputs:
    """A forward hook, called whatever was raised: the call from outside ends."""

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> Any:
        call = Ambient.now().outside_call
        if call is None or call.module is not module:
            return None
        Ambient.change(outside_call=call._replace(depth=call.depth - 1) if call.depth else None)
        return cast(output, torch.float32) if call.widens and not call.depth else None


def bound(model: nn.Module, dtype: torch.dtype) -> None:
    """Gives each module of a model in `dtype` its boundary; one that has it from an earlier plan gets the new one."""
    release(model)
    for module in model.modules():
        module.register_forward_pre_hook(CastInputs(dtype, module is model), with_kwargs=True)
        module.register_forward_hook(CastOutputs(), always_call=True)


def release(model: nn.Module) -> None:
    """Takes the boundary away."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for number in [number for number, hook in hooks.items() if isinstance(hook, CastInputs | CastOutputs)]:
                del hooks[number]


def move_boundary(old: nn.Module, new: nn.Module) -> None:
    """Gives a layer that takes another's place that one's boundary; its other hooks, too, if it has any."""
    vars(new).update({name: hooks for name, hooks in vars(old).items() if name.startswith("_forward_")})


def hooks_of_others(module: nn.Module) -> bool:
    """Whether a module has hooks beside those of a boundary."""
    homes = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(not isinstance(hook, CastInputs | CastOutputs) for hooks in homes for hook in hooks.values())


def is_backward() -> bool:
    """Whether a backward pass is running: a module that is called there belongs to a call that has ended."""
    return torch._C._current_autograd_node() is not None


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """Floating tensors of any structure -> the same in `dtype`. Those that are so already are not touched: the
    placeholder of a fused norm would be made real by any call."""
    return mapped(lambda leaf: leaf.to(dtype) if is_floating(leaf) and leaf.dtype != dtype else leaf, tree)


def is_floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype.is_floating_point
