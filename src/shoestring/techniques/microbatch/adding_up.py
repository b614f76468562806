"""Whether the losses of pieces add up to the loss of the batch, without which microbatches are another training.

They do where the loss is a mean over items (or a sum), and not where examples meet in it: in-batch negatives, labels
that are ignored unevenly, terms that balance a batch. No code tells that, so the loss is asked: that of a few examples
must equal the weighted losses of two pieces of them. It is asked in evaluation mode, in which dropout and batch norm
do not couple examples, without gradients, and leaves the model, its buffers, hooks and all generators as they were.
"""

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode

from ...items import Count, candidates, counted, usual
from ...randomness import seeded
from ...structure import tensors
from ...task import Task
from ...turns import turn
from .pieces import Split, cut

Batch = Callable[[], Any]  # made for each pass: a loss may well pop its labels out of it
EXAMPLES = 5  # that are asked for: pieces of 3 and 2, for one example alone is a case of its own in many a model
LOOKED_AT = 64  # from which they are chosen
DRAWS = 4  # of a loss that is random
ROUNDING = 16  # epsilons that a loss may be off by, in batches of another size


@dataclass(frozen=True)
class Verdict:
    """`adds_up` is None where nobody can know; `items` is the count by which pieces add up, if it is not the usual;
    `changes` is a buffer that each pass changes, and so each microbatch: a counter, a power iteration."""

    adds_up: bool | None
    reason: str = ""
    items: Count | None = None
    changes: str = ""


class Sample(NamedTuple):
    """The loss of some examples, those of two pieces of them, and the epsilon of the coarsest type computed in."""

    whole: float
    parts: tuple[float, ...]
    epsilon: float

    def error(self, weights: Sequence[float]) -> float:
        """By how much the weighted losses of the pieces miss the whole, relative to the largest of the losses."""
        missed = abs(weighted(self.parts, weights) - self.whole)
        return missed / (self.scale or 1.0) if math.isfinite(missed) else math.inf

    def accepts(self, weights: Sequence[float]) -> bool:
        """Whether the pieces add up: to rounding, or so nearly that the weights can hardly be others.

        Losses of a model that knows nothing yet are all alike, so that wrong weights make little difference to their
        sum, and all the difference to the gradient; those of one that knows much are small, and rounded coarsely, but
        far apart. So a difference counts in proportion to that between the pieces.
        """
        apart = self.apart if math.isclose(sum(weights), 1) else self.scale
        return self.error(weights) * self.scale <= max(self.rounding, (0.001 + self._root) * apart)

    @property
    def tells(self) -> bool:
        """Whether the pieces' losses are far enough apart that wrong weights would show."""
        return self.apart > 10 * self.rounding

    @property
    def rounding(self) -> float:
        return min(ROUNDING * self.epsilon, self._root) * self.scale

    @property
    def apart(self) -> float:
        parts = [loss for loss in self.parts if math.isfinite(loss)]
        return max(parts, default=0.0) - min(parts, default=0.0)

    @property
    def scale(self) -> float:
        return max((abs(loss) for loss in (self.whole, *self.parts) if math.isfinite(loss)), default=0.0)

    @property
    def _root(self) -> float:
        return 0.1 * math.sqrt(self.epsilon)


def weighted(losses: Sequence[float], weights: Sequence[float]) -> float:
    return sum(weight * loss for weight, loss in zip(weights, losses, strict=True) if weight)


def judge(task: Task, split: Split) -> Verdict:
    """A task and how its batch would be cut -> whether the pieces add up, and by which count of items."""
    if task.microbatches is not None:
        return Verdict(task.microbatches, "" if task.microbatches else "the task says microbatches=False")
    if unknown := _unknowable(task):
        return Verdict(None, unknown)
    with turn(task.model, "examined"):
        return _judge(task, split)


