"""The sparse layers: convolution, linear, embedding; and which dense ones they can take the place of."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ...passes.boundary import hooks_of_others
from ...passes.sparse_layers import SparseConvolution, SparseMatrix, sparse_convolution, sparse_embedding, sparse_linear
from . import bitmap as nonzeros
from .layer import SparseLayer


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
    """Why a module cannot be made sparse; "" if it can."""
    kind = sparse_kind(module)
    if isinstance(module, SparseLayer):
        return "it is sparse already"
    if kind is None:
        return f"a {type(module).__name__} is no Conv2d, Linear or Embedding"
    if type(module).forward is not kind.dense.forward:
        return "it has a forward of its own"
    if module._parameters.get("weight") is None:
        return "its weight is not a plain parameter"
    if hooks_of_others(module):
        return "it has hooks, which would be lost: register them afterwards"
    return kind.why_not(module)
