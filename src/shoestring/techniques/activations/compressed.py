"""Compressed activations: a saved tensor as block averages, in a few bits, or both.

| word | stored | error |
|---|---|---|
| poolK | averages of K x K pixels, of K tokens, or of K x K patches (the class token stays exact) | a low-pass filter |
| int8, int4, int2 | stochastic rounding in groups of 256 | none on average |
| poolK+intB | averages in BF16, and what they leave out in B bits | none on average |

(Barley, Fröning, arXiv 2409.11902: pooling; DIVISION, ICML 2023: both.) The forward pass is untouched. Where the
tensor is the input of a convolution or a linear layer, the weight's gradient is made straight from what is stored:
`weight_gradient(layer, grad)`, from averages without expanding them, else from a few samples at a time.
"""

import warnings
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.pooling import expand, pool, pooled_weight_gradient
from ...kernels.quantise import Key, dequantise, is_whole, quantise
from ...passes.checksums import is_traced
from ...passes.layers import Convolution
from ...passes.saved_tensors import Stored, samples_at_a_time
from ...taping.recorder import unseen

# Of a tensor, so much is expanded at a time, or one sample; of a large one more: what each call begins with adds up
# (WRN-28-2, batch 100, int4, Intel Xeon, AVX512, 2 threads: 1.38 s per step with the least, 1.19 with eighths).
PIECE_BYTES, PIECE_SHARE = 1 << 18, 8
PRIME = 0x9E3779B1  # the pieces of a tensor are rounded by keys so far apart
LEAST_ROW = 64  # a row that is shorter shares its groups with its neighbours


class Maps(NamedTuple):
    """A tensor seen as maps [N, C, H, W], and the tokens before them that stay as they are."""

    maps: Tensor
    before: Tensor | None = None

    @classmethod
    def of(cls, tensor: Tensor, channel: int) -> "Maps | None":
        """`channel`: the dimension of the channels, 1 or -1. None where there is nothing to average over."""
        if tensor.dim() == 4:
            return cls(tensor if channel == 1 else tensor.permute(0, 3, 1, 2))
        if tensor.dim() != 3 or channel == 1:
            return None
        side = round((tensor.shape[1] - 1) ** 0.5)
        if side > 1 and side * side == tensor.shape[1] - 1:  # a class token and a grid of patches
            grid = tensor[:, 1:].unflatten(1, (side, side)).permute(0, 3, 1, 2)
            return cls(grid, tensor[:, :1].clone())
        return cls(tensor.transpose(1, 2).unsqueeze(2))

    def tensor(self, channel: int, dimensions: int) -> Tensor:
        """Back to the shape that it had."""
        if channel == 1:
            return self.maps
        last = self.maps.permute(0, 2, 3, 1)
        if dimensions == 4:
            return last
        tokens = last.flatten(1, 2)
        return tokens if self.before is None else torch.cat([self.before, tokens], 1)


class Compressed:
    """What all have in common: samples can be had back a few at a time."""

    __slots__ = ("__weakref__", "dtype", "origin", "shape")

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype

    def samples(self, start: int, stop: int) -> Tensor:
        """Samples from `start` to `stop`, as they are known."""
        raise NotImplementedError

    def stored(self) -> Iterator[Tensor]:
        """The tensors in which it is stored."""
        raise NotImplementedError

    def take(self) -> Tensor:
        return self.samples(0, self.shape[0])

    def weight_gradient(self, layer: Any, grad: Tensor) -> Tensor:
        """The gradient of a layer's weight from the gradient of its output, a few samples at a time."""
        if isinstance(layer, Convolution):  # PyTorch's own would reorder the weight for each few
            total = grad.new_zeros(layer.weight.shape)
            for part, x in self.parts():
                layer.add_weight_gradient(total, grad[part], x)
            return total
        gradients = (layer.weight_gradient(grad[part], x, None) for part, x in self.parts())
        total = next(gradients)
        for gradient in gradients:
            total += gradient
        return total

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        return ((slice(start, stop), self.samples(start, stop)) for start, stop in pieces(self.shape, self.dtype))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.stored())


