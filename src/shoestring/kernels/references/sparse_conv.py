"""Reference implementations of the sparse kernels in PyTorch: any device; one layer is made dense at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional
from torch.nn.grad import conv2d_input, conv2d_weight

from . import bitmask as reference

ESCAPE = 255  # in gaps: 255 zeros skipped, and no nonzero


def positions(index: Tensor, numel: int, count: int | None = None) -> Tensor:
    """An index -> the positions of its nonzeros, int64, rising; on fake tensors too, given their `count`."""
    if index.numel() == -(-numel // 8):
        return _true(reference.unpack_bits(index, numel), count)
    gaps = index.to(torch.int64)
    return (torch.where(gaps == ESCAPE, ESCAPE, gaps + 1).cumsum(0) - 1)[_true(gaps != ESCAPE, count)]


def _true(mask: Tensor, count: int | None) -> Tensor:
    if count is not None and is_fake(mask):
        return mask.nonzero_static(size=count).flatten()
    return mask.nonzero().flatten()


def gaps(positions: Tensor) -> Tensor:
    """Rising positions -> the zeros before each, as bytes with an escape for every 255 of them."""
    skipped = positions.to(torch.int64).diff(prepend=positions.new_full((1,), -1, dtype=torch.int64)) - 1
    ends = (skipped // ESCAPE + 1).cumsum(0)
    out = skipped.new_full((int(ends[-1]) if ends.numel() else 0,), ESCAPE)
    out[ends - 1] = skipped % ESCAPE
    return out.to(torch.uint8)


def densify(values: Tensor, index: Tensor, shape: list[int]) -> Tensor:
    """Nonzeros and their index -> the dense weight."""
    dense = values.new_zeros(shape)
    dense.view(-1)[positions(index, dense.numel(), values.numel())] = values
    return dense


def _wide(x: Tensor) -> Tensor:
    """A tensor in the precision of the arithmetic: FP32, or FP64 if it is that."""
    return x if x.dtype == torch.float64 else x.float()


def _activate(x: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
    x = _wide(x)
    if scale is None or shift is None:
        return x
    return (x * scale.view(-1, 1, 1) + shift.view(-1, 1, 1)).relu()


def conv2d(
    x: Tensor, values: Tensor, index: Tensor, out_channels: int, kernel: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], scale: Tensor | None, shift: Tensor | None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    weight = densify(_wide(values), index, [out_channels, x.shape[1], *kernel])
    wide_bias = None if bias is None else _wide(bias)
    return functional.conv2d(_activate(x, scale, shift), weight, wide_bias, stride, padding, dilation).to(x.dtype)


def conv2d_input_gradient(
    dy: Tensor, values: Tensor, index: Tensor, input_size: Sequence[int], kernel: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], first: int, last: int,
) -> Tensor:  # fmt: skip
    weight = densify(_wide(values), index, [dy.shape[1], input_size[1], *kernel])[:, first:last]
    size = [input_size[0], last - first, *input_size[2:]]
    return conv2d_input(size, weight, _wide(dy), stride, padding, dilation).to(dy.dtype)


def conv2d_weight_gradient(
    gradient: Tensor, x: Tensor, dy: Tensor, index: Tensor, kernel: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], scale: Tensor | None, shift: Tensor | None, accumulate: bool,
) -> None:  # fmt: skip
    x, shape = _activate(x, scale, shift), [dy.shape[1], x.shape[1], *kernel]
    dense = conv2d_weight(x, shape, _wide(dy), stride, padding, dilation)
    at_nonzeros = dense.reshape(-1)[positions(index, dense.numel(), gradient.numel())]
    gradient.copy_(_wide(gradient) + at_nonzeros if accumulate else at_nonzeros)
