"""The base of the sparse layers: each holds only the nonzeros of its weight, a flat parameter, and their index.

The gradient and any optimizer's state are then as sparse as the weight, and share the index. The number of nonzeros
of a layer may change while it is trained (see `rewiring`); tensors change their size in place, so that optimizers and
saves keep hold of them.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import ShoestringError
from ...kernels.sparse_index import bitmap_bytes, from_bitmap, to_bitmap, validate
from ...passes.boundary import Layer
from . import bitmap as nonzeros
from .initial_values import fill, record_reset

ESCAPE = 255  # zeros that one byte of the index can skip


def expected_index_bytes(numel: int, count: int) -> int:
    """The bytes of the index of `count` nonzeros drawn at random: a bitmap, or the expected length of the gaps."""
    if not count:
        return 0
    jump = (1 - count / numel) ** ESCAPE  # how likely it is that 255 zeros follow a nonzero
    return min(bitmap_bytes(numel), round(count + count * jump / (1 - jump)))


@torch.no_grad()
def dense_weight(values: Tensor, index: Tensor, shape: Sequence[int]) -> Tensor:
    """Nonzeros and their index -> the weight of that shape with its zeros, newly made."""
    numel = int(np.prod(shape))
    everywhere = np.full(bitmap_bytes(numel), 255, np.uint8)
    bits = to_bitmap(index, numel).cpu().numpy()
    return nonzeros.move(values, bits, everywhere, numel, numel).view(*shape)


class NoWeight(ShoestringError, AttributeError):
    """A sparse layer's weight was read, or set; for hasattr() it is a missing attribute like any other."""


