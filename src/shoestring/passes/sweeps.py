"""Sweeps: a block runs forward and backward a few samples at a time. Exact, also with batch norm.

What couples the samples of a block are the sums that batch norm takes over the batch: its statistics and, in the
backward pass, two sums of gradients per channel. A sweep is a run over all samples, piece by piece. It stops each
piece at the first norm whose sums are not known yet and adds these up; the next sweep gets one norm further; the last
one gives the result. Of the whole batch, only the block's input and output exist, and going back its output's
gradient, over which the input's is written.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch.autograd.graph import get_gradient_edge

from ..ambient import Ambient
from ..errors import ShoestringError
from ..kernels.calls import layout
from ..kernels.norm import batch_norm_backward, batch_norm_learn, batch_norm_statistics
from ..ledger import Phase
from ..phases import phase
from ..profiling.profile import nodes_of
from ..user_hooks import hooked_modules
from .buffers import Slot
from .checksums import is_traced
from .functions import LeanProduct, Statistics
from .mode import LeanMode
from .owned import told_if_owned
from .saved_tensors import SECOND_BACKWARD, AsIs, OneUse, Stored, store, storing
from .states import State

PIECE_BYTES = 1 << 16  # of a block's input, or its output if that is larger, about so much runs at a time,
MOST_PIECES = 16  # or a share of it, where that is more
COUPLED = 0.05  # more than this share of the largest value is no rounding, also not of 16 bits
ADVICE = "use checkpoint residual-M*, which runs all samples at once"


_checked: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


class _Unknown(Exception):
    """Raised to stop a piece at a norm whose sums are being added up."""


class SharedNorm:
    """A call of batch norm, of whose batch a sweep sees some samples at a time. Nothing here is in a cycle: garbage
    would wait for its collector."""

    def __init__(self, block: "Block") -> None:
        self.block = weakref.proxy(block)
        self.known: tuple[Tensor, Tensor] | None = None  # mean and inverse standard deviation
        self.sums: Tensor | None = None  # the gradients of gamma and beta, [2, channels]
        self.count = 0  # values per channel
        self.told = False  # whether a piece has returned the gradients of gamma and beta
        self._mean = self._squares = self._growing = torch.empty(0)
        self._call: dict[str, Any] = {}

    @property
    def is_last(self) -> bool:
        """Whether this is the last sweep of the backward pass, in which parameters get their gradients."""
        return self.block.is_known

    @property
    def statistics(self) -> Statistics:
        assert self.known is not None, "learned before"
        return Statistics(*self.known, None if self.block.is_whole else self)

    def look(self, call: dict[str, Any]) -> None:
        """Adds the statistics of some samples to those of the others (Chan et al. 1979)."""
        with torch.no_grad():
            x = call["input"]
            mean, variance = (each.double() for each in batch_norm_statistics(x))
            count = x.numel() // x.shape[1]
            if not self.count:
                self._mean, self._squares = torch.zeros_like(mean), torch.zeros_like(mean)
                self._call = {name: call[name] for name in ("running_mean", "running_var", "momentum", "eps")}
                self._call["dtype"] = torch.promote_types(x.dtype, torch.float32)
            total, away = self.count + count, mean - self._mean
            self._mean += away * (count / total)
            self._squares += variance * count + away**2 * (self.count * count / total)
            self.count = total

    def learn_statistics(self) -> None:
        """All samples were looked at."""
        with torch.no_grad():
            call, self._call = self._call, {}
            mean, variance = (each.to(call["dtype"]) for each in (self._mean, self._squares / self.count))
            running = call["running_mean"], call["running_var"]
            self.known = mean, batch_norm_learn(mean, variance, *running, call["momentum"], call["eps"], self.count)
            self._mean = self._squares = torch.empty(0)

    def backward(self, grad: Tensor, x: Tensor, gamma: Any, beta: Any, relu: bool, out: Tensor | None) -> tuple:
        """The gradients of some samples and, once, of gamma and beta; stops the piece while the sums are not known."""
        assert self.known is not None
        call = (grad, x, *self.known, gamma, beta, relu)
        if self.sums is None:
            sums = torch.stack(batch_norm_backward(*call, out=out)[1:]).double()
            self._growing = self._growing + sums if self._growing.numel() else sums
            self.block.unknown = self
            raise _Unknown
        dx, *rest = batch_norm_backward(*call, out=out, sums=self.sums, count=self.count)
        if self.told or not self.is_last:
            return dx, None, None
        self.told = True
        return dx, *rest

    def learn_sums(self) -> None:
        assert self.known is not None
        self.sums, self._growing = self._growing.to(self.known[0].dtype), torch.empty(0)


class Block:
    """One call of a block in a pass: its function of one tensor, and what its norms have learned so far."""

    def __init__(
        self, name: str, mode: LeanMode, forward: Callable, module: nn.Module, x: Tensor, growth: float = 1.0
    ) -> None:
        self.name, self.mode, self.forward, self.module = name, mode, forward, module
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.norms: list[SharedNorm] = []
        self.unknown: SharedNorm | None = None
        self.met = 0  # norms that the piece that is running has come to
        self._changes, self._changed = Counter[int](), Counter[int]()  # of buffers: in this piece, and so far
        self.shape, self.dtype = x.shape, x.dtype
        self.owns_input = False  # nobody else reads it: the output may take its place
        map_bytes = max(1.0, growth) * x.nbytes
        piece_bytes = max(PIECE_BYTES, map_bytes / MOST_PIECES)
        count = max(1, min(len(x), round(map_bytes / piece_bytes)))
        self.pieces = [slice(len(x) * i // count, len(x) * (i + 1) // count) for i in range(count)]

    @property
    def is_whole(self) -> bool:
        """Whether all samples run at once: then nothing needs to be learned beforehand."""
        return len(self.pieces) == 1

    @property
    def is_known(self) -> bool:
        """Whether the sums of gradients of all norms are known: the last sweep of the backward pass."""
        return self.is_whole or all(norm.sums is not None for norm in self.norms)

    def run(self, x: Tensor) -> Tensor:
        """Some samples of the input, a leaf -> those of the output, with a graph."""
        self.met = 0
        self._changes.clear()
        with torch.enable_grad(), self.mode.running(), self.mode.sweeping(self), storing(AsIs):
            y = self.forward(x)
        if not isinstance(y, Tensor) or len(y) != len(x):
            raise ShoestringError(f"{self.name} does not return a tensor with its input's samples: {ADVICE}")
        return y

    def statistics(self, call: dict[str, Any]) -> Statistics:
        """A norm of the block asks for the batch's statistics."""
        if self.met == len(self.norms):
            self.norms.append(SharedNorm(self))
        norm = self.norms[self.met]
        self.met += 1
        if norm.known is None:
            norm.look(call)
            if not self.is_whole:
                self.unknown = norm
                raise _Unknown
            norm.learn_statistics()
        return norm.statistics

    def may_change(self, buffer: Tensor) -> bool:
        """Whether the block may change a buffer in place, such as a counter of batches: once, not in every piece."""
        self._changes[id(buffer)] += 1
        is_new = self._changes[id(buffer)] > self._changed[id(buffer)]
        self._changed[id(buffer)] += is_new
        return is_new

    def _sweeps(self, run: Callable[[slice], Any], learn: Callable[[SharedNorm], None]) -> Iterator[tuple[slice, Any]]:
        """Runs all pieces until nothing is unknown -> the pieces and their results."""
        while True:
            self.unknown = None
            for piece, times in turns(self.pieces):
                try:
                    with Ambient.during(times=times):
                        result = run(piece)
                except _Unknown:
                    continue
                yield piece, result
                del result
            if self.unknown is None:
                return
            learn(self.unknown)

    def forward_sweeps(self, x: Tensor) -> Tensor:
        """The block's input -> its output."""
        out, owned = torch.empty(0), self.owns_input and x.is_contiguous(memory_format=layout(x))

        def run(piece: slice) -> Tensor:
            return self.run(_leaf(source[piece])).detach()

        source = x
        for piece, y in self._sweeps(run, SharedNorm.learn_statistics):
            if self.is_whole:
                out = y
                break
            if piece.start == 0:
                self._check(x)
            if piece.start == 0 and owned and y.shape[1:] == x.shape[1:] and y.dtype == x.dtype:
                out = _moved(x)
                source = out
            elif piece.start == 0:
                out = torch.empty((len(x), *y.shape[1:]), dtype=y.dtype, device=y.device, memory_format=layout(y))
            out[piece] = y
            del y  # or it would be there while the next piece runs
        if owned and source is x:
            _moved(x)  # its memory is free now, though the model's code may hold it longer
        return out

    def _check(self, x: Tensor) -> None:
        """Refuses what sweeps would get wrong without a word, once for each module: samples that depend on others, and
        parameters that are not the block's own."""
        if self.module in _checked or is_traced():
            return
        alone, pair = self.run(_leaf(x[:1])), self.run(_leaf(x[:2]))
        known = {id(parameter) for parameter in self.parameters}
        leaves = (node.variable for node in nodes_of(pair) if hasattr(node, "variable"))
        if any(id(leaf) not in known for leaf in leaves if isinstance(leaf, nn.Parameter)):
            raise ShoestringError(f"{self.name} reads a parameter of another module: {ADVICE}")
        with torch.no_grad():
            apart = (alone[0] - pair[0]).abs().max() <= COUPLED * pair[0].abs().max()
        if not apart:
            raise ShoestringError(
                f"{self.name} gives a sample another result beside others, or draws random numbers: {ADVICE}"
            )
        _checked.add(self.module)

    def backward_sweeps(self, source: "Source", grad: Tensor, out: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
        """The output's gradient -> that of the input, written to `out` if there is one, and of the parameters."""
        totals: list[Tensor | None] = [None] * len(self.parameters)

        def run(piece: slice) -> tuple[Tensor | None, ...]:
            x = _leaf(source.samples(piece))
            with phase(Phase.RECOMPUTE):
                output = get_gradient_edge(self.run(x))  # the output itself is not needed any more
            wanted = [x, *self.parameters] if self.is_known else [x]
            return torch.autograd.grad([output], wanted, [grad[piece]], allow_unused=True)

        for piece, (dx, *rest) in self._sweeps(run, SharedNorm.learn_sums):
            assert dx is not None, "a piece's output depends on its input"
            if self.is_whole:
                out = dx
            elif out is None:
                shape = (len(grad), *dx.shape[1:])
                out = torch.empty(shape, dtype=dx.dtype, device=dx.device, memory_format=layout(dx))
            if not self.is_whole:
                out[piece] = dx
            _add(totals, rest)
            del dx, rest  # or they would be there while the next piece runs
        assert out is not None, "there is a piece"
        return out, totals


def _add(totals: list[Tensor | None], gradients: Sequence[Tensor | None]) -> None:
    for number, gradient in enumerate(gradients):
        if gradient is not None:
            total = totals[number]
            totals[number] = gradient if total is None else total.add_(gradient)


def turns(pieces: Sequence[slice]) -> list[tuple[slice, int]]:
    """The pieces that run, and for how many each stands: in a trace the largest for all but the first."""
    if len(pieces) < 3 or not is_traced():
        return [(piece, 1) for piece in pieces]
    first, *others = pieces
    return [(first, 1), (max(others, key=lambda piece: piece.stop - piece.start), len(others))]


def _moved(x: Tensor) -> Tensor:
    """A tensor that nobody will read again -> another with its memory. Who reads it all the same gets NaN."""
    with torch.no_grad():
        moved = torch.ops.aten._unsafe_view(x.detach(), x.shape)  # no view of it, as autograd counts views
        torch.autograd.graph.increment_version(x)
        x.data = x.new_full((), torch.nan).expand(x.shape)
    return moved


def is_let_go(x: Tensor) -> bool:
    """Whether the function that made a tensor keeps nothing of it for its own backward pass, as ReLU would."""
    return getattr(x.grad_fn, "_forward_cls", None) in (Swept, LeanProduct)


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


# -- where a block's input comes from in the backward pass ----------------------------------------------------------
class Source:
    """A block's input, stored; several sweeps read it, piece by piece."""

    def __init__(self, stored: Stored) -> None:
        self._stored: Any = stored.opened() if isinstance(stored, OneUse) else stored

    def holds(self, x: Tensor) -> bool:
        """Whether it is the tensor itself that is stored, or may be."""
        return not hasattr(self._stored, "samples") or isinstance(getattr(self._stored, "tensor", None), Tensor)

    def samples(self, piece: slice) -> Tensor:
        if hasattr(self._stored, "samples"):
            return self._stored.samples(piece.start, piece.stop)
        if not isinstance(self._stored, Tensor):
            self._stored = self._stored.take()
        return self._stored[piece]


class Remade(Source):
    """A block's input that the block before it makes again, once, piece by piece."""

    def __init__(self, block: Block, source: Source, pieces: Sequence[slice]) -> None:
        self.block, self.source, self.pieces = block, source, pieces
        self._parts: dict[int, Source] = {}

    def holds(self, x: Tensor) -> bool:
        return False

    def samples(self, piece: slice) -> Tensor:
        if not self._parts:
            run = {piece.start: times for piece, times in turns(self.pieces)}
            kind: dict[str, Any] = {}
            for each in self.pieces:
                if each.start in run:
                    with phase(Phase.RECOMPUTE), Ambient.during(times=run[each.start]):
                        made = self.block.run(_leaf(self.source.samples(each))).detach()
                    sizes, kind = made.shape[1:], {"dtype": made.dtype, "memory_format": layout(made)}
                else:  # in a trace: what it would have made is stored
                    made = torch.empty((each.stop - each.start, *sizes), **kind)
                self._parts[each.start] = Source(store(made))
                del made
        inside = [each for each in self.pieces if each.start < piece.stop and piece.start < each.stop]
        found = [
            self._parts[each.start].samples(
                slice(max(each.start, piece.start) - each.start, min(each.stop, piece.stop) - each.start)
            )
            for each in inside  # the block after the next may have other pieces
        ]
        return found[0] if len(found) == 1 else torch.cat(found)


# -- the autograd function ------------------------------------------------------------------------------------------
class Swept(torch.autograd.Function):
    """block(x): saves x, or how to make it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Block, source: Source, *parameters: Tensor) -> Tensor:
        ctx.kept = block, source
        return block.forward_sweeps(x)

    @staticmethod
    @told_if_owned
    def backward(ctx: Any, grad: Tensor, owned: bool) -> Any:
        kept, ctx.kept = ctx.kept, None
        if kept is None:
            raise ShoestringError(SECOND_BACKWARD)
        block, source = kept
        del kept
        out = grad if owned and (grad.shape, grad.dtype) == (block.shape, block.dtype) else None
        dx, gradients = block.backward_sweeps(source, grad, out)
        return dx, None, None, *gradients


def refuse_hooks(name: str, module: nn.Module) -> None:
    """Raises if somebody's hook is inside a block: it would see pieces of the batch, several times."""
    if hooked := sorted(hooked_modules(module)):
        where = f"{name}.{hooked[0]}" if hooked[0] else name
        raise ShoestringError(f"{where} has a hook, which would see a few samples at a time: {ADVICE}")


def only_input(name: str, args: tuple, kwargs: dict) -> Tensor:
    """A block's arguments -> the one tensor, whose samples can run apart."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and args[0].requires_grad:
        return args[0]
    raise ShoestringError(f"{name} is not called with one tensor that needs a gradient: {ADVICE}")


def swept(x: Tensor, block: Block, source: Source, slots: Sequence[Slot], devices: frozenset) -> Tensor:
    """A block's input and where the backward pass will have it from -> its output."""
    with DisableTorchFunction():
        state = State(devices, slots)
    y = Swept.apply(x, block, source, *block.parameters)
    with DisableTorchFunction():
        state.forget_if_unused()
        if state.random or state.buffers.kept:
            raise ShoestringError(f"{block.name} draws random numbers, or changes a buffer: {ADVICE}")
    return y
