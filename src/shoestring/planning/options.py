"""The combinations of techniques that the planner may try, and why others are left out."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from traceback import extract_tb
from typing import Any

from ..errors import NoEffect, ShoestringError
from ..task import Task
from ..techniques import REGISTRY, Technique
from ..techniques.technique import Risk

Settings = tuple[tuple[str, Any], ...]
TECHNIQUES = {technique.name: technique for technique in REGISTRY}


@dataclass(frozen=True)
class Option:
    """A combination of settings and its risk."""

    settings: Settings
    risk: Risk

    def without(self, name: str) -> "Option":
        return Option(tuple(pair for pair in self.settings if pair[0] != name), self.risk)

    def __str__(self) -> str:
        return words_for(self.settings)


PLAIN = Option((), Risk.EXACT)


def words_for(settings: Iterable[tuple[str, Any]]) -> str:
    return ", ".join(f"{name} {value}".strip() for name, value in settings) or "no technique"


@dataclass(frozen=True)
class LeftOut:
    """What the planner did not try, or not to the end, and why. A technique alone stands for all that it offers.

    `kind`: "refused" with a reason of ours, "error" for what is none, "no effect", or "together" for two settings that
    do not go with each other.
    """

    settings: Settings
    reason: str
    kind: str

    def __str__(self) -> str:
        return words_for(self.settings)


class Candidates:
    """What every technique offers for a task, and which of it stands together. `left_out` says what is not here."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.left_out: dict[Settings, LeftOut] = {}
        self.offers = {technique.name: self._offers(technique) for technique in REGISTRY}
        self._risks = {(name, value): risk for name, offers in self.offers.items() for value, risk in offers}

    def _offers(self, technique: Technique) -> list[tuple[Any, Risk]]:
        found = self.guarded(((technique.name, ""),), lambda: [
            (value, technique.risk(self.task, value)) for value in technique.options(self.task)
        ])  # fmt: skip
        return found or []

    def guarded(self, what: Settings, ask: Callable[[], Any]) -> Any:
        """What `ask` gives; None where it fails, with the reason among what is left out."""
        try:
            return ask()
        except Exception as error:  # of a model that we never saw: one technique less, and no end of the search
            self.leave_out(what, error)
            return None

    def leave_out(self, what: Settings, error: Exception) -> None:
        ours = isinstance(error, ShoestringError)
        kind = "no effect" if isinstance(error, NoEffect) else "refused" if ours else "error"
        self.left_out.setdefault(what, LeftOut(what, str(error) if ours else told(error), kind))

    def at(self, level: Risk) -> list[Option]:
        """Every combination whose largest risk is `level`."""
        return list(self._at(level))

    @cache  # noqa: B019 - lives as long as one search
    def _at(self, level: Risk) -> tuple[Option, ...]:
        choices = [
            [(name, None, Risk.EXACT), *((name, value, risk) for value, risk in offers if risk <= level)]
            for name, offers in self.offers.items()
        ]
        combinations = []
        for values in itertools.product(*choices):
            chosen = [(name, value, risk) for name, value, risk in values if value is not None]
            if max((risk for *_, risk in chosen), default=Risk.EXACT) == level:
                settings = tuple((name, value) for name, value, _ in chosen)
                if self.stands(settings):
                    combinations.append(Option(settings, level))
        return tuple(combinations)

    def stands(self, settings: Settings) -> bool:
        """Whether the techniques in it go with each other, two by two."""
        return all(self._stands(one, other) for one, other in itertools.combinations(settings, 2))

    @cache  # noqa: B019 - lives as long as one search
    def _stands(self, one: tuple[str, Any], other: tuple[str, Any]) -> bool:
        settings = dict((one, other))
        reasons = [TECHNIQUES[name].refuses for name in settings]
        reason = self.guarded(
            (one, other), lambda: next(filter(None, (ask(self.task, settings) for ask in reasons)), "")
        )
        if reason:
            self.left_out[one, other] = LeftOut((one, other), reason, "together")
        return reason == ""

    def option(self, settings: Settings) -> Option:
        return Option(settings, max((self.risk(*pair) for pair in settings), default=Risk.EXACT))

    def risk(self, name: str, value: Any) -> Risk:
        if (name, value) not in self._risks:
            self._risks[name, value] = TECHNIQUES[name].risk(self.task, value)
        return self._risks[name, value]

    def degree(self, option: Option) -> int:
        """How approximate an option is, within its risk."""
        return sum(self._degree(*pair) for pair in option.settings)

    @cache  # noqa: B019 - lives as long as one search
    def _degree(self, name: str, value: Any) -> int:
        return TECHNIQUES[name].degree(self.task, value)


def told(error: Exception) -> str:
    """An error that is not ours in one line, with the place where it was raised."""
    message = str(error).strip().splitlines()
    frames = extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {message[0] if message else 'no message'}{where}"
