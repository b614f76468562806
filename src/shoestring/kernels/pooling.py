"""Averages of k x k pixels, and the weight gradient of a convolution straight from them.

    pooled = pool(x, 2)                                           # [N, C, H, W] -> [N, C, ceil(H/2), ceil(W/2)]
    pooled_weight_gradient(grad_y, pooled, (H, W), 2, weight.shape, padding=1)

equals expanding the averages to a full map and calling the ordinary kernel, without the full map and with 1 / k^2 of
the multiply-adds (csrc/pooling.cpp has the identity). Blocks at the lower and right edge may be smaller.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..errors import ShoestringError
from .calls import code, forms, planar
from .core import core, threads
from .define import define
from .references import pooling as reference

SCRATCH_BYTES = 2_000_000  # of block sums, unless one channel of one sample needs more
Pair = Sequence[int]


def _pool(launch, out: Tensor, x: Tensor, k: int) -> None:
    n, c, height, width = x.shape
    planes, inner = (n * c, 1) if planar(x) else (n, c)
    count = max(1, min(threads(), planes))
    scratch = x.new_empty(count * (width + -(-width // k)) * inner, dtype=torch.float32)
    launch(core.pool, x, code(x), planes, height, width, inner, k, out, scratch, count)


_pool_op = define("pool(Tensor(a!) out, Tensor x, int k) -> ()", **forms(_pool, reference.pool))


def pool(x: Tensor, k: int) -> Tensor:
    """Maps -> the averages of their k x k blocks, in their own layout and dtype; sums are FP32."""
    if k < 1 or x.dim() != 4:
        raise ShoestringError(f"blocks of {k} x {k} of {tuple(x.shape)} cannot be averaged: pass [N, C, H, W], k >= 1")
    form = torch.contiguous_format if planar(x) else torch.channels_last
    n, c, height, width = x.shape
    shape = (n, c, -(-height // k), -(-width // k))
    out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=form)
    _pool_op(out, x.contiguous(memory_format=form), k)
    return out


def expand(pooled: Tensor, size: Pair, k: int) -> Tensor:
    """Averages -> the map [N, C, *size] that has each block's average at all of its pixels."""
    height, width = size
    return pooled.repeat_interleave(k, 2)[:, :, :height].repeat_interleave(k, 3)[..., :width]


class _Blocks:
    """How a weight gradient is cut: samples and output channels at a time, so that their block sums fit the scratch."""

    def __init__(self, grad: Tensor, pooled: Tensor, taps: int, scratch_bytes: int) -> None:
        samples, channels = grad.shape[:2]
        self.blocks = pooled.shape[2] * pooled.shape[3]
        floats = max(1, scratch_bytes // 4)
        self.channels = max(1, min(channels, floats // (taps * self.blocks)))
        self.samples = max(1, min(samples, floats // (self.channels * taps * self.blocks)))
        self.all_samples, self.all_channels, self.taps, self.inputs = samples, channels, taps, pooled.shape[1]

    def scratch(self, like: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Block sums, averages of the same samples, the product, and a row of the gradient per thread."""
        columns, rows = self.samples * self.blocks, self.channels * self.taps
        sizes = (rows * columns, self.inputs * columns, rows * self.inputs, threads() * width)
        sums, averages, product, lines = (like.new_empty(size, dtype=torch.float32) for size in sizes)
        return sums, averages, product, lines

    def cuts(self, of: str) -> Iterator[tuple[int, int]]:
        most, step = getattr(self, f"all_{of}"), getattr(self, of)
        return ((start, min(step, most - start)) for start in range(0, most, step))


def _weight_gradient(out, grad, pooled, size, k, stride, padding, dilation, accumulate, scratch_bytes) -> None:
    kernel = out.shape[2:]
    cut = _Blocks(grad, pooled, kernel[0] * kernel[1], scratch_bytes)
    sums, averages, product, lines = cut.scratch(grad, grad.shape[3])
    for first, count in cut.cuts("channels"):
        total = product[: count * cut.taps * cut.inputs].view(count * cut.taps, cut.inputs).zero_()
        for start, samples in cut.cuts("samples"):
            columns = samples * cut.blocks
            sizes = [samples, grad.shape[1], first, count, *grad.shape[2:], *size, k, *kernel]
            sizes += [*stride, *padding, *dilation]
            part = grad[start : start + samples]
            core.block_sums(part.data_ptr(), code(grad), sizes, sums.data_ptr(), lines.data_ptr(), threads())
            wide = averages[: columns * cut.inputs].view(samples, *pooled.shape[2:], cut.inputs)
            wide.copy_(pooled[start : start + samples].permute(0, 2, 3, 1))
            left = sums[: count * cut.taps * columns].view(count * cut.taps, columns)
            total.addmm_(left, wide.view(columns, cut.inputs))
        taps = total.view(count, *kernel, cut.inputs).permute(0, 3, 1, 2)
        target = out[first : first + count]
        target.add_(taps) if accumulate else target.copy_(taps)


def _compiled(out, grad, pooled, *rest) -> None:
    wide = any(tensor.dtype == torch.float64 for tensor in (out, grad, pooled))
    (reference.weight_gradient if wide else _weight_gradient)(out, grad.contiguous(), pooled, *rest)


def _fake(out, grad, pooled, size, k, stride, padding, dilation, accumulate, scratch_bytes) -> None:
    if core is None or out.dtype == torch.float64 or not grad.is_cpu:
        return reference.weight_gradient(
            out, grad, pooled, size, k, stride, padding, dilation, accumulate, scratch_bytes
        )
    grad = grad.contiguous()
    _Blocks(grad, pooled, out.shape[2] * out.shape[3], scratch_bytes).scratch(grad, grad.shape[3])
    return None


_weight_gradient_op = define(
    "pooled_weight_gradient(Tensor(a!) out, Tensor grad_y, Tensor pooled, int[] size, int k, int[] stride, "
    "int[] padding, int[] dilation, bool accumulate, int scratch_bytes) -> ()",
    twin=reference.weight_gradient,
    fake=_fake,
    compiled=_compiled,
)


def pooled_weight_gradient(
    grad_y: Tensor,
    pooled: Tensor,
    size: Pair,
    k: int,
    weight_shape: Pair,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    *,
    out: Tensor | None = None,
    scratch_bytes: int = SCRATCH_BYTES,
) -> Tensor:
    """The gradient of y and the averages of x [N, C, *size] -> the gradient of the weight, added to `out` if given.

    One group only. Sums are FP32 (FP64 for FP64) and are rounded once per call.
    """
    if pooled.shape[1] != weight_shape[1] or grad_y.shape[1] != weight_shape[0]:
        raise ShoestringError(
            f"a weight {tuple(weight_shape)} has no gradient from {tuple(grad_y.shape)} and averages "
            f"{tuple(pooled.shape)}: check the channels; convolutions in groups are not for pooled maps"
        )
    accumulate = out is not None
    out = grad_y.new_empty(tuple(weight_shape)) if out is None else out
    settings = [list(pair) for pair in (stride, padding, dilation)]
    _weight_gradient_op(out, grad_y, pooled, list(size), k, *settings, accumulate, scratch_bytes)
    return out