def _judge(task: Task, split: Split) -> Verdict:
    counts = [task.items] if task.items is not None else candidates(task.batch, task.padding, task.shared)
    try:
        rows = _chosen(task, split, counts)
        middle = -(-len(rows) // 2)
        parts = [partial(split.take, task.batch, part) for part in (rows[:middle], rows[middle:]) if part]
        batches = [partial(cut, task.batch, rows, task.shared), *parts]
        samples = _samples(task, batches)
        if not samples[0].tells:
            samples = _samples(task, batches, stirred=True)
        pieces = [part() for part in parts]
    except Exception as error:  # whatever the loss does with a few examples, it would do in a step
        words = (str(error).splitlines() or [""])[0]
        return Verdict(False, f"the loss of a few examples of the batch fails ({type(error).__name__}: {words})")
    if len(samples) > 1:
        return _judge_draws(task, samples, pieces)
    found = _judge_sample(task, samples[0], pieces, counts)
    return replace(found, changes=_changed(task, batches[0])) if found.adds_up else found


def _unknowable(task: Task) -> str:
    held = [*task.model.parameters(), *task.model.buffers()]
    if active_fake_mode() or any(tensor.is_meta for tensor in [*held, *tensors(task.batch)]):
        return "a model without numbers (on the meta device) cannot be asked whether its microbatches add up"
    return ""


def _chosen(task: Task, split: Split, counts: Sequence[Count]) -> list[int]:
    """A few examples, from that with the fewest items to that with the most: weights that are wrong show most."""
    rows = range(min(LOOKED_AT, counted(task.batch, task.shared)[1]))
    items = {row: sum(count(split.take(task.batch, [row])) for count in counts) for row in rows}
    ordered = sorted(rows, key=items.__getitem__)
    last = min(EXAMPLES, len(rows)) - 1
    return [ordered[round(place * (len(rows) - 1) / max(1, last))] for place in range(last + 1)]


# -- verdicts -------------------------------------------------------------------------------------------------------
def _judge_sample(task: Task, sample: Sample, pieces: Sequence[Any], counts: Sequence[Count]) -> Verdict:
    if not math.isfinite(sample.whole):
        return Verdict(None, f"the loss of a few examples is {sample.whole}, which says nothing of its pieces")
    ones = [1.0] * len(pieces)
    if task.reduction == "sum":
        return Verdict(True) if sample.accepts(ones) else _refusal(task, sample, ones, pieces)
    chosen = _fitting(sample, pieces, counts)
    if chosen is None:
        return _refusal(task, sample, task.weights(pieces), pieces)
    if not sample.tells:
        return Verdict(None, "the losses of a few examples are all alike, so that they do not tell what each weighs")
    if task.items is not None or chosen == usual(task.batch, task.padding, task.shared):
        return Verdict(True)
    return Verdict(True, f"microbatches weigh by the {chosen}: so their losses add up", chosen)


def _fitting(sample: Sample, pieces: Sequence[Any], counts: Sequence[Count]) -> Count | None:
    """The count by which the pieces add up best; the first of those that are as good, to rounding."""
    weights = {count: shares for count in counts if (shares := _shares(pieces, count))}
    errors = {count: sample.error(shares) for count, shares in weights.items() if sample.accepts(shares)}
    alike = max(2 * min(errors.values(), default=0.0), 4 * sample.epsilon)
    return next((count for count, error in errors.items() if error <= alike), None)


def _shares(pieces: Sequence[Any], count: Count) -> list[float]:
    found = [count(piece) for piece in pieces]
    return [number / sum(found) for number in found] if sum(found) else []


def _judge_draws(task: Task, samples: Sequence[Sample], pieces: Sequence[Any]) -> Verdict:
    """Of a loss that is random: it is refused where what is drawn cannot explain the difference, and else unknown."""
    weights = task.weights(pieces)
    wholes, sums = [s.whole for s in samples], [weighted(s.parts, weights) for s in samples]
    spread = max(wholes) - min(wholes) + max(sums) - min(sums)
    if abs(sum(wholes) - sum(sums)) / len(samples) > spread:
        return _refusal(task, samples[0], weights, pieces)
    return Verdict(None, "the loss draws random numbers in evaluation mode too, so no pieces can be compared with it")


def _refusal(task: Task, sample: Sample, weights: Sequence[float], pieces: Sequence[Any]) -> Verdict:
    pieces_loss = weighted(sample.parts, weights)
    found = f"the loss of a few examples is {sample.whole:.4g}, and that of their pieces {pieces_loss:.4g}"
    ones = [1.0] * len(pieces)
    others = candidates(task.batch, task.padding, task.shared)
    fitting = _fitting(sample, pieces, others)
    if task.reduction == "mean" and sample.accepts(ones):
        return Verdict(False, f'{found} in the mean, but their sum: pass Task(reduction="sum")')
    if fitting is not None:
        how = 'pass Task(items=..., reduction="mean") with a function that counts them'
        return Verdict(False, f"{found}; it is the mean over the {fitting}: {how}")
    return Verdict(
        False,
        f"{found}: examples meet in it (in-batch negatives, say), or it counts something else; say what with "
        'Task(items=..., reduction="mean" or "sum"), name what every piece needs whole in shared=..., or pass '
        "microbatches=False",
    )


# -- asking ---------------------------------------------------------------------------------------------------------
def _samples(task: Task, batches: Sequence[Batch], stirred: bool = False) -> list[Sample]:
    """The losses of the examples and of their pieces; several times where they are random.

    What the loss is the mean of has nothing to do with the weights. So they may be `stirred` for the while, where all
    losses are the same because the last layer starts from zeros.
    """
    ways: list[tuple[Callable[[nn.Module], Any], bool]] = [(nn.Module.eval, False), (_steady, False), (_steady, True)]
    for number, (prepare, with_gradients) in enumerate(ways):
        try:
            with undisturbed(task.model) as watch, torch.set_grad_enabled(with_gradients):
                prepare(task.model)
                _normalise_by_constants(task.model)
                if stirred:
                    _stir(task.model)
                return _ask(task, batches, watch)
        except Exception:  # some models have a loss in training mode only, some differentiate inside of it
            if number == len(ways) - 1:
                raise
    raise AssertionError("the last way returns or raises")


def _ask(task: Task, batches: Sequence[Batch], watch: "Watch") -> list[Sample]:
    def sample(seed: int) -> Sample:
        whole, *parts = (_loss(task, batch, seed) for batch in batches)
        return Sample(whole, tuple(parts), watch.epsilon)

    first = sample(0)
    again = _loss(task, batches[0], seed=1)
    if first._replace(parts=(again,)).accepts([1.0]):
        return [first]
    return [first, *(sample(seed) for seed in range(1, DRAWS))]


def _changed(task: Task, batch: Batch) -> str:
    """A buffer that a pass changes, in the modes that the modules have, batch norm's apart; "" if none is found."""
    norms = {id(buffer) for module in task.model.modules() if isinstance(module, _BatchNorm)
             for buffer in module.buffers()}  # fmt: skip
    before = {name: buffer for name, buffer in task.model.named_buffers() if id(buffer) not in norms}
    with (
        suppress(Exception),
        undisturbed(task.model) as watch,
    ):  # what fails here fails in a step, which tells it better
        if before:
            _loss(task, batch, seed=0)
        now = dict(task.model.named_buffers())
        return next((name for name, buffer in before.items() if not _is_same(now.get(name), watch.before(buffer))), "")
    return ""


def _is_same(buffer: Tensor | None, before: Tensor) -> bool:
    return buffer is before or (buffer is not None and torch.equal(buffer.detach(), before.detach()))


def _loss(task: Task, batch: Batch, seed: int) -> float:
    with seeded(seed), ExitStack() as stack:
        for context in task.contexts:
            stack.enter_context(context(task.model))
        return float(task.loss_of(task.model, batch()).detach())


def _steady(model: nn.Module) -> None:
    """Each module in its own mode, but for those that draw or that look at the whole batch."""
    for module in model.modules():
        if isinstance(module, _DropoutNd | _BatchNorm):
            module.eval()


def _stir(model: nn.Module) -> None:
    """Adds noise to biases and the like, which are small: the watch saves what is written to."""
    with seeded(0), torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 and parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter))


