"""Updates, traced once: many combinations of techniques have the same optimizer and the same parameters.

What an update does to memory is a list of births and deaths. Of an optimizer that was traced before, on parameters and
gradients of the same forms, the list is written into another ledger, and its operators are not run.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ledger import Entry
from ..step import Stepper
from .scratch import Moment
from .trace import Tracer

Event = tuple[str, int]  # the birth or the death of a storage that the update made, or the end of a gradient


class Unlike(Exception):
    """The gradients of a pass have other forms than those for which the update was traced."""


class _Update(NamedTuple):
    events: list[Event]
    entries: list[Entry]  # of the ledger that it was traced in: their categories may be set after the update
    moments: list[Moment]  # with times from the update's beginning
    calls: dict[Any, Any]
    unseen: list[str]
    gradients: tuple


class Updates:
    """The updates that were traced, in pairs: the first of an optimizer makes its state."""

    def __init__(self) -> None:
        self._known: dict[tuple, tuple[Any, list[_Update]]] = {}

    def known(self, key: tuple) -> list[_Update]:
        return self._known[key][1] if key in self._known else []

    def learn(self, key: tuple, optimizer: Any, pair: list[_Update]) -> None:
        self._known[key] = optimizer, pair  # held, so that its id stays its own


class Pair:
    """The two updates of one brief trace, run or written down from an earlier trace."""

    def __init__(self, updates: Updates, tracer: Tracer, stepper: Stepper) -> None:
        self.updates, self.tracer, self.stepper = updates, tracer, stepper
        self.parameters = list(stepper.task.model.parameters())
        task = stepper.task
        forms = tuple((*_form(one), one.requires_grad) for one in self.parameters)
        self.key = id(task.optimizer), task.clip, task.scaling is None, forms, _gradients(self.parameters)
        self.known = list(updates.known(self.key))
        self.traced: list[_Update | None] = []

    def run(self) -> None:
        """The next update, as `Stepper.update` does it."""
        if self.known:
            self._write(self.known.pop(0))
        else:
            self.traced.append(self._trace())
            if len(self.traced) == 2:
                self._learn()

    def _trace(self) -> _Update | None:
        tracer, ledger = self.tracer, self.tracer.ledger
        gradients = _gradients(self.parameters)
        mine = {tracer.number_of(one.grad): place for place, one in enumerate(self.parameters) if one.grad is not None}
        first, begin = len(ledger.entries), ledger.time
        moments, calls, unseen = len(tracer.moments), set(tracer.calls), set(tracer.unseen)
        self.stepper.update()
        entries = ledger.entries[first:]
        events = {entry.born: ("birth", number) for number, entry in enumerate(entries)}
        for number, entry in enumerate(ledger.entries):
            if entry.died is not None and entry.died > begin:
                if number < first and number not in mine:
                    return None  # it frees what another trace may not have
                events[entry.died] = ("death", number - first) if number >= first else ("gradient", mine[number])
        return _Update(
            [events[time] for time in sorted(events)],
            entries,
            [one._replace(time=one.time - begin) for one in tracer.moments[moments:]],
            {key: call for key, call in tracer.calls.items() if key not in calls},
            [words for words in tracer.unseen if words not in unseen],
            gradients,
        )

    def _learn(self) -> None:
        """Keeps the pair, if what the first update left is still there after the second."""
        first, second = self.traced
        if first is None or second is None:
            return
        dead = {number for kind, number in first.events if kind == "death"}
        if all(entry.died is None for number, entry in enumerate(first.entries) if number not in dead):
            self.updates.learn(self.key, self.stepper.task.optimizer, [first, second])

    def _write(self, update: _Update) -> None:
        if update.gradients != _gradients(self.parameters):
            raise Unlike
        tracer, ledger = self.tracer, self.tracer.ledger
        begin, numbers = ledger.time, dict[int, int]()
        for kind, number in update.events:
            if kind == "birth":
                one = update.entries[number]
                numbers[number] = ledger.birth(one.bytes, one.category, one.module, one.operation, one.phase)
            elif kind == "death":
                ledger.death(numbers[number])
            else:
                self.parameters[number].grad = None
        tracer.moments += [one._replace(time=one.time + begin) for one in update.moments]
        tracer.calls |= update.calls
        tracer.unseen |= dict.fromkeys(update.unseen)


def _form(tensor: Tensor) -> tuple:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _gradients(parameters: Sequence[Tensor]) -> tuple:
    """The forms of gradients; a sparse one is like no other."""
    found = (parameter.grad for parameter in parameters)
    return tuple(None if g is None else _form(g) if g.layout == torch.strided else object() for g in found)
