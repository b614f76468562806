"""The combinations of techniques that the planner may try, and the reasons why others are left out."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from traceback import extract_tb
from typing import Any

from ..errors import NoEffect, ShoestringError
from ..task import Task
from ..techniques.registry import REGISTRY
from ..techniques.technique import Bounds, Risk, Technique
from ..techniques.words import described
from .plan import Plan

Settings = tuple[tuple[str, Any], ...]


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


class Table(dict):
    """A technique's value with further settings, as a user named it: a dict that can be a key, as all settings are."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


def settings_of(values: Mapping[str, Any]) -> Settings:
    """A plan's values -> the settings of an option."""
    return tuple((name, Table(value) if isinstance(value, Mapping) else value) for name, value in values.items())


def scalar(value: Any) -> Any:
    """A plan's value -> the setting that comes first, which risk, effect and evidence are about."""
    return next(iter(value.values())) if isinstance(value, Mapping) else value


def words_for(settings: Iterable[tuple[str, Any]]) -> str:
    return described(settings) or "no technique"


@dataclass(frozen=True)
class LeftOut:
    """An option that the planner left out, and why. A technique without a value stands for all of its values.

    `kind`: "refused" with a reason of ours, "error" for any other exception, "no effect", or "together" for two
    settings that are incompatible.
    """

    settings: Settings
    reason: str
    kind: str

    def __str__(self) -> str:
        return words_for(self.settings)


class Candidates:
    """The values that every technique offers for a task, and their compatible combinations; `left_out` has the rest."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.left_out: dict[Settings, LeftOut] = {}
        self.offers = {name: self._offers(name, technique) for name, technique in REGISTRY.items()}
        self._risks = {(name, value): risk for name, offers in self.offers.items() for value, risk in offers}

    def _offers(self, name: str, technique: Technique) -> list[tuple[Any, Risk]]:
        found = self.guarded(((name, ""),), lambda: [
            (value, technique.risk(self.task, value)) for value in technique.options(self.task)
        ])  # fmt: skip
        return found or []

    def guarded(self, what: Settings, ask: Callable[[], Any]) -> Any:
        """The result of `ask`; None if it fails, and then `left_out` has the reason."""
        try:
            return ask()
        except Exception as error:  # a model may break a technique in any way: the search goes on without it
            self.leave_out(what, error)
            return None

    def leave_out(self, what: Settings, error: Exception) -> None:
        ours = isinstance(error, ShoestringError)
        kind = "no effect" if isinstance(error, NoEffect) else "refused" if ours else "error"
        self.left_out.setdefault(what, LeftOut(what, str(error) if ours else told(error), kind))

    def at(self, level: Risk) -> list[Option]:
        """Every combination whose highest risk is `level`."""
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
                if self.compatible(settings):
                    combinations.append(Option(settings, level))
        return tuple(combinations)

    def compatible(self, settings: Settings) -> bool:
        """Whether no technique refuses another one."""
        return all(self._compatible(one, other) for one, other in itertools.combinations(settings, 2))

    @cache  # noqa: B019 - lives as long as one search
    def _compatible(self, one: tuple[str, Any], other: tuple[str, Any]) -> bool:
        settings = dict((one, other))
        reasons = [REGISTRY[name].refuses for name in settings]
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
            self._risks[name, value] = REGISTRY[name].risk(self.task, scalar(value))
        return self._risks[name, value]

    def roughness(self, option: Option) -> int:
        """How approximate an option is, within its risk."""
        return sum(self._roughness(*pair) for pair in option.settings)

    @cache  # noqa: B019 - lives as long as one search
    def _roughness(self, name: str, value: Any) -> int:
        return REGISTRY[name].roughness(self.task, scalar(value))

    @cache  # noqa: B019 - lives as long as one search
    def bounds(self, name: str, value: Any) -> Bounds:
        """What is known about a value before it is traced."""
        return REGISTRY[name].bounds(self.task, scalar(value))


def risk_of(task: Task, plan: Plan) -> str:
    """The highest risk among a plan's techniques, for a task on which it is not applied yet."""
    values = plan.techniques().items()
    return max((REGISTRY[name].risk(task, scalar(value)) for name, value in values), default=Risk.EXACT).name.lower()


def told(error: Exception) -> str:
    """An exception that is not ours -> one line, with the place where it was raised."""
    message = str(error).strip().splitlines()
    frames = extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {message[0] if message else 'no message'}{where}"