class SparseLayer(Layer):
    """The base of the sparse layers. `total` is the number of nonzeros of all layers that were made sparse together.

    Made from a dense layer, of which it takes settings, device, type, and the weights at the positions of the bitmap
    `bits`; without one, positions and values are drawn anew, the values as the dense layer's own.
    """

    index: Tensor
    dense: ClassVar[type[nn.Module]]
    settings: ClassVar[tuple[str, ...]]
    constant_buffers = ("index",)  # in a step, which need not copy them in case it breaks off

    def __init__(
        self, like: Any, count: int, *, bits: nonzeros.Bits | None = None, total: int | None = None, name: str = ""
    ) -> None:
        super().__init__()
        name, weight, bias = name or type(like).__name__, like.weight, getattr(like, "bias", None)
        nonzeros.check_size(name, weight.numel())
        self.shape, self.never = tuple(weight.shape), self.forbidden(like)
        self.total = count if total is None else total
        if not 0 < count <= self.room:
            raise ShoestringError(f"{count:,} nonzeros do not go into {name}: use 1 to {self.room:,}")
        for setting in self.settings:
            setattr(self, setting, getattr(like, setting))
        size = expected_index_bytes(self.numel, count)
        self.values = nn.Parameter(weight.new_empty(count), weight.requires_grad)
        self.register_buffer("index", weight.new_empty(size, dtype=torch.uint8))
        self.bias = None if bias is None else nn.Parameter(torch.empty_like(bias), bias.requires_grad)
        self.first_values = {} if bits is not None else record_reset(like, name)
        self.train(like.training)
        if bits is None:
            self.reset_parameters()
        else:
            self._take(like, bits)

    @staticmethod
    def why_not(dense: Any) -> str:
        """Why a dense layer cannot be made sparse; "" if it can."""
        return ""

    @staticmethod
    def forbidden(dense: Any) -> range:
        """Positions of a dense layer's weight at which there is never a nonzero."""
        return nonzeros.NOWHERE

    @property
    def numel(self) -> int:
        """Positions of the weight, zero or not."""
        return int(np.prod(self.shape))

    @property
    def room(self) -> int:
        """The most nonzeros that the layer can hold."""
        return self.numel - len(self.never)

    @property
    def dense_parameters(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The name and the shape of the dense weight, by which an optimizer's groups are matched."""
        return {"values": ("weight", self.shape)}

    def reset_parameters(self) -> None:
        """Draws positions, and values as those of the dense layer are drawn; does nothing on the meta device."""
        if self.values.is_meta:
            return
        bits = nonzeros.empty_bitmap(self.numel)
        nonzeros.grow(bits, self.numel, self.values.numel(), nonzeros.generator_from(None), self.never)
        self._set_index(bits)
        fill(self.values, self.first_values["weight"])
        if self.bias is not None:
            fill(self.bias, self.first_values["bias"])

    @torch.no_grad()
    def _take(self, dense: Any, bits: nonzeros.Bits) -> None:
        """Takes the weights of a dense layer at the positions of a bitmap, and its bias."""
        self.values.data = nonzeros.gather(dense.weight.reshape(-1), bits, self.values.numel())
        self._set_index(bits)
        self.bias = dense._parameters.get("bias")

    @torch.no_grad()
    def take_largest(self, weight: Tensor) -> None:
        """Takes the largest of a plain layer's weights: as many as the layer has values."""
        flat = weight.detach().reshape(-1).to(self.values.dtype)
        bits = nonzeros.largest(flat, self.values.numel(), self.never)
        self.values.data = nonzeros.gather(flat, bits, self.values.numel())
        self._set_index(bits)

    @torch.no_grad()
    def rewire(self, pruned: int, grown: int, random: np.random.Generator) -> None:
        """Prunes that many of the smallest values, then grows zeros at random free positions."""
        before = self._bitmap()
        after = before.copy()
        count = self.values.numel() - pruned + grown
        nonzeros.prune(after, self.numel, self.values.data, pruned)
        nonzeros.grow(after, self.numel, grown, random, self.never)
        self.values.data = nonzeros.move(self.values, before, after, self.numel, count)
        self._set_index(after)

    def dense_weight(self) -> Tensor:
        """The weight with its zeros, newly made."""
        return dense_weight(self.values, self.index, self.shape)

    def _bitmap(self) -> nonzeros.Bits:
        return to_bitmap(self.index, self.numel).cpu().numpy()

    def _set_index(self, bits: nonzeros.Bits) -> None:
        # set_, which counts as writing it: through `.data`, materialise() would take it for never filled
        index: Any = from_bitmap(torch.from_numpy(bits), self.numel)
        self.index.set_(index.to(self.index.device))

    def to_dense(self) -> nn.Module:
        """PyTorch's own layer with the same weights, zeros and all."""
        settings = {name: getattr(self, name) for name in self.settings}
        with torch.device("meta"):
            dense = self.dense(**settings, **self._options())
        dense.weight = nn.Parameter(self.dense_weight(), self.values.requires_grad)
        if self.bias is not None:
            dense.bias = self.bias
        return dense.train(self.training)

    def _options(self) -> dict[str, Any]:
        """Arguments of the dense layer beside its settings."""
        return {"bias": self.bias is not None}

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise NoWeight(
                f"a {type(self).__name__} has no weight to read, only its nonzeros: leave this layer dense "
                "(the setting `layers` names those that are made sparse), or call dense_weight() for a copy"
            )
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise NoWeight(f"the weight of a {type(self).__name__} cannot be set: tie weights before from_dense()")
        super().__setattr__(name, value)

    # -- saving and loading -------------------------------------------------------------------------------------
    # A run's saves hold values and index, which are checked by the extra state. A state_dict() is for the world: it has
    # the entries of the plain layer. In it a nonzero that is 0 just now is -0, so that its position is not lost.
    def get_extra_state(self) -> Tensor:
        return torch.tensor([*self.shape, self.total])

    def set_extra_state(self, state: Tensor) -> None:
        """Refuses what was loaded into the layer if it does not belong there."""
        *shape, total = state.tolist()
        self._check_saved(type(self).__name__, tuple(shape), total)
        try:
            validate(self.index, self.numel, self.values.numel())
        except ShoestringError as error:
            raise ShoestringError(f"{type(self).__name__}: {error}") from error

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """The weight as the plain layer has it, newly made, and the bias."""
        if self.values.is_meta:
            weight = self.values.new_empty(self.shape)
        else:
            marked = self.values.detach().clone()
            weight = dense_weight(marked.masked_fill_(marked == 0, -0.0), self.index, self.shape)
        destination[f"{prefix}weight"] = weight
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias if keep_vars else self.bias.detach()
        if hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]]["nonzeros"] = self.total

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, strict: bool, *rest: Any) -> None:
        """Takes the nonzeros of the plain layer's weight; refuses one of another shape or density, or a dense one."""
        missing, weight = rest[0], state.get(f"{prefix}weight")
        if weight is None and strict:
            missing.append(f"{prefix}weight")
        if weight is not None and not weight.is_meta:
            self._resize(prefix.rstrip(".") or type(self).__name__, weight, metadata.get("nonzeros"))
            values = nonzeros.gather(weight.detach().reshape(-1), self._bitmap(), self.values.numel())
        else:
            values = self.values.detach()
        own = {f"{prefix}values": values, f"{prefix}index": self.index, f"{prefix}_extra_state": self.get_extra_state()}
        others = {name: tensor for name, tensor in state.items() if name != f"{prefix}weight"}
        super()._load_from_state_dict(others | own, prefix, metadata, strict, *rest)

    def _resize(self, name: str, weight: Tensor, total: int | None) -> None:
        """Takes the positions of the nonzeros of a plain layer's weight, and makes room for their values."""
        self._check_saved(name, tuple(weight.shape), self.total if total is None else total)
        bits = nonzeros.held(weight.detach().reshape(-1))
        count = nonzeros.count(bits, self.numel)
        full = total is None and count == self.room > self.values.numel()
        if full or count > self.total or any(bits[place // 8] >> place % 8 & 1 for place in self.never):
            raise ShoestringError(
                f"{name} is sparse here and dense in the save, where {count:,} of {self.numel:,} weights are not 0: "
                "load it before from_dense()"
            )
        self.values.data = self.values.new_empty(count)
        self._set_index(bits)

    def _check_saved(self, name: str, shape: tuple[int, ...], total: int) -> None:
        if shape != self.shape:
            raise ShoestringError(
                f"{name} has shape {self.shape} here and {shape} in the save: build the model as it was saved"
            )
        if total != self.total:
            raise ShoestringError(
                f"{name} is of {self.total:,} nonzeros in all here and of {total:,} in the save: "
                "build the model with the density of the save"
            )

    def extra_repr(self) -> str:
        settings = ", ".join(f"{name}={getattr(self, name)}" for name in self.settings)
        return f"{settings}, bias={self.bias is not None}, nonzeros={self.values.numel():,} of {self.numel:,}"
