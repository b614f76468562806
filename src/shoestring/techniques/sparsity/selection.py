"""Which layers of a model are made sparse: those that the user names, those that the model names, or the usual ones."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...errors import ShoestringError
from .layers import sparse_kind, why_not

NOBODY: Mapping[str, str] = MappingProxyType({})


def select(model: nn.Module, patterns: tuple[str, ...] = (), readers: Mapping[str, str] = NOBODY) -> dict[str, Any]:
    """A model and patterns of names or types (with * and ?) -> the layers to be made sparse, by name.

    Without patterns those of the model's own `sparse_layers` count. Without them too, every convolution, linear layer
    and embedding that can be sparse and is trained, but for the first convolution, the last linear layer, and those
    whose weight other code reads: `readers` are such layers and that code.
    """
    patterns = patterns or getattr(model, "sparse_layers", ())
    chosen = _named(model, patterns, readers) if patterns else _usual(model, readers)
    if not chosen:
        read = f"; {words_of(readers)}" if readers else ""
        raise ShoestringError(f"{type(model).__name__} has no layer to make sparse: name some of its layers{read}")
    return chosen


def words_of(readers: Mapping[str, str]) -> str:
    """Layers and who reads their weight -> why they stay dense."""
    (name, reader), *others = readers.items()
    more = f", and {len(others)} more" if others else ""
    return f"{name} stays dense, for {reader} reads its weight{more}"


def _named(model: nn.Module, patterns: tuple[str, ...], readers: Mapping[str, str]) -> dict[str, Any]:
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
            reason = why_not(module) or (name in readers and f"{readers[name]} reads its weight: leave it out")
            if reason:
                raise ShoestringError(f"{name} cannot be made sparse: {reason}")
        chosen |= layers
    for name, sharer in _shared_with_others(model, chosen).items():
        raise ShoestringError(f"{name} shares its weight with {sharer}: make both sparse, or neither")
    return chosen


def _usual(model: nn.Module, readers: Mapping[str, str]) -> dict[str, Any]:
    modules = dict(model.named_modules())
    first = next((name for name, module in modules.items() if isinstance(module, nn.Conv2d)), None)
    last = next((name for name in reversed(modules) if isinstance(modules[name], nn.Linear)), None)
    chosen = {
        name: module
        for name, module in modules.items()
        if name not in (first, last, *readers) and not why_not(module) and module.weight.requires_grad
    }
    for name in _shared_with_others(model, chosen):
        del chosen[name]
    return chosen


def _shared_with_others(model: nn.Module, chosen: dict[str, Any]) -> dict[str, str]:
    """Chosen layers whose weight, or its memory, is also held elsewhere than as a chosen layer's -> by which module."""
    layers = set(chosen.values())
    others: dict[Any, str] = {}
    for name, module in model.named_modules():
        for tensor in pytree.tree_leaves(list(vars(module).values())):  # in lists and other attributes too
            if isinstance(tensor, Tensor) and not (module in layers and tensor is module.weight):
                others |= dict.fromkeys((id(tensor), _place(tensor)), name or type(model).__name__)
    weights = {_place(layer.weight): (layer.weight, name) for name, layer in chosen.items()}
    for layer in layers:  # another parameter over the same memory, which an optimizer would update once more
        weight, name = weights[_place(layer.weight)]
        if weight is not layer.weight:
            others[_place(weight)] = name
    return {
        name: others.get(id(layer.weight)) or others[_place(layer.weight)]
        for name, layer in chosen.items()
        if id(layer.weight) in others or _place(layer.weight) in others
    }


def _place(tensor: Tensor) -> tuple[str, int]:
    """Where a tensor's values are; of one that has none, itself."""
    return ("memory", tensor.data_ptr()) if not tensor.is_meta and tensor.numel() else ("itself", id(tensor))
