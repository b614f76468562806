"""Reference implementations of the kernels that pack and unpack bits, in PyTorch: any device."""

import torch
from torch import Tensor

_WEIGHTS = (1, 2, 4, 8, 16, 32, 64, 128)


def pack_bits(mask: Tensor) -> Tensor:
    """A bool or uint8 mask of any shape -> its bits, 8 per byte, the last byte padded with zeros."""
    bits = torch.nn.functional.pad((mask != 0).reshape(-1).to(torch.uint8), (0, -mask.numel() % 8))
    weights = torch.tensor(_WEIGHTS, dtype=torch.uint8, device=mask.device)
    return (bits.view(-1, 8) * weights).sum(1, dtype=torch.uint8)


def unpack_bits(bits: Tensor, numel: int) -> Tensor:
    """Packed bits -> the flat bool mask of `numel` elements."""
    weights = torch.tensor(_WEIGHTS, dtype=torch.uint8, device=bits.device)
    return ((bits[:, None] & weights) != 0).view(-1)[:numel]


def positive_bits(x: Tensor) -> Tensor:
    """Packed bits of where x is not <= 0, a NaN included."""
    return pack_bits((x <= 0).logical_not_())


def where_bits(out: Tensor, x: Tensor, bits: Tensor) -> None:
    """Writes the elements of x that have a bit to `out`, and zero for the others; `out` may be x."""
    torch.where(unpack_bits(bits, x.numel()).view(x.shape), x, torch.zeros((), dtype=x.dtype, device=x.device), out=out)
