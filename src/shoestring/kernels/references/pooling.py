"""Reference implementation of csrc/pooling.cpp and pooling_weight.cpp, for any device and in any precision."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def pool(out: Tensor, x: Tensor, k: int, last: bool) -> None:
    wide = torch.promote_types(x.dtype, torch.float32)
    pad = (0, -x.shape[3] % k, 0, -x.shape[2] % k)
    sums = F.avg_pool2d(F.pad(x.to(wide), pad), k, divisor_override=1)
    count = F.avg_pool2d(F.pad(torch.ones_like(x[:1, :1], dtype=wide), pad), k, divisor_override=1)
    out.copy_(sums / count)


def weight_gradient(
    out: Tensor,
    grad: Tensor,
    pooled: Tensor,
    size: Sequence[int],
    k: int,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    accumulate: bool,
    scratch_bytes: int,
) -> None:
    """dW[o, c, u, v] = sum of G[o, u, v] p, with G = R_u grad C_v^T: matrices of zeros and ones say who reads what."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    grad, pooled, (high, wid) = grad.to(wide), pooled.to(wide), out.shape[2:]
    axes = zip(grad.shape[2:], size, (high, wid), stride, padding, dilation, strict=True)
    rows, columns = (_readers(*axis, k=k, like=grad) for axis in axes)
    for u in range(high):
        for v in range(wid):
            sums = rows[u] @ grad @ columns[v].t()
            tap = torch.einsum("noab,ncab->oc", sums, pooled)
            out[:, :, u, v] = out[:, :, u, v] + tap if accumulate else tap


def _readers(
    outputs: int, size: int, kernel: int, stride: int, padding: int, dilation: int, *, k: int, like: Tensor
) -> Tensor:
    """For each tap a matrix [blocks, outputs]: 1 where the tap of an output reads a pixel of the block."""
    pixel = torch.arange(outputs, device=like.device) * stride - padding
    pixel = pixel + dilation * torch.arange(kernel, device=like.device)[:, None]
    block = torch.where((pixel >= 0) & (pixel < size), pixel.div(k, rounding_mode="floor"), -1)
    return (block[:, None, :] == torch.arange(-(-size // k), device=like.device)[:, None]).to(like.dtype)
