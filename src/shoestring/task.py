"""Task: a model, its loss, a batch and an optimizer: all that a training step needs, and nothing else."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .errors import ShoestringError
from .items import Shared, usual
from .optimizers import remade


def _check_positive(settings: Any, *names: str) -> None:
    """Refuses what no optimizer of PyTorch takes, where it is written down."""
    for name in names:
        if not 0 <= (value := getattr(settings, name)) < math.inf:
            raise ShoestringError(f"{type(settings).__name__}({name}={value}): use a number from 0 on, and finite")


@dataclass(frozen=True)
class SGD:
    """Settings of stochastic gradient descent; called with parameters it makes the optimizer."""

    lr: float = 0.1
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check_positive(self, "lr", "momentum", "weight_decay")

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            parameters,
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
        )


@dataclass(frozen=True)
class Adam:
    """Settings of Adam; `decoupled` weight decay makes it AdamW."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False

    def __post_init__(self) -> None:
        _check_positive(self, "lr", "eps", "weight_decay")

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        kind = torch.optim.AdamW if self.decoupled else torch.optim.Adam
        return kind(parameters, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay)


Loss = Callable[[nn.Module, Any], Any]  # a tensor, or an output object that has it as `loss`
REDUCTIONS = ("mean", "sum")


class Context(Protocol):
    """How a technique acts inside a step: called with the live model, it returns a context manager, which the step
    enters around the forward and backward pass of each microbatch, and which undoes its changes when it exits."""

    def __call__(self, model: nn.Module, /) -> AbstractContextManager: ...


class LossScale(Protocol):
    """The factor of the loss by which small gradients survive in FP16; part of a run's state."""

    value: float

    def accepts(self, overflow: str | None) -> bool:
        """What the step found not to be finite, in words, or None -> whether the update may be done."""
        ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


# Called with the stepper (step.py) after each update of a run, never in a trace; may return entries for the update's
# line of the run's log.
Hook = Callable[[Any], dict[str, Any] | None]


def whole(batch: Any) -> Iterator[Any]:
    """The whole batch as one microbatch: the default split."""
    yield batch


