"""Which layers of a model are made sparse: those that the user names, those that the model names, or the usual ones."""

from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ..errors import ShoestringError
from .sparse_layers import sparse_kind, why_not


def select(model: nn.Module, patterns: tuple[str, ...] = ()) -> dict[str, Any]:
    """A model and patterns of names or types (with * and ?) -> the layers to be made sparse, by name.

    Without patterns those of the model's own `sparse_layers` count. Without them too, every convolution, linear layer
    and embedding that can be sparse and is trained, but for the first convolution and the last linear layer.
    """
    patterns = patterns or getattr(model, "sparse_layers", ())
    chosen = _named(model, patterns) if patterns else _usual(model)
    if not chosen:
        raise ShoestringError(f"{type(model).__name__} has no layer to make sparse: name some of its layers")
    return chosen


def _named(model: nn.Module, patterns: tuple[str, ...]) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    for pattern in patterns:
        matched = {
            name: module
            for name, module in model.named_modules()
            if name and (fnmatchcase(name, pattern) or fnmatchcase(type(module).__name__, pattern))
        }
        if not matched:
            raise ShoestringError(
                f"{type(model).__name__} has no layer of name or type {pattern!r}: see model.named_modules()"
            )
        layers = {name: module for name, module in matched.items() if sparse_kind(module)} or matched
        for name, module in layers.items():
            if reason := why_not(module):
                raise ShoestringError(f"{name} cannot be made sparse: {reason}")
        chosen |= layers
    for name, sharer in _shared_with_others(model, chosen).items():
        raise ShoestringError(f"{name} shares its weight with {sharer}: make both sparse, or neither")
    return chosen


def _usual(model: nn.Module) -> dict[str, Any]:
    modules = dict(model.named_modules())
    first = next((name for name, module in modules.items() if isinstance(module, nn.Conv2d)), None)
    last = next((name for name in reversed(modules) if isinstance(modules[name], nn.Linear)), None)
    chosen = {
        name: module
        for name, module in modules.items()
        if name not in (first, last) and not why_not(module) and module.weight.requires_grad
    }
    for name in _shared_with_others(model, chosen):
        del chosen[name]
    return chosen


def _shared_with_others(model: nn.Module, chosen: dict[str, Any]) -> dict[str, str]:
    """Chosen layers whose weight belongs to a module that is not chosen too -> that module."""
    others = {
        id(parameter): name or type(model).__name__
        for name, module in model.named_modules()
        if module not in chosen.values()
        for parameter in module._parameters.values()
        if parameter is not None
    }
    return {name: others[id(m.weight)] for name, m in chosen.items() if id(m.weight) in others}
