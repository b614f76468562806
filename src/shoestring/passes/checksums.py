"""A tensor's shape, dtype and checksum, by which a region's recomputation is compared with its first run."""

import ctypes
import zlib
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._C import DisableTorchFunction, _len_torch_dispatch_stack
from torch._guards import active_fake_mode

from ..taping.recorder import unseen

ALL = 4096  # a tensor's checksum is that of all its elements up to this number,
SPOTS, WIDTH = 64, 16  # and of a larger one's elements at so many places, so many in a row
_GOLDEN = -0x61C8864680B583EB  # 2**64 / the golden ratio, signed: its multiples are spread over all bits


class Seen(NamedTuple):
    """`checksum` is None if there are no values: in a trace, and for layouts that are not strided."""

    shape: torch.Size
    dtype: torch.dtype
    checksum: int | Tensor | None

    @classmethod
    def of(cls, tensor: Tensor) -> "Seen":
        if is_traced():
            return cls(tensor.shape, tensor.dtype, None)
        with torch.no_grad(), DisableTorchFunction(), unseen():
            return cls(tensor.shape, tensor.dtype, _checksum(tensor.detach()))

    def difference(self, first: "Seen | None", values: bool = True) -> str:
        """How this differs from the first run, in words; "" if it does not. `values`: compare checksums too."""
        if first is None:
            return f"{tuple(self.shape)} in place of nothing"
        if (self.shape, self.dtype) != (first.shape, first.dtype):
            return f"{tuple(self.shape)} of {self.dtype} in place of {tuple(first.shape)} of {first.dtype}"
        if values and None not in (self.checksum, first.checksum) and bool(self.checksum != first.checksum):
            return f"other values of {tuple(self.shape)}"
        return ""


def _checksum(tensor: Tensor) -> int | Tensor | None:
    """A number that depends on the bits and the order of a sample of the tensor's elements."""
    if tensor.numel() == 0 or tensor.layout != torch.strided or tensor.is_meta:
        return None
    sample = _sample(tensor.resolve_conj() if tensor.is_complex() else tensor).contiguous().view(torch.uint8)
    if sample.device.type == "cpu":
        # Not by numpy(), after which no storage can be resized, as FSDP2 does to parameters.
        return zlib.crc32((ctypes.c_char * sample.nbytes).from_address(sample.data_ptr()))
    weights = torch.arange(1, sample.numel() + 1, device=sample.device) * _GOLDEN
    return (sample.flatten() * weights).sum()  # stays on the device: no synchronisation in the forward pass


def _sample(tensor: Tensor) -> Tensor:
    """All of a small tensor; of a large one a few elements at each of about SPOTS places, evenly spread."""
    step, width = (tensor.numel() // SPOTS | 1, WIDTH) if tensor.numel() > ALL else (1, 1)
    count = (tensor.numel() - width) // step + 1  # the step is odd, so that each column of a matrix is sampled
    if tensor.is_contiguous() or _in_memory(tensor).is_contiguous():
        return tensor.as_strided((count, width), (step, 1))
    offsets, span = _offsets(tensor.shape, tensor.stride(), count, step, width)
    return tensor.as_strided((span,), (1,))[offsets.to(tensor.device)]


@lru_cache(maxsize=16)  # layers of a model are alike, and this takes longer than all the rest
def _offsets(shape: tuple, strides: tuple, count: int, step: int, width: int) -> tuple[Tensor, int]:
    """Offsets of the samples of a view from its first element, and how far apart its first and last elements are."""
    places = np.unravel_index(np.arange(count)[:, None] * step + np.arange(width), shape)
    offsets = sum(place * stride for place, stride in zip(places, strides, strict=True))
    span = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    return torch.from_numpy(offsets), span


def _in_memory(tensor: Tensor) -> Tensor:
    """A tensor with its dimensions in the order in which they lie in memory."""
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def is_traced() -> bool:
    """Whether tensors are fake here, without values."""
    return bool(_len_torch_dispatch_stack()) and active_fake_mode() is not None
