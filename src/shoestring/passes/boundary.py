"""The boundary of a 16-bit model: whichever of its modules is called, inside a step or not, takes and returns FP32.

A module is called from outside if no other module of its model is running: the model itself, or its encoder if a loss
calls that. Its floating inputs are cast to 16 bits. Its outputs are cast to FP32 if FP32 came in, or ids alone; a layer
that is given 16 bits, or an embedding, returns 16 bits: a method of the model is calling its layers one by one. Inside
the model, a layer's inputs are cast to the dtype of its weights, because a model may make FP32 tensors of its own
(timesteps, noise) on the way.

These hooks stay with the model, so that it can be called, copied and saved like any other.
"""

import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ambient import Ambient
from ..structure import mapped, tensors


class Layer(nn.Module):
    """A layer of our own: its floating inputs are cast to the dtype of its weights, like those of PyTorch's layers."""


LAYERS = (
    nn.Linear, nn.modules.conv._ConvNd, nn.Bilinear, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, Layer,
)  # fmt: skip


class OutsideCall(NamedTuple):
    """The call from outside that is running: of which module, how deep in itself, and whether it returns FP32."""

    module: nn.Module
    depth: int
    widens: bool


@dataclass(frozen=True)
class CastInputs:
    """A forward pre-hook: casts floating inputs to `dtype` at the boundary, and wherever a layer needs it."""

    dtype: torch.dtype
    is_model: bool

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        call = Ambient.now().outside_call
        if call is not None and (self.is_model or call.module is module) and not _is_running(call, module):
            call = None
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
    """A forward hook, called even after an exception: ends the call from outside, and casts its outputs."""

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> Any:
        call = Ambient.now().outside_call
        if call is None or call.module is not module:
            return None
        Ambient.change(outside_call=call._replace(depth=call.depth - 1) if call.depth else None)
        return cast(output, torch.float32) if call.widens and not call.depth else None


def _is_running(call: OutsideCall, called: nn.Module) -> bool:
    """Whether a call from outside has not ended: after Ctrl-C, which is no Exception, PyTorch calls no hook. Asked when
    a module calls itself, or a model is called in another call: seldom, for looking through the stack takes time."""
    frame, found = sys._getframe(), 0
    while frame := frame.f_back:  # type: ignore[assignment]
        found += frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals["self"] is call.module
    return found > call.depth + (called is call.module)


def bound(model: nn.Module, dtype: torch.dtype) -> None:
    """Registers the hooks on each module of a model in `dtype`, in place of those of an earlier plan."""
    release(model)
    for module in model.modules():
        module.register_forward_pre_hook(CastInputs(dtype, module is model), with_kwargs=True)
        module.register_forward_hook(CastOutputs(), always_call=True)


def boundary_dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype of a model that has these hooks; None if it has none."""
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    return next((hook.dtype for hook in hooks if isinstance(hook, CastInputs)), None)


def release(model: nn.Module) -> None:
    """Removes the hooks."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for number in [number for number, hook in hooks.items() if isinstance(hook, CastInputs | CastOutputs)]:
                del hooks[number]


def move_boundary(old: nn.Module, new: nn.Module) -> None:
    """Moves the hooks, the boundary's and any others, to the layer that replaces another."""
    vars(new).update({name: hooks for name, hooks in vars(old).items() if name.startswith("_forward_")})


def hooks_of_others(module: nn.Module) -> bool:
    """Whether a module has hooks other than the boundary's."""
    homes = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(not isinstance(hook, CastInputs | CastOutputs) for hooks in homes for hook in hooks.values())


def is_backward() -> bool:
    """Whether a backward pass is running: a module called there belongs to a call from outside that has ended."""
    return torch._C._current_autograd_node() is not None


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """Floating tensors of any structure -> the same in `dtype`. Those that have it already are not touched: any call on
    the placeholder of a fused norm would make it real."""
    return mapped(lambda leaf: leaf.to(dtype) if is_floating(leaf) and leaf.dtype != dtype else leaf, tree)


def is_floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype.is_floating_point