def _normalise_by_constants(model: nn.Module) -> None:
    """Batch norms that know no running statistics use those of the batch in evaluation mode too: give them some."""
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module._buffers.get("running_mean") is None:
            like = next(iter(module.parameters()), torch.empty(0))
            module._buffers["running_mean"] = torch.zeros(module.num_features, device=like.device)
            module._buffers["running_var"] = torch.ones(module.num_features, device=like.device)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator["Watch"]:
    """Whatever runs inside, the model is afterwards as it was: attributes, hooks, modes and numbers."""
    before = [(module, _attributes(module)) for module in model.modules()]
    watch = Watch(model)
    try:
        with watch:
            yield watch
    finally:
        for module, attributes in before:
            _restore(module, attributes)
        watch.restore()


_CONTAINERS = (dict, OrderedDict, list, set)


def _attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """A module's attributes, and what those that are containers contain: hooks, parameters, caches."""
    return {name: (value, copy.copy(value) if type(value) in _CONTAINERS else None)
            for name, value in vars(module).items()}  # fmt: skip


def _restore(module: nn.Module, attributes: dict[str, tuple[Any, Any]]) -> None:
    vars(module).clear()
    for name, (value, contents) in attributes.items():
        vars(module)[name] = value
        if isinstance(contents, list):
            value[:] = contents
        elif contents is not None:
            value.clear()
            value.update(contents)


class Watch(TorchDispatchMode):
    """Notes the coarsest type that is computed in, and saves the model's tensors before they are written to."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.homes: dict[int | None, list[Tensor]] = defaultdict(list)
        for tensor in [*model.parameters(), *model.buffers()]:
            self.homes[_home(tensor)].append(tensor)
        self.saved: dict[int | None, list[Tensor]] = {}
        self.epsilon = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func._schema.is_mutable or "batch_norm" in func.name():  # whose schema does not tell
            for tensor in tensors((args, kwargs)):
                self._save(_home(tensor))
        out = func(*args, **(kwargs or {}))
        self.epsilon = max([self.epsilon, *(_epsilon(tensor) for tensor in tensors(out))])
        return out

    def _save(self, home: int | None) -> None:
        if home in self.homes and home not in self.saved:
            self.saved[home] = [tensor.detach().clone() for tensor in self.homes[home]]

    def before(self, tensor: Tensor) -> Tensor:
        """A tensor of the model as it was before it was written to, if it was."""
        home = _home(tensor)
        places = [place for place, other in enumerate(self.homes.get(home, ())) if other is tensor]
        return self.saved[home][places[0]] if home in self.saved and places else tensor

    def restore(self) -> None:
        for home, saved in self.saved.items():
            for tensor, before in zip(self.homes[home], saved, strict=True):
                tensor.detach().copy_(before)


def _home(tensor: Tensor) -> int | None:
    """What a tensor shares with its views; None for one without a storage of its own, such as a sparse one."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def _epsilon(tensor: Tensor) -> float:
    if not tensor.is_floating_point():
        return 0.0
    tf32 = 2.0**-10 if tensor.is_cuda else 0.0  # in which a GPU may multiply FP32
    return max(torch.finfo(tensor.dtype).eps, tf32)
