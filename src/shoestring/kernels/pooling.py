"""Averages of k x k pixels, and the weight gradient of a convolution straight from them.

    pooled = pool(x, 2)                                           # [N, C, H, W] -> [N, C, ceil(H/2), ceil(W/2)]
    pooled_weight_gradient(grad_y, pooled, (H, W), 2, weight.shape, padding=1)

equals expanding the averages to a full map and calling the ordinary kernel, without the full map and with 1 / k^2 of
the multiply-adds (csrc/pooling.cpp has the identity). Blocks at the lower and right edge may be smaller.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ShoestringError
from .calls import code, forms
from .core import core, threads
from .define import define
from .references import pooling as reference

SCRATCH_BYTES = 2_000_000  # of block sums, unless one channel of one sample needs more
Pair = Sequence[int]
Launch = Callable[..., None]


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


class _Cut:
    """How a weight gradient is made: as many samples and output channels at a time as the scratch has room for."""

    def __init__(
        self, out: Tensor, grad: Tensor, pooled: Tensor, size: Pair, k: int, stride: Pair, padding: Pair,
        dilation: Pair, scratch_bytes: int,
    ) -> None:  # fmt: skip
        axes = zip(out.shape[2:], size, (k, k), stride, padding, dilation, strict=True)
        self.rows, self.columns = (_Taps.of(*axis) for axis in axes)
        self.taps, self.inputs = len(self.rows.first) * len(self.columns.first), pooled.shape[1]
        self.high, self.wide = pooled.shape[2:]
        self.blocks, floats = self.high * self.wide, max(1, scratch_bytes // 4)
        self.all_samples, self.all_channels = grad.shape[:2]
        # A row of the gradient, with zeros before and after it where taps reach beyond the outputs.
        self.lead = max(0, *self.columns.first)
        self.line = _apart(self.lead + max(grad.shape[3], self.wide * k - min(self.columns.first)))
        self.channels = max(1, min(self.all_channels, floats // (self.taps * self.blocks)))
        self.samples = max(1, min(self.all_samples, floats // (self.channels * self.taps * self.blocks)))

    def scratch(self, grad: Tensor) -> tuple[Tensor, ...]:
        """Block sums, averages of the same samples, their product, a row of the gradient per thread; integers."""
        columns, rows = self.samples * self.blocks, self.channels * self.taps
        sizes = (rows * columns, self.inputs * columns, rows * self.inputs, threads() * self.line)
        floats = (grad.new_empty(size, dtype=torch.float32) for size in sizes)
        ranges = 2 * (len(self.rows.first) * self.high + len(self.columns.first) * self.wide)
        return *floats, grad.new_empty(ranges, dtype=torch.int64)


def _cuts(most: int, step: int) -> Iterator[tuple[int, int]]:
    return ((start, min(step, most - start)) for start in range(0, most, step))


def _weight_gradient(
    out: Tensor, grad: Tensor, pooled: Tensor, size: Pair, k: int, stride: Pair, padding: Pair, dilation: Pair,
    accumulate: bool, scratch_bytes: int,
) -> None:  # fmt: skip
    cut = _Cut(out, grad, pooled, size, k, stride, padding, dilation, scratch_bytes)
    sums, averages, product, lines, ranges = cut.scratch(grad)
    for first, count in _cuts(cut.all_channels, cut.channels):
        total = product[: count * cut.taps * cut.inputs].view(count * cut.taps, cut.inputs).zero_()
        for start, samples in _cuts(cut.all_samples, cut.samples):
            columns = samples * cut.blocks
            sizes = [samples, grad.shape[1], first, count, *grad.shape[2:], *size, k, *stride, cut.lead, cut.line]
            places = (sums.data_ptr(), lines.data_ptr(), ranges.data_ptr())
            read = (grad[start].data_ptr(), code(grad), sizes, cut.rows.first, cut.columns.first)
            core.block_sums(*read, *places, threads())
            wide = averages[: columns * cut.inputs].view(samples, cut.high, cut.wide, cut.inputs)
            wide.copy_(pooled[start : start + samples].permute(0, 2, 3, 1))
            left = sums[: count * cut.taps * columns].view(count * cut.taps, columns)
            total.addmm_(left, wide.view(columns, cut.inputs))
        kinds = total.view(count, len(cut.rows.first), len(cut.columns.first), cut.inputs)
        for u, row in enumerate(cut.rows.kinds):
            for v, column in enumerate(cut.columns.kinds):
                tap, target = kinds[:, row, column], out[first : first + count, :, u, v]
                target.add_(tap) if accumulate else target.copy_(tap)


def _compiled(out: Tensor, grad: Tensor, pooled: Tensor, *rest: Any) -> None:
    wide = any(tensor.dtype == torch.float64 for tensor in (out, grad, pooled))
    (reference.weight_gradient if wide else _weight_gradient)(out, grad.contiguous(), pooled, *rest)


def _fake(
    out: Tensor, grad: Tensor, pooled: Tensor, size: Pair, k: int, stride: Pair, padding: Pair, dilation: Pair,
    accumulate: bool, scratch_bytes: int,
) -> None:  # fmt: skip
    settings = (size, k, stride, padding, dilation)
    if core is None or out.dtype == torch.float64 or grad.device.type != "cpu":
        reference.weight_gradient(out, grad, pooled, *settings, accumulate, scratch_bytes)
    else:
        grad = grad.contiguous()
        _Cut(out, grad, pooled, *settings, scratch_bytes).scratch(grad)


_weight_gradient_op = define(
    "pooled_weight_gradient(Tensor(a!) out, Tensor grad_y, Tensor pooled, int[] size, int k, int[] stride, "
    "int[] padding, int[] dilation, bool accumulate, int scratch_bytes) -> ()",
    reference=reference.weight_gradient,
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
