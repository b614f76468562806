"""`adaptive-SIZE`: each layer's codec is chosen by the error that it makes, so that the batch saves SIZE at most.

A dynamic programme (`choose`) gives every layer the codec with which the squared errors of all gradients add up to the
least. Before the first update the errors are those of another network. Then, every so often, the gradients of a few
samples are made exactly and with each codec, and the choice is made anew. Because an error in the input of a linear map
stays in its weight's gradient, one pass with a codec everywhere gives the errors of all layers. What a norm or GELU
saves makes an error that travels to all layers before it, so each has passes of its own, a few of them at a time; it is
offered codecs without bias only, whose errors do not add up on the way.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from torch import nn

from ...errors import ShoestringError
from ...items import counted
from ...profiling import profile
from ...task import Task
from ...units import format_bytes
from ..microbatch.pieces import ByExamples
from .gradients import Overlap, gradients, total, untouched, weights_of
from .rehearsals import saved
from .saving import Kept, Rule, SavedPass

if TYPE_CHECKING:
    from ...step import Stepper

# The squared sine between a layer's gradients with a codec and without, on ResNet-18 with CIFAR-10: to begin with.
USUAL = {"int8": 1e-5, "int4": 0.003, "pool8+int2": 0.05, "int2": 0.06, "pool2": 0.15, "pool4": 0.29}
# Operations whose errors reach the layers before them.
TRAVELLING = ("batch_norm", "layer_norm", "group_norm", "gelu", "scaled_dot_product_attention")
# Bits, fewest last. The variance goes with the square of a step, range / (2^bits - 1): one codec tells of the others.
ROUNDING = {"int8": 8, "int4": 4, "int2": 2}
UNBIASED = (*ROUNDING, "pool8+int2")  # what travelling errors may be made by
EXACT = "whole"
REST = "masks and the like"  # what no codec takes, and counts all the same
SAMPLES = range(4, 13)  # of a microbatch, on which errors are measured: those of rounding differ much between few
PROBED = 6  # norms and GELUs whose errors are measured at a time, in turn; all of them at the first time
MEASURE_EVERY, CHOOSE_EVERY = 50, 200  # updates
MEMORY = 0.8  # the share of the old mean in a new one
GAIN = 0.9  # a new choice is taken if its error is at most so much of the old one's
MOST = 4000  # partial choices that the dynamic programme goes on from
Choice = dict[str, str]  # the codec of each part


class Part(NamedTuple):
    """Something whose codec is chosen: a layer, a norm or a GELU. `bytes` per codec, exact included. Of one, the rest,
    there is nothing to choose."""

    name: str
    rules: tuple[tuple[str, str], ...]  # modules and operations
    weights: frozenset[str]  # the parameters whose gradients the codec changes; empty: all
    bytes: dict[str, int]


Errors = dict[str, dict[str, float]]  # of each part by codec


def choose(sizes: Sequence[Mapping[str, int]], errors: Sequence[Mapping[str, float]], limit: int) -> list[str]:
    """Bytes and errors of each part by codec -> the codecs of least total error whose bytes add up to at most `limit`.

    >>> choose([{"a": 4, "b": 1}, {"a": 4, "b": 1}], [{"a": 0.0, "b": 1.0}, {"a": 0.0, "b": 5.0}], 6)
    ['b', 'a']
    """
    if (least := sum(min(one.values()) for one in sizes)) > limit:
        raise ShoestringError(
            f"adaptive needs at least {format_bytes(least)} for what the batch saves, and has {format_bytes(limit)}: "
            "raise the budget, or add checkpointing or microbatches"
        )
    totals, error, taken = np.zeros(1), np.zeros(1), []  # of the choices worth going on from: more bytes, less error
    for size, wrong in zip(sizes, errors, strict=True):
        codecs = list(size)
        totals = (totals + np.array([[size[codec]] for codec in codecs])).ravel()
        error = (error + np.array([[wrong[codec]] for codec in codecs])).ravel()
        order = np.lexsort((error, totals))
        order = order[totals[order] <= limit]
        best = error[order]
        order = order[best < np.minimum.accumulate(np.r_[np.inf, best[:-1]])]
        if len(order) > MOST:
            order = order[np.linspace(0, len(order) - 1, MOST).round().astype(int)]
        taken.append((codecs, len(totals) // len(codecs), order))
        totals, error = totals[order], error[order]
    chosen, place = list[str](), len(error) - 1
    for codecs, before, order in reversed(taken):
        number, place = divmod(int(order[place]), before)
        chosen.append(codecs[number])
    return chosen[::-1]


@dataclass
class Adaptive:
    """A task's hook that measures the errors and changes the rules of its passes; its choice is saved with the run."""

    parts: tuple[Part, ...]
    limit: int  # bytes that the batch may save
    rules: list[Rule] = field(default_factory=list)  # of the passes: changed in place
    choice: Choice = field(default_factory=dict)
    errors: Errors = field(default_factory=dict)
    measured: int = 0  # how often
    peak: int = 0  # of the first choice's step: no other may exceed it

    def __post_init__(self) -> None:
        self.errors = {part.name: {codec: _usual(codec) for codec in part.bytes} for part in self.parts}
        self._take(self.chosen(self.limit))
        self.context = SavedPass(self.rules)

    def chosen(self, limit: int) -> Choice:
        """The best choice of at most so many bytes, by the errors that are known."""
        errors = [self.errors[part.name] for part in self.parts]
        return dict(zip(self.errors, choose([part.bytes for part in self.parts], errors, limit), strict=True))

    def error(self, choice: Choice) -> float:
        return sum(self.errors[name][codec] for name, codec in choice.items())

    def _take(self, choice: Choice) -> None:
        self.choice = choice
        self.rules[:] = rules_of(self.parts, choice)

    def is_due(self, stepper: "Stepper") -> bool:
        """Whether errors are measured after the next update."""
        return stepper.updates % MEASURE_EVERY == 0

    def __call__(self, stepper: "Stepper") -> dict[str, Any]:
        """After an update: measures errors, and chooses anew, if it is time to."""
        if (stepper.updates - 1) % MEASURE_EVERY or stepper.microbatch is None:  # a process may have had no share
            return {}
        found = self.measure(stepper)
        if not found:
            return {}
        self.remember(found)
        if (stepper.updates - 1) % CHOOSE_EVERY:
            return {}
        better = self.better(stepper)
        if better is not None:
            self._take(better)
        return {"activations": self.told()} if better is not None else {}

    def measure(self, stepper: "Stepper") -> Errors:
        """The errors on a few samples of the step's first microbatch; {} if a gradient is not finite there."""
        task, scale = stepper.task.with_(split=_one), stepper.scale
        batch = few(stepper.task, stepper.microbatch, self.limit / max(1, self._exact))
        found: Errors = {part.name: {EXACT: 0.0} for part in self.parts}
        with untouched(task.model):
            exact = gradients(self._under(task, ()), batch, scale)

        def probe(parts: Sequence[Part], codec: str) -> None:
            rules = rules_of(parts, {part.name: codec for part in parts})
            with untouched(task.model):
                lossy = gradients(self._under(task, rules, stepper.updates, least_bytes=0), batch, scale)
            for part in parts:
                names = (part.weights or set(exact)) & set(exact)
                overlap = total([Overlap.of(exact[name], lossy[name]) for name in names] or [Overlap(0, 0, 0)])
                found[part.name][codec] = overlap.error

        for codec in USUAL:
            if layers := [part for part in self.parts if part.weights and codec in part.bytes]:
                probe(layers, codec)
        for part in self._probed():
            rounding = [codec for codec in ROUNDING if codec in part.bytes]
            for codec in [codec for codec in part.bytes if codec not in (EXACT, *rounding[:-1])]:
                probe([part], codec)
            for codec in rounding[:-1]:
                found[part.name][codec] = found[part.name][rounding[-1]] * (_step(codec) / _step(rounding[-1])) ** 2
        whole = all(isfinite(error) for errors in found.values() for error in errors.values())
        return found if whole else {}

    def _probed(self) -> list[Part]:
        """The parts with travelling errors whose turn it is."""
        travelling = [part for part in self.parts if not part.weights and len(part.bytes) > 1]
        if not self.measured or len(travelling) <= PROBED:
            return travelling
        first = (self.measured - 1) * PROBED
        return [travelling[number % len(travelling)] for number in range(first, first + PROBED)]

    def _under(self, task: Task, rules: tuple[Rule, ...], seed: int = 0, least_bytes: int | None = None) -> Task:
        """The task with other rules in the place of those that were chosen."""
        instead = SavedPass(rules, seed, least_bytes)
        return task.with_(contexts=tuple(instead if one is self.context else one for one in task.contexts))

    def remember(self, found: Errors) -> None:
        """Means over time; the first measurement replaces what was only usual."""
        kept = MEMORY if self.measured else 0.0
        for name, errors in found.items():
            for codec, error in errors.items():
                self.errors[name][codec] = kept * self.errors[name][codec] + (1 - kept) * error
        self.measured += 1

    def better(self, stepper: "Stepper") -> Choice | None:
        """Another choice that is clearly better and whose step needs no more memory; None if there is none."""
        task = stepper.task.with_(split=_one, batch=stepper.microbatch)
        self.peak = self.peak or profile(task, brief=True).peak_bytes
        limit, before = self.limit, self.choice
        for _ in range(4):
            choice = self.chosen(limit)
            if choice == before or self.error(choice) > GAIN * self.error(before):
                return None
            rules = rules_of(self.parts, choice)
            over = profile(self._under(task, rules), brief=True).peak_bytes - self.peak
            if over <= 0:
                return choice
            limit = max(self._least, limit - over * self.share(task))
        return None

    @property
    def _least(self) -> int:
        return sum(min(part.bytes.values()) for part in self.parts)

    @property
    def _exact(self) -> int:
        return sum(part.bytes[EXACT] for part in self.parts)

    def share(self, task: Task) -> int:
        """How many microbatches of this size the batch has, about."""
        return max(1, round(self._exact / max(1, saved(self._under(task, ())).bytes)))

    def told(self) -> str:
        """How many parts have which codec, in words."""
        counts = Counter(codec for name, codec in self.choice.items() if name != REST)
        return ", ".join(f"{codec} of {count}" for codec, count in counts.most_common())

    def state(self) -> dict[str, Any]:
        return {"choice": self.choice, "errors": self.errors, "measured": self.measured, "peak": self.peak}

    def restore(self, state: dict[str, Any]) -> None:
        self.errors, self.measured, self.peak = state["errors"], state["measured"], state["peak"]
        self._take(state["choice"])