@dataclass(frozen=True)
class Task:
    """A training problem. `loss(model, batch)` is the mean over the batch's items; `items(batch)` counts them.
    `padding` is the id that pads sentences, if the batch holds some: its microbatches are then measured in tokens.
    `optimizer` is settings such as SGD(lr=0.1); a class or function that makes a torch.optim optimizer of the trainable
    parameters (of pairs of name and parameter, if its argument is called `named_parameters`); or an optimizer of the
    model's, whose groups and settings are taken.
    A step whose loss or gradient is not finite changes nothing: `on_nonfinite` says whether it raises `Diverged` or is
    skipped.

    With `sync_batch_norm`, batch norm in several processes takes the statistics of all of them, as
    torch.nn.SyncBatchNorm does; without it, each takes those of its share of the batch.

    What microbatches must know of the loss and the batch (docs/techniques/microbatch.md):
    `reduction` is "sum" for a loss that is the sum over the items and not their mean;
    `microbatches` is False for a loss that is neither, and True for one that is known to be: it is not checked then;
    `shared` names what belongs to all examples at once and is not cut, such as a mask of (length, length): a collection
    of names, or a function of a leaf's path and value.

    `static_graph` promises, as in DistributedDataParallel, that the model's code does the same in every pass: the same
    operators, whatever the values. Passes over small microbatches are then recorded and run again without that code
    (tape.py), in a fraction of the time.

    The remaining fields are what techniques change:
    `split(batch)` yields microbatches, whose losses are weighted by their share of the items;
    `contexts` are entered around each microbatch's forward and backward pass, outermost first;
    `clip` is the largest norm of the whole gradient, if any;
    `scaling` makes the run's loss scale, which FP16 gradients need;
    `after_update` are called with the stepper after each update, when no gradient is there;
    `devices` is the number of processes that share a batch and update by the sum of their gradients;
    `sharded` says that each has only its shard of parameters, gradients and optimizer state.
    """

    model: nn.Module
    loss: Loss
    batch: Any
    optimizer: Any
    items: Callable[[Any], int] | None = None
    padding: int | None = None
    name: str = ""
    on_nonfinite: str = "raise"  # or "skip"
    clip: float | None = None
    reduction: str = "mean"
    microbatches: bool | None = None
    shared: Shared = ()
    static_graph: bool = False
    sync_batch_norm: bool = False
    split: Callable[[Any], Iterable[Any]] = whole
    contexts: tuple[Context, ...] = ()
    after_update: tuple[Hook, ...] = ()
    scaling: Callable[[], LossScale] | None = None
    devices: int = 1
    sharded: bool = False
    settings: dict[str, Any] = field(default_factory=dict)  # the techniques in force, in a plan's words

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise ShoestringError(f"a Task needs an nn.Module, not {type(self.model).__name__}: pass the model itself")
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            if is_lazy(tensor):
                raise ShoestringError(f"{name} of a lazy layer has no size yet: run the model on a batch first")
        if not callable(self.loss):
            raise ShoestringError("a Task needs a loss(model, batch) that returns the mean loss: pass a function")
        if isinstance(self.optimizer, torch.optim.Optimizer):
            object.__setattr__(self, "optimizer", remade(self.optimizer, self.model))
        if not callable(self.optimizer):
            raise ShoestringError(
                "a Task needs optimizer settings such as SGD(lr=0.1), an optimizer, or a function of parameters that "
                "makes one"
            )
        if self.on_nonfinite not in ("raise", "skip"):
            raise ShoestringError(f"on_nonfinite={self.on_nonfinite!r} is not known: use 'raise' or 'skip'")
        if self.reduction not in REDUCTIONS:
            raise ShoestringError(f"a Task's reduction is {' or '.join(map(repr, REDUCTIONS))}, not {self.reduction!r}")
        if self.microbatches not in (None, True, False):
            raise ShoestringError(
                f"a Task's microbatches are True (they add up), False (they do not) or None (find out), "
                f"not {self.microbatches!r}: a plan has their size"
            )
        if isinstance(self.shared, str) or not (callable(self.shared) or isinstance(self.shared, Collection)):
            raise ShoestringError(
                f"a Task's shared tensors are a list of names or a function, not {self.shared!r}: pass shared=['mask']"
            )
        if not callable(self.shared):
            object.__setattr__(self, "shared", tuple(self.shared))

    def with_(self, **changes: Any) -> "Task":
        """The same task with some fields changed; `microbatches`, a statement about the loss, is reset with it."""
        if "loss" in changes:
            changes = {"microbatches": None} | changes
        return replace(self, **changes)

    def count(self, batch: Any) -> int:
        """The number of items in a batch: `items(batch)`; or its labels that are not -100, or else its examples."""
        count = self.items if self.items is not None else usual(batch, self.padding, self.shared)
        return int(count(batch))

    def weights(self, pieces: Sequence[Any]) -> list[float]:
        """The weight of each microbatch's loss: its share of the items, or 1 if losses are sums."""
        counts = [self.count(piece) for piece in pieces]
        return self.shares(counts, sum(counts))

    def shares(self, counts: Sequence[int], total: int) -> list[float]:
        """The same from the items of each microbatch, and those of the whole batch, in whatever processes they are."""
        if not total:
            raise ShoestringError("the batch holds no items: pass at least one")
        return [float(count > 0) if self.reduction == "sum" else count / total for count in counts]

    def loss_of(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss as a tensor, also if `loss` returns an output object that has it as its `loss`."""
        returned = self.loss(model, batch)
        if isinstance(returned, Tensor):
            return returned
        found = returned.get("loss") if isinstance(returned, Mapping) else getattr(returned, "loss", None)
        if isinstance(found, Tensor):
            return found
        raise ShoestringError(f"the loss is {type(returned).__name__}, not a tensor: {_hint(returned)}")


def _hint(returned: Any) -> str:
    if hasattr(returned, "loss"):
        return "its `loss` is empty, so pass the labels to the model"
    if isinstance(returned, Mapping):
        return "return the mean loss of the batch, such as sum(losses.values())"
    if isinstance(returned, tuple | list):
        return "return the one of its parts that is the loss, such as output[0]"
    return "return the mean loss of the batch"


def need_task(found: Any) -> None:
    """Refuses what is no task, as a model alone is."""
    if not isinstance(found, Task):
        kind = type(found).__name__
        raise ShoestringError(f"a {kind} is no task: make one, shoestring.Task(model, loss, batch, optimizer)")
