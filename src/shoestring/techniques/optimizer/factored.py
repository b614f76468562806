"""SM3 and Adafactor: factored second moments, one number per row and one per column of a matrix.

A weight is read as a matrix of its first dimension by all others (a vector as one column: nothing is saved there, and
nothing lost). Both run in PyTorch on a few rows at a time, so their scratch does not grow with the tensor.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import gcd, sqrt

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode

from ...distributed import local, over_parts, part_like
from ...kernels.moments import Moment, random_bits
from ...kernels.references.moments import BLOCK, flat, narrow, widen
from ...kernels.update import Noise, laid_out
from .base import LeanOptimizer

CHUNK = 1 << 15  # values that are widened at a time


@dataclass(frozen=True)
class SM3:
    """Settings of SM3-II (Anil et al. 2019): the smaller sum of squares of row and column stands for a value's.

    With momentum, as published, the state is one moment, whose form may be narrow, and next to nothing else.
    """

    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return LeanSM3(parameters, self)


@dataclass(frozen=True)
class Adafactor:
    """Settings of Adafactor (Shazeer and Stern 2018), without momentum as published.

    A `relative` lr is a share of the weight's own size, and falls as 1 / sqrt(step) once that is less; otherwise it is
    the size of the update, as Adam's. beta2 = 1 - step^-decay; the update's RMS is clipped at `clip`.
    """

    lr: float = 0.01
    relative: bool = True
    decay: float = 0.8
    clip: float = 1.0
    eps: tuple[float, float] = (1e-30, 1e-3)
    weight_decay: float = 0.0  # decoupled

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return LeanAdafactor(parameters, self)


# -- weights as matrices --------------------------------------------------------------------------------------
def columns_of(weight: Tensor) -> int:
    return weight.numel() // weight.shape[0] if weight.dim() > 1 else 1


def row_parts(weight: Tensor, columns: int) -> Iterator[tuple[slice, slice]]:
    """A weight -> (some of its rows, where they lie in memory) until all are done; blocks of 8 bits stay whole."""
    rows, unit = weight.numel() // columns, BLOCK // gcd(columns, BLOCK)
    height = max(1, CHUNK // columns // unit) * unit
    for top in range(0, rows, height):
        bottom = min(top + height, rows)
        yield slice(top, bottom), slice(top * columns, bottom * columns)
        if active_fake_mode() and top:
            return  # a trace has no values, and no part needs more than the second, which finds tensors of the first


def read(x: Tensor, part: slice, columns: int) -> Tensor:
    """A copy of a part as a matrix in FP32."""
    return flat(x)[part].to(torch.promote_types(x.dtype, torch.float32), copy=True).view(-1, columns)


def write(weight: Tensor, part: slice, numbers: Tensor, noise: Noise) -> None:
    bits = random_bits(noise, 0, part, weight.device) if weight.dtype == torch.bfloat16 else None
    narrow(flat(weight), None, part, numbers.view(-1), bits)


class Factored(LeanOptimizer):
    """Base of both: one accumulator per row and one per column. Of a weight in shards a process has its rows, and the
    columns, which are of all rows, are added up over the processes."""

    why_not_folded = "a second moment needs the square of their sum"

    def accumulators(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        state, columns = self.state[weight], columns_of(weight)
        if "rows" not in state:
            wide = torch.promote_types(weight.dtype, torch.float32)
            state["step"] = 0
            rows = torch.zeros(local(weight).numel() // columns, dtype=wide, device=weight.device)
            state["rows"] = part_like(weight, rows, (weight.numel() // columns,))
            state["columns"] = torch.zeros(columns, dtype=wide, device=weight.device)
        state["step"] += 1
        return local(state["rows"]), state["columns"]


# -- SM3 ------------------------------------------------------------------------------------------------------
class LeanSM3(Factored):
    """SM3-II."""

    def update(self, weight: Tensor, group: dict, gradient: Tensor, factor: float, noise: Noise) -> None:
        """sum = min(row, column) + g^2; m = mu m + (1 - mu) g / sqrt(sum); weight -= lr m; row, column = max of sum."""
        own = local(weight)
        gradient = laid_out(own, gradient)
        rows, columns = self.accumulators(weight)
        most = torch.zeros_like(columns)
        # Before the rows, of which this process may have none.
        momentum = self.moment(weight, group, "momentum_buffer") if group["momentum"] else None
        for some, part in row_parts(own, len(columns)):
            w = read(own, part, len(columns))
            g = read(gradient, part, len(columns)).mul_(factor).add_(w, alpha=group["weight_decay"])
            sums = torch.minimum(rows[some, None], columns).addcmul_(g, g)
            rows[some] = sums.amax(1)
            torch.maximum(most, sums.amax(0), out=most)
            g.mul_(sums.clamp_(min=1e-30).rsqrt_())
            write(own, part, w.sub_(_smooth(momentum, group["momentum"], part, g), alpha=group["lr"]), noise)
        columns.copy_(over_parts(weight, most, largest=True))


def _smooth(momentum: Moment | None, mu: float, part: slice, g: Tensor) -> Tensor:
    if momentum is None:
        return g
    values, scales = momentum
    m = widen(flat(values), scales, part, g.dtype).view_as(g).mul_(mu).add_(g, alpha=1 - mu)
    narrow(flat(values), scales, part, m.view(-1))
    return m


# -- Adafactor ------------------------------------------------------------------------------------------------
class LeanAdafactor(Factored):
    """Adafactor."""

    def update(self, weight: Tensor, group: dict, gradient: Tensor, factor: float, noise: Noise) -> None:
        """u = g / sqrt(row column / mean(row)); weight -= step u / max(1, RMS(u) / clip)."""
        own = local(weight)
        gradient = laid_out(own, gradient)
        rows, columns = self.accumulators(weight)
        step = self.state[weight]["step"]
        gain = step ** -group["decay"]
        total = self._squares(gradient, factor, rows, len(columns), gain, group["eps"][0])
        height = weight.numel() // len(columns)  # the rows of all processes
        columns += gain * (over_parts(weight, total) / height - columns)
        shape = rows / (over_parts(weight, rows.sum()) / height)
        sums = rows.new_zeros(2)  # of the squares of the update, and of the weight
        for some, part in row_parts(own, len(columns)):
            sums[0] += self._direction(gradient, part, factor, shape[some], columns).square_().sum()
            sums[1] += read(own, part, len(columns)).square_().sum()
        rms, size = (over_parts(weight, sums) / weight.numel()).sqrt()
        lr = self._lr(group, step, size) / (rms / group["clip"]).clamp(min=1)
        for some, part in row_parts(own, len(columns)):
            w = read(own, part, len(columns)).mul_(1 - group["lr"] * group["weight_decay"])
            u = self._direction(gradient, part, factor, shape[some], columns)
            write(own, part, w.sub_(u.mul_(lr)), noise)

    def _squares(self, gradient: Tensor, factor: float, rows: Tensor, columns: int, gain: float, eps: float) -> Tensor:
        """row += gain (mean of g^2 over it - itself) -> the sum of g^2 over each column."""
        total = rows.new_zeros(columns)
        for some, part in row_parts(gradient, columns):
            squares = read(gradient, part, columns).mul_(factor).square_().add_(eps)
            rows[some] += gain * (squares.mean(1) - rows[some])
            total += squares.sum(0)
        return total

    def _direction(self, gradient: Tensor, part: slice, factor: float, shape: Tensor, columns: Tensor) -> Tensor:
        second = torch.outer(shape, columns).clamp_(min=1e-30)
        return read(gradient, part, len(columns)).mul_(factor).mul_(second.rsqrt_())

    def _lr(self, group: dict, step: int, size: Tensor) -> Tensor:
        if not group["relative"]:
            return torch.full_like(size, group["lr"])
        return size.clamp(min=group["eps"][1]) * min(group["lr"], 1 / sqrt(step))