def _usual(codec: str) -> float:
    return USUAL.get(codec, 0.0)


def _step(codec: str) -> float:
    """The step between two values of a codec that rounds, as a share of their range."""
    return 1 / (2 ** ROUNDING[codec] - 1)


def _one(batch: Any) -> list[Any]:
    return [batch]


def few(task: Task, piece: Any, share: float) -> Any:
    """A few samples of a microbatch: if possible as many as fit that share of its bytes, saved exactly. All of it where
    it cannot be cut."""
    try:
        count = int(share * counted(piece, task.shared)[1])
        size = min(max(count, SAMPLES[0]), SAMPLES[-1])
        return next(iter(ByExamples(size, shared=task.shared)(piece)))
    except ShoestringError:
        return piece


def rules_of(parts: Sequence[Part], choice: Choice) -> tuple[Rule, ...]:
    """A choice of codecs -> the rules that say it."""
    return tuple(Rule(*where, choice[part.name]) for part in parts for where in part.rules)


_known: "WeakKeyDictionary[nn.Module, tuple[Any, tuple[Part, ...]]]" = WeakKeyDictionary()


def parts_of(task: Task) -> tuple[Part, ...]:
    """What a task saves, with its bytes under each codec; nothing if no codec can take any of it. The last answer per
    model is known."""
    asked = task.contexts, id(task.batch)
    if _known.get(task.model, (None,))[0] != asked:
        _known[task.model] = asked, _rehearsed(task)
    return _known[task.model][1]


