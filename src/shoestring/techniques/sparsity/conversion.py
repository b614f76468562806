"""From dense layers to sparse ones and back, one layer at a time.

from_dense(model, nonzero=30)       # in place: each dense weight is let go before the next is looked at
dense = convert_to_dense(model)     # a copy with PyTorch's own layers
"""

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ...errors import NoEffect, ShoestringError
from ...passes.boundary import move_boundary
from . import bitmap as nonzeros
from .layer import SparseLayer
from .layers import sparse_kind
from .rewiring import shares
from .selection import NOBODY, select

POSITIONS = ("largest", "random")


def from_dense(
    model: nn.Module,
    nonzero: float,
    layers: tuple[str, ...] = (),
    positions: str | None = "largest",
    seed: int = 0,
    readers: Mapping[str, str] = NOBODY,
) -> nn.Module:
    """A model -> the same one, whose layers (see `select`) hold `nonzero` percent of their weights, all alike.

    Of a weight on the meta device only the sizes are fixed; it is drawn when the model is materialised, at random
    positions. Of one that has values the `largest` survive, or those at `random` positions if asked for.
    """
    check_nonzero(nonzero)
    positions = positions or "largest"
    if positions not in POSITIONS:
        raise ShoestringError(f"positions={positions!r} is not known: use one of {', '.join(POSITIONS)}")
    chosen = select(model, layers, readers)
    groups = _by_weight(chosen)
    sizes = [chosen[names[0]].weight.numel() for names in groups]
    total = round(sum(sizes) * nonzero / 100)
    counts = shares(total, sizes, sizes)
    for names, count in zip(groups, counts, strict=True):
        if not count:
            raise ShoestringError(f"{names[0]} is too small to keep a weight at {nonzero:g}%: leave it out")
    random = nonzeros.generator_from(torch.Generator().manual_seed(seed))
    for names, count in zip(groups, counts, strict=True):
        bits = _bits(chosen[names[0]], count, positions, random)
        first: SparseLayer | None = None
        for name in names:
            dense = chosen[name]
            sparse = sparse_kind(dense)(dense, count, bits=bits, total=total, name=name)
            if first is not None:  # they shared a weight, and share its nonzeros
                sparse.values, sparse.index = first.values, first.index
            first = first or sparse
            move_boundary(dense, sparse)
            _replace(model, dense, sparse)
        for name in names:
            del chosen[name].weight  # now, not when the last layer is done
    return model


def _by_weight(layers: dict[str, Any]) -> list[list[str]]:
    """Layers by name -> their names, in groups that share a weight."""
    groups: dict[int, list[str]] = {}
    for name, layer in layers.items():
        groups.setdefault(id(layer.weight), []).append(name)
    return list(groups.values())


def _bits(dense: Any, count: int, positions: str, random: np.random.Generator) -> nonzeros.Bits | None:
    """The positions that are kept of a layer's weight; none of one that has no values yet."""
    weight, never = dense.weight.detach(), sparse_kind(dense).forbidden(dense)
    if weight.is_meta:
        return None
    if positions == "largest":
        return nonzeros.largest(weight.reshape(-1), count, never)
    bits = nonzeros.empty_bitmap(weight.numel())
    nonzeros.grow(bits, weight.numel(), count, random, never)
    return bits


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Puts `new` wherever `old` is in the model."""
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new
                if isinstance(parent, nn.TransformerEncoderLayer):
                    _choose_path(parent)


def _choose_path(layer: nn.TransformerEncoderLayer) -> None:
    """Switches off PyTorch's fast path, which reads the weight of its layers itself, as long as one is sparse."""
    kinds = {1: (F.relu, nn.ReLU), 2: (F.gelu, nn.GELU)}
    is_sparse = any(isinstance(child, SparseLayer) for child in layer.modules())
    own = (number for number, (function, kind) in kinds.items()
           if layer.activation is function or isinstance(layer.activation, kind))  # fmt: skip
    layer.activation_relu_or_gelu = 0 if is_sparse else next(own, 0)


def convert_to_dense(model: nn.Module) -> nn.Module:
    """A model with sparse layers -> a copy in which they are PyTorch's own, with all their zeros and with the hooks by
    which a model in 16 bits takes FP32."""
    return densify(copy.deepcopy(model))


def densify(model: nn.Module) -> nn.Module:
    """The same in place, a layer at a time."""
    weights: dict[int, Any] = {}  # by the values that layers may share
    for layer in [module for module in model.modules() if isinstance(module, SparseLayer)]:
        dense = layer.to_dense()
        dense.weight = weights.setdefault(id(layer.values), dense.weight)
        move_boundary(layer, dense)
        _replace(model, layer, dense)
    return model


def check_nonzero(nonzero: float) -> None:
    """Refuses a percentage that is out of range, or leaves all weights nonzero."""
    if not 0 < nonzero <= 100:
        raise ShoestringError(f"{nonzero:g}% of nonzeros cannot be trained: use more than 0 and less than 100")
    if nonzero == 100:
        raise NoEffect("100% of nonzeros is the dense model: leave it out of the plan")
