"""Layers that hold only the nonzeros of their weight: `values`, one flat parameter, and `index`, their positions.

The gradient and any optimizer's state are then as sparse as the weight, and share the index. The number of nonzeros
of a layer may change while it is trained (see `rewiring`); tensors change their size in place, so that optimizers and
saves keep hold of them.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ShoestringError
from ..kernels.sparse_index import bitmap_bytes, from_bitmap, to_bitmap, validate
from . import nonzeros
from .first_values import fill, record_reset
from .sparse_products import (
    SparseConvolution,
    SparseMatrix,
    sparse_convolution,
    sparse_embedding,
    sparse_linear,
)

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


class SparseLayer(nn.Module):
    """What the sparse layers share. `total` is the number of nonzeros of all layers that were made sparse together.

    Made from a dense layer, of which it takes settings, device, type, and the weights at the positions of the bitmap
    `bits`; without one, positions and values are drawn anew, the values as the dense layer's own.
    """

    index: Tensor
    dense: ClassVar[type[nn.Module]]
    settings: ClassVar[tuple[str, ...]]

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
        """What keeps a dense layer from being made sparse; empty if nothing does."""
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
        """What an optimizer's groups go by: the name and the shape of the dense weight."""
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
        self.index.data = from_bitmap(torch.from_numpy(bits), self.numel).to(self.index.device)

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

    # -- saving and loading -------------------------------------------------------------------------------------
    def get_extra_state(self) -> Tensor:
        return torch.tensor([*self.shape, self.total])

    def set_extra_state(self, state: Tensor) -> None:
        """Refuses what was loaded into the layer if it does not belong there."""
        self._check_saved(type(self).__name__, self.values, self.index, state)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        """Refuses a save of another shape or density, or a damaged index; then takes the sizes of the saved tensors."""
        name = prefix.rstrip(".") or type(self).__name__
        if f"{prefix}weight" in state:
            raise ShoestringError(f"{name} is sparse here and dense in the save: load it before from_dense()")
        saved = [state.get(prefix + key) for key in ("values", "index", "_extra_state")]
        if all(tensor is not None for tensor in saved):
            values, index, extra = saved
            self._check_saved(name, values, index, extra)
            self.values.data = self.values.new_empty(values.numel())
            self.index.data = self.index.new_empty(index.numel())
        super()._load_from_state_dict(state, prefix, *rest)

    def _check_saved(self, name: str, values: Tensor, index: Tensor, extra: Tensor) -> None:
        *shape, total = extra.tolist()
        if tuple(shape) != self.shape:
            raise ShoestringError(
                f"{name} has shape {self.shape} here and {tuple(shape)} in the save: build the model as it was saved"
            )
        if total != self.total:
            raise ShoestringError(
                f"{name} is of {self.total:,} nonzeros in all here and of {total:,} in the save: "
                "build the model with the density of the save"
            )
        try:
            validate(index, self.numel, values.numel())
        except ShoestringError as error:
            raise ShoestringError(f"{name}: {error}") from error

    def extra_repr(self) -> str:
        settings = ", ".join(f"{name}={getattr(self, name)}" for name in self.settings)
        return f"{settings}, bias={self.bias is not None}, nonzeros={self.values.numel():,} of {self.numel:,}"


class SparseConv2d(SparseLayer):
    """A 2-d convolution with a sparse weight; one group, padded with zeros."""

    dense = nn.Conv2d
    settings = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation")
    in_channels: int
    out_channels: int
    kernel_size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def __init__(self, like: nn.Conv2d, count: int, **options: Any) -> None:
        super().__init__(like, count, **options)
        self.padding = _padding(like)

    @staticmethod
    def why_not(dense: nn.Conv2d) -> str:
        if type(dense)._conv_forward is not nn.Conv2d._conv_forward:
            return "it has a forward of its own"
        if dense.groups != 1:
            return f"it has {dense.groups} groups, and only 1 is supported"
        if dense.padding_mode != "zeros":
            return f"its padding is {dense.padding_mode}, and only zeros are supported"
        uneven = dense.padding == "same" and any(span % 2 for span in _spans(dense))
        return f"its padding 'same' is uneven for a kernel of {dense.kernel_size}" if uneven else ""

    def forward(self, x: Tensor) -> Tensor:
        product = SparseConvolution(
            self.values, self.index, self.bias, self.in_channels, self.out_channels,
            (self.kernel_size, self.stride, self.padding, self.dilation),
        )  # fmt: skip
        return sparse_convolution(x, self.values, self.bias, product)


def _spans(conv: nn.Conv2d) -> tuple[int, ...]:
    """Pixels between the first and the last that a kernel reads, each way."""
    return tuple(d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True))


def _padding(conv: nn.Conv2d) -> tuple[int, int]:
    words = {"same": [span // 2 for span in _spans(conv)], "valid": [0, 0]}
    high, wide = words[conv.padding] if isinstance(conv.padding, str) else conv.padding
    return high, wide


class SparseLinear(SparseLayer):
    """A linear layer with a sparse weight."""

    dense = nn.Linear
    settings = ("in_features", "out_features")
    out_features: int

    @staticmethod
    def why_not(dense: nn.Linear) -> str:
        is_part = isinstance(dense, nn.modules.linear.NonDynamicallyQuantizableLinear)
        return "nn.MultiheadAttention reads its weight itself" if is_part else ""

    def forward(self, x: Tensor) -> Tensor:
        product = SparseMatrix(self.values, self.index, self.bias, self.out_features)
        return sparse_linear(x, self.values, self.bias, product)


class SparseEmbedding(SparseLayer):
    """A table of vectors with a sparse weight; the row of the padding has no nonzeros."""

    dense = nn.Embedding
    settings = ("num_embeddings", "embedding_dim", "padding_idx")
    num_embeddings: int
    embedding_dim: int

    @staticmethod
    def why_not(dense: nn.Embedding) -> str:
        for setting in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(dense, setting):
                return f"its {setting} is not supported"
        padding = None if dense.padding_idx is None else dense.weight[dense.padding_idx]
        if padding is not None and not padding.is_meta and bool(padding.any()):
            return "the row of its padding is not zero"
        return ""

    @staticmethod
    def forbidden(dense: nn.Embedding) -> range:
        if dense.padding_idx is None:
            return nonzeros.NOWHERE
        start = dense.padding_idx * dense.embedding_dim
        return range(start, start + dense.embedding_dim)

    def _options(self) -> dict[str, Any]:
        return {}

    def forward(self, ids: Tensor) -> Tensor:
        return sparse_embedding(ids, self.values, self.index, (self.num_embeddings, self.embedding_dim))


KINDS: Sequence[type[SparseLayer]] = (SparseConv2d, SparseLinear, SparseEmbedding)


def sparse_kind(module: nn.Module) -> Any:
    """The sparse layer that can take a dense one's place, whether or not this one's settings allow it."""
    return next((kind for kind in KINDS if isinstance(module, kind.dense)), None)


def why_not(module: nn.Module) -> str:
    """What keeps a module from being made sparse; empty if nothing does."""
    kind = sparse_kind(module)
    if isinstance(module, SparseLayer):
        return "it is sparse already"
    if kind is None:
        return f"a {type(module).__name__} is no Conv2d, Linear or Embedding"
    if type(module).forward is not kind.dense.forward:
        return "it has a forward of its own"
    if module._parameters.get("weight") is None:
        return "its weight is not a plain parameter"
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        return "it has hooks, which would be lost: register them afterwards"
    return kind.why_not(module)