def _rehearsed(task: Task) -> tuple[Part, ...]:
    names = [name for name, _ in task.model.named_parameters()]
    found = {codec: saved(task.with_(contexts=(*task.contexts, SavedPass(_everywhere(codec))))) for codec in USUAL}
    places: dict[tuple[str, str], dict[str, list[Kept]]] = {}  # module and operation ("*": linear maps) -> by codec
    for codec, one in found.items():
        for kept in one.compressed:
            place = kept.module, "*" if _stays(kept) else kept.operation
            places.setdefault(place, {codec: [] for codec in USUAL})[codec].append(kept)
    parts = []
    # The rules of norms first: those of layers are for all operations of their modules.
    for (module, operation), inputs in sorted(places.items(), key=lambda place: place[0][1] == "*"):
        if operation != "*":
            sizes = _bytes({codec: inputs[codec] for codec in UNBIASED})
            parts.append(Part(f"{module}:{operation}", ((module, operation),), frozenset(), sizes))
        elif weights := weights_of(module, (kept.weight for some in inputs.values() for kept in some), names):
            parts.append(Part(module, ((module, "*"),), frozenset(weights), _bytes(inputs)))
    parts = [part for part in parts if part.bytes]
    if not parts:
        return ()
    smallest = rules_of(parts, {part.name: min(part.bytes, key=part.bytes.__getitem__) for part in parts})
    rest = saved(task.with_(contexts=(*task.contexts, SavedPass(smallest)))).exact_bytes
    return (*parts, Part(REST, (), frozenset(), {EXACT: rest}))


def _everywhere(codec: str) -> tuple[Rule, ...]:
    return (*(Rule("*", operation, codec) for operation in TRAVELLING), Rule("*", "*", codec))


def _stays(kept: Kept) -> bool:
    """Whether an error in it stays in the gradient of its layer's weight."""
    return kept.operation not in TRAVELLING


def _bytes(inputs: Mapping[str, Sequence[Kept]]) -> dict[str, int]:
    """What each codec compressed of a part -> the part's bytes per codec. What a codec does not take stays exact."""
    exact = max(sum(kept.exact_bytes for kept in some) for some in inputs.values())
    saving = {codec: sum(kept.exact_bytes - kept.stored_bytes for kept in some) for codec, some in inputs.items()}
    return {EXACT: exact} | {codec: exact - less for codec, less in saving.items() if inputs[codec]} if exact else {}
