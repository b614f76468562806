"""Averages of k x k pixels, and the weight gradient of a convolution straight from them.

    pooled = pool(x, 2)                                           # [N, C, H, W] -> [N, C, ceil(H/2), ceil(W/2)]
    pooled_weight_gradient(grad_y, pooled, (H, W), 2, weight.shape, padding=1)

equals expanding the averages to a full map and calling the ordinary kernel, without the full map and with 1 / k^2 of
the multiply-adds (csrc/pooling_weight.cpp has the identity). Blocks at the lower and right edge may be smaller.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ShoestringError
from .calls import Launch, code, dense, forms, planar, require_contiguous
from .core import core, threads
from .define import define
from .references import pooling as reference

SCRATCH_BYTES = 2_000_000  # unless one row of blocks needs more
BAND_PIXELS = 1024  # of the gradient at a time, unless one row of blocks is more
Pair = Sequence[int]


def _apart(floats: int) -> int:
    """Room for them in whole pairs of cache lines: threads that write to the same ones wait for each other."""
    return -(-floats // 32) * 32


def _pool(launch: Launch, out: Tensor, x: Tensor, k: int, last: bool) -> None:
    n, c, height, width = x.shape
    planes, apart, inner = (n, x.stride(0), c) if last else (n * c, height * width, 1)
    count = max(1, min(threads(), planes))
    own = _apart((width + -(-width // k)) * inner)
    scratch = x.new_empty(count * own, dtype=torch.float32)
    launch(core.pool, x, code(x), planes, apart, height, width, inner, k, out, scratch, own, count)


_pool_op = define("pool(Tensor(a!) out, Tensor x, int k, bool last) -> ()", **forms(_pool, reference.pool))


def pool(x: Tensor, k: int) -> Tensor:
    """Maps -> the averages of their k x k blocks, in their own layout and dtype; sums are FP32."""
    if k < 1 or x.dim() != 4:
        raise ShoestringError(f"blocks of {k} x {k} of {tuple(x.shape)} cannot be averaged: pass [N, C, H, W], k >= 1")
    n, c, height, width = x.shape
    last = x.stride()[1:] == (1, width * c, c)  # channels_last, with or without gaps between samples
    shape, form = (n, c, -(-height // k), -(-width // k)), torch.channels_last if last else torch.contiguous_format
    out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=form)
    _pool_op(out, x if last else x.contiguous(), k, last)
    return out


def expand(pooled: Tensor, size: Pair, k: int) -> Tensor:
    """Averages -> the map [N, C, *size] that has each block's average at all of its pixels."""
    height, width = size
    return pooled.repeat_interleave(k, 2)[:, :, :height].repeat_interleave(k, 3)[..., :width]


class _Taps(NamedTuple):
    """Of a convolution along one axis: the pixels that output 0 reads, each kind of reading once; `kinds` has the
    place among them of each tap."""

    first: list[int]
    kinds: list[int]

    @classmethod
    def of(cls, kernel: int, size: int, k: int, stride: int, padding: int, dilation: int) -> "_Taps":
        """Where a stride goes by whole blocks, taps within one block read the same averages."""
        pixels = [tap * dilation - padding for tap in range(kernel)]
        if stride % k or size % k:
            return cls(pixels, list(range(kernel)))
        blocks = [pixel // k for pixel in pixels]
        kinds = sorted(set(blocks))
        return cls([k * block for block in kinds], [kinds.index(block) for block in blocks])


def _weight_gradient(
    launch: Launch, out: Tensor, grad: Tensor, pooled: Tensor, size: Pair, k: int, stride: Pair, padding: Pair,
    dilation: Pair, accumulate: bool, scratch_bytes: int,
) -> None:  # fmt: skip
    grad, pooled = dense(grad), dense(pooled.to(grad.dtype))
    axes = zip(out.shape[2:], size, (k, k), stride, padding, dilation, strict=True)
    rows, columns = (_Taps.of(*axis) for axis in axes)
    (samples, channels, out_height, out_width), (inputs, high, wide) = grad.shape, pooled.shape[1:]
    # Rows of blocks at a time, and the rows of the gradient that read them for any tap.
    band = max(1, min(high, BAND_PIXELS * stride[0] // (k * out_width)))
    most = min(out_height, (band * k + max(rows.first) - min(rows.first)) // stride[0] + 1)
    # Output channels of a thread at a time. Each has its rows, a line of their sums, the block sums of a band for a row
    # of taps, and the sums over all; a thread has averages besides. Threads do not write to one cache line.
    lanes, tile, averages = core.lanes, 2 * core.lanes, band * wide * inputs
    each = (most + 1) * out_width + len(columns.first) * (band * wide + len(rows.first) * inputs)
    room = (scratch_bytes // 4 // threads() - averages) // each // tile * tile
    share = max(lanes, min(-(-channels // threads() // lanes) * lanes, room))
    floats = _apart(averages + -(-share // tile) * tile * each)
    count = min(threads(), -(-channels // share))
    scratch = grad.new_empty(count * floats, dtype=torch.float32)
    ranges = grad.new_empty(2 * (len(rows.first) * high + len(columns.first) * wide), dtype=torch.int64)
    sizes = [samples, channels, inputs, out_height, out_width, *size, k, *stride, share, band, most]
    taken = (rows.first, rows.kinds, columns.first, columns.kinds)
    launch(core.pooled_weight_gradient, grad, code(grad), planar(grad), pooled, planar(pooled), sizes, *taken, out,
           code(out), accumulate, scratch, floats, ranges, count)  # fmt: skip


_weight_gradient_op = define(
    "pooled_weight_gradient(Tensor(a!) out, Tensor grad_y, Tensor pooled, int[] size, int k, int[] stride, "
    "int[] padding, int[] dilation, bool accumulate, int scratch_bytes) -> ()",
    **forms(_weight_gradient, reference.weight_gradient),
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
    require_contiguous("pooled_weight_gradient", out=out)
    settings = [list(pair) for pair in (stride, padding, dilation)]
    _weight_gradient_op(out, grad_y, pooled, list(size), k, *settings, accumulate, scratch_bytes)
    return out