def pieces(shape: torch.Size, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    """A tensor's shape -> ranges of its samples, a piece or a sample at a time."""
    count = samples_at_a_time(shape, dtype, max(PIECE_BYTES, prod(shape) * dtype.itemsize // PIECE_SHARE))
    return ((start, min(start + count, shape[0])) for start in range(0, shape[0], count))


class Quantised(Compressed):
    """8, 4 or 2 bits per element; see kernels/quantise.py."""

    __slots__ = ("bits", "codes", "last", "per_sample", "ranges", "row")

    def __init__(self, tensor: Tensor, bits: int, key: Key) -> None:
        super().__init__(tensor)
        self.bits = bits
        self.last = tensor.dim() == 4 and not tensor.is_contiguous() and tensor.permute(0, 2, 3, 1).is_contiguous()
        flat = tensor.permute(0, 2, 3, 1) if self.last else tensor.contiguous()
        self.row = _row_length(tensor.shape, self.last)
        self.per_sample = flat[0].numel() // self.row
        self.codes, self.ranges = quantise(flat.reshape(-1, self.row), bits, key)

    def is_whole(self) -> bool:
        with unseen():  # a tape goes on with a group of NaN, as does the pass whose loss or gradients are to be NaN
            return is_traced() or is_whole(self.ranges)

    def samples(self, start: int, stop: int) -> Tensor:
        rows = slice(start * self.per_sample, stop * self.per_sample)
        flat = dequantise(self.codes[rows], self.ranges[rows], self.row, self.bits, self.dtype)
        if self.last:
            _, c, height, width = self.shape
            return flat.view(stop - start, height, width, c).permute(0, 3, 1, 2)
        return flat.view(stop - start, *self.shape[1:])

    def stored(self) -> Iterator[Tensor]:
        yield from (self.codes, self.ranges)


def _row_length(shape: torch.Size, last: bool) -> int:
    """Groups stay inside a channel of a map, or a token, where these are long enough."""
    row = 1 if last else prod(shape[2:]) if len(shape) == 4 else shape[-1]
    return row if row >= LEAST_ROW else prod(shape[1:])


class Pooled(Compressed):
    """Averages of k x k blocks of maps, or of k tokens."""

    __slots__ = ("averages", "before", "channel", "k", "size")

    def __init__(self, tensor: Tensor, k: int, channel: int, dtype: torch.dtype | None = None) -> None:
        super().__init__(tensor)
        found = Maps.of(tensor, channel)
        assert found is not None, "takes_pool is asked before"
        self.k, self.channel, self.size, self.before = k, channel, found.maps.shape[2:], found.before
        averages = pool(found.maps, k)
        self.averages = averages if dtype is None else averages.to(dtype)

    def samples(self, start: int, stop: int) -> Tensor:
        maps = expand(self.averages[start:stop].to(self.dtype), self.size, self.k)
        before = None if self.before is None else self.before[start:stop]
        return Maps(maps, before).tensor(self.channel, len(self.shape))

    def stored(self) -> Iterator[Tensor]:
        yield self.averages
        if self.before is not None:
            yield self.before

    def weight_gradient(self, layer: Any, grad: Tensor) -> Tensor:
        if isinstance(layer, Convolution):
            if layer.groups > 1:
                return super().weight_gradient(layer, grad)
            settings = layer.stride, layer.padding, layer.dilation
            return pooled_weight_gradient(grad, self.averages, self.size, self.k, layer.weight.shape, *settings)
        if not hasattr(layer, "weight"):  # a sparse layer's values
            return super().weight_gradient(layer, grad)
        return self._linear(grad)

    def _linear(self, grad: Tensor) -> Tensor:
        """Blocks of tokens: the sum of the gradients in each times its average."""
        found = Maps.of(grad, -1)
        assert found is not None
        sums = pool(found.maps, self.k) * _counts(self.size, self.k, grad)
        total = torch.einsum("noab,ncab->oc", sums, self.averages)
        if found.before is not None and self.before is not None:
            total += found.before.flatten(0, 1).t() @ self.before.flatten(0, 1)
        return total


def _counts(size: torch.Size, k: int, like: Tensor) -> Tensor:
    """How many pixels are in each block."""
    rows, columns = (torch.full((-(-n // k),), k, dtype=like.dtype, device=like.device) for n in size)
    for counts, n in zip((rows, columns), size, strict=True):
        counts[-1:].fill_(n - k * (len(counts) - 1))
    return rows[:, None] * columns


class Divided(Compressed):
    """Averages in BF16, and in a few bits what they leave out."""

    __slots__ = ("averages", "rest")

    def __init__(self, tensor: Tensor, k: int, bits: int, channel: int, key: Key) -> None:
        super().__init__(tensor)
        self.averages = Pooled(tensor, k, channel, torch.bfloat16)
        self.rest = [
            (a, b, Quantised((tensor[a:b] - self.averages.samples(a, b)), bits, (key[0] + number * PRIME, key[1])))
            for number, (a, b) in enumerate(pieces(tensor.shape, tensor.dtype))
        ]

    def is_whole(self) -> bool:
        return all(rest.is_whole() for _, _, rest in self.rest)

    def samples(self, start: int, stop: int) -> Tensor:
        parts = [
            rest.samples(max(a, start) - a, min(b, stop) - a) for a, b, rest in self.rest if a < stop and start < b
        ]
        rest = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.averages.samples(start, stop).add_(rest)

    def stored(self) -> Iterator[Tensor]:
        yield from self.averages.stored()
        for _, _, rest in self.rest:
            yield from rest.stored()


class Exact(Compressed):
    """The tensor itself, where it cannot be compressed."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self.tensor = tensor

    def samples(self, start: int, stop: int) -> Tensor:
        return self.tensor[start:stop]

    def stored(self) -> Iterator[Tensor]:
        yield self.tensor


# -- what a codec's word means ----------------------------------------------------------------------------------
Draw = Callable[[], Key]  # the next key of random numbers
Pack = Callable[..., Stored]  # of a tensor, its dimension of channels, and random numbers


def pack_pool(k: int) -> Pack:
    def pack(tensor: Tensor, channel: int, draw: Draw) -> Stored:
        return Pooled(tensor, k, channel)

    return pack


def pack_int(bits: int) -> Pack:
    def pack(tensor: Tensor, channel: int, draw: Draw) -> Stored:
        return _finite(tensor, Quantised(tensor, bits, draw()))

    return pack


def pack_both(k: int, bits: int) -> Pack:
    def pack(tensor: Tensor, channel: int, draw: Draw) -> Stored:
        return _finite(tensor, Divided(tensor, k, bits, channel, draw()))

    return pack


def _finite(tensor: Tensor, packed: "Quantised | Divided") -> Stored:
    """A tensor with a NaN or an infinity is stored as it is, so that whoever looks for one still finds it."""
    if packed.is_whole():
        return packed
    warnings.warn(
        f"a saved tensor {tuple(tensor.shape)} holds NaN or infinity and is stored exactly, not in "
        f"{packed.nbytes:,} bytes", stacklevel=2,
    )  # fmt: skip
    return Exact(tensor)


def takes_pool(k: int) -> Callable[[Tensor, int], bool]:
    """Maps and tokens of floats, of which at least one side has k pixels and none is shorter, unless it is 1."""

    def takes(tensor: Tensor, channel: int) -> bool:
        if not takes_floats(tensor, channel) or (found := Maps.of(tensor, channel)) is None:
            return False
        sides = [side for side in found.maps.shape[2:] if side > 1]
        return bool(sides) and min(sides) >= k

    return takes


def takes_floats(tensor: Tensor, channel: int) -> bool:
    return tensor.is_floating_point() and tensor.dim() > 1
