"""Placeholders: returned by a fused batch norm (and its ReLU) until a convolution computes all three as one operation.

A placeholder has the shape and dtype of the real output and holds NaN. Its values are never used: an operation that is
not fused gets the real tensor in its place, computed on first use; a placeholder that outlives the pass is filled with
the real values; and a gradient that reaches one (a custom autograd function took it) is an error.
"""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import ShoestringError
from .functions import Statistics, lean_norm

ADVICE = "set checkpoint to residual-M or every-M, which do not fuse, or pass the tensor to PyTorch's own functions"
# Methods and attributes that do not depend on a tensor's values: a placeholder's are those of the real tensor.
METADATA = frozenset(
    [getattr(Tensor, name).__get__ for name in
     ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_meta", "is_sparse", "is_quantized",
      "is_mkldnn", "itemsize", "nbytes")]
    + [Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.__len__,
       Tensor.is_floating_point, Tensor.is_complex, torch.is_floating_point, torch.is_complex, torch.is_tensor,
       torch.numel]
)  # fmt: skip


class Norm(NamedTuple):
    """A call of batch norm in training: its input, parameters and the batch's statistics."""

    x: Tensor
    gamma: Tensor | None
    beta: Tensor | None
    statistics: Statistics
    name: str

    def compute(self, relu: bool) -> Tensor:
        return lean_norm(self.x, self.gamma, self.beta, self.statistics, relu)


class Record:
    """What a placeholder stands for: `norm`, then ReLU if `activated`; `real` once somebody needed its values."""

    def __init__(self, norm: Norm, activated: bool) -> None:
        self.norm: Norm | None = norm
        self.name, self.activated = norm.name, activated
        self.real: Tensor | None = None
        self._x: weakref.ref | None = None  # of a fused norm: it must not keep the norm's input alive
        self._others = norm[1:]

    def fused(self) -> Norm:
        """The norm, for the convolution that is fused with it."""
        norm = self._found()
        self.norm, self._x = None, weakref.ref(norm.x)
        return norm

    def value(self) -> Tensor:
        """The real tensor."""
        if self.real is None:
            with torch.enable_grad():  # as it was when the model called batch norm
                self.real, self.norm = self._found().compute(self.activated), None
        return self.real

    def _found(self) -> Norm:
        x = self._x() if self._x is not None else None
        norm = self.norm or (Norm(x, *self._others) if x is not None else None)
        if norm is None:
            raise ShoestringError(
                f"the output of batch norm {self.name!r} is used after the convolution that it was fused with, but it "
                f"went to that convolution alone when the model was examined: its code takes different paths; {ADVICE}"
            )
        return norm


class Placeholders:
    """The placeholders of one pass."""

    def __init__(self) -> None:
        self._nans: dict[tuple, Tensor] = {}
        self._records: dict[int, tuple[weakref.ref, Record]] = {}

    def __bool__(self) -> bool:
        return bool(self._records)

    def make(self, norm: Norm, activated: bool = False) -> Tensor:
        """A placeholder for the output of batch norm, or of its ReLU if `activated`."""
        tensor = self._nan(norm.x).expand(norm.x.shape)
        key = id(tensor)
        self._records[key] = weakref.ref(tensor, lambda _: self._records.pop(key, None)), Record(norm, activated)
        return tensor

    def record(self, tensor: Any) -> Record | None:
        """The record of a placeholder; None for any other tensor."""
        reference, record = self._records.get(id(tensor), (None, None))
        return record if reference is not None and reference() is tensor else None

    def real(self, tree: Any) -> Any:
        """The same structure with real tensors in place of placeholders."""
        if not self._records or not any(self.record(leaf) for leaf in pytree.tree_leaves(tree)):
            return tree
        return pytree.tree_map(lambda leaf: record.value() if (record := self.record(leaf)) else leaf, tree)

    def close(self) -> None:
        """Fills the placeholders that are still referenced after the pass."""
        for reference, record in list(self._records.values()):
            if (tensor := reference()) is not None:
                with torch.no_grad():
                    tensor.data = record.value().detach()
        self._records.clear()

    def _nan(self, like: Tensor) -> Tensor:
        """The value that all placeholders of a dtype share; it refuses gradients."""
        kind = like.dtype, like.device
        if kind not in self._nans:
            self._nans[kind] = like.new_full((), float("nan")).requires_grad_()
            self._nans[kind].register_hook(_refuse_gradient)
        return self._nans[kind]


def _refuse_gradient(gradient: Tensor) -> None:
    raise ShoestringError(
        "a gradient reached the output of a fused batch norm: a custom autograd function took it, but a convolution "
        f"did when the model was examined; {ADVICE}"
    )
