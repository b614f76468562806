"""What a plan can say about a technique: its word, and the names and types of its settings. Imports no torch.

A value in a plan is a scalar, which stands for the technique's first setting, or a mapping of several:
`30` or `{"nonzero": 30, "method": "set"}`, on the command line `30` or `30,method=set`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from ..errors import ShoestringError


@dataclass(frozen=True)
class Kind:
    """The type of a setting. `holds` checks a plan's value, `read` converts the command line's text (ValueError if it
    cannot). What the command line can refuse at once, before any model is built, it does: `within` the `limit`."""

    noun: str
    holds: Callable[[Any], bool]
    read: Callable[[str], Any] = str
    limit: str = ""
    within: Callable[[Any], bool] = lambda value: True

    def parse(self, text: str) -> Any:
        """Text from the command line -> the value."""
        try:
            value = self.read(text)
        except ValueError:
            raise ShoestringError(f"{text!r} is not {self.noun}") from None
        if not self.within(value):
            raise ShoestringError(f"{text.strip()} is out of range: it must be {self.limit}")
        return value

    def checked(self, what: str, value: Any) -> Any:
        """A value from a plan -> the same, a list as a tuple; `what` names it if it is refused."""
        if not self.holds(value):
            raise ShoestringError(f"{what} is {value!r}, which is not {self.noun}")
        return tuple(value) if isinstance(value, list) else value


MOST = 2**63  # a larger number has no meaning in any setting


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    number: Any = value
    return -MOST < number < MOST  # which NaN is not


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and _is_number(value)


def _are_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)


def _whole(text: str) -> int:
    return int(text.replace("_", ""))


def _number(text: str) -> float:
    number = float(text)
    return int(number) if number.is_integer() else number


def _percent(text: str) -> float:
    return _number(text.removesuffix("%"))


def _switch(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(text)
    return text == "true"


TEXT = Kind("text", lambda value: isinstance(value, str))
NAMES = Kind("a list of names, joined by +", _are_names, lambda text: tuple(text.split("+")))
SWITCH = Kind("true or false", lambda value: isinstance(value, bool), _switch)
NUMBER = Kind("a number", _is_number, _number)
PERCENT = Kind("a percentage", _is_number, _percent, "above 0 and at most 100", lambda value: 0 < value <= 100)
COUNT = Kind("a whole number", _is_whole, _whole, "from 1 to 1,000,000,000", lambda value: 1 <= value <= 10**9)
SEED = Kind("a whole number", _is_whole, _whole, "at least 0", lambda value: value >= 0)


def one_of(*choices: str) -> Kind:
    """Texts -> the kind of a setting that is one of them."""

    def read(text: str) -> str:
        if text not in choices:
            raise ShoestringError(f"invalid choice: {text!r} (choose from {', '.join(choices)})")
        return text

    return Kind(f"one of {', '.join(choices)}", TEXT.holds, read)


@dataclass(frozen=True)
class Word:
    """A technique as plans and the command line know it.

    `name` is the plan's field, the flag and the key in `Task.settings`; `module` is the technique's folder.
    `settings` are the fields of the module's `Settings`, the first of which a scalar stands for.
    `nothing` is a value of it that asks for nothing. `of_several`: it is about several processes, and says nothing
    about a model that one process holds.
    """

    name: str
    module: str
    help: str
    metavar: str
    settings: Mapping[str, Kind]
    nothing: Any = None
    of_several: bool = False

    @property
    def first(self) -> str:
        return next(iter(self.settings))

    @property
    def further(self) -> list[str]:
        return list(self.settings)[1:]

    def asks(self, value: Any) -> bool:
        """Whether a value changes anything."""
        return value is not None and self.as_mapping(value)[self.first] != self.nothing

    def as_mapping(self, value: Any) -> dict[str, Any]:
        return dict(value) if isinstance(value, Mapping) else {self.first: value}

    def checked(self, value: Any) -> Any:
        """A plan's value -> the same in its shortest form; an unknown or mistyped setting is refused by its name."""
        given = {key: part for key, part in self.as_mapping(value).items() if part is not None}
        if unknown := [key for key in given if key not in self.settings]:
            raise ShoestringError(self._no_setting(unknown[0]))
        if self.first not in given:
            raise ShoestringError(f"{self.name} lacks {self.first!r}: give it {self.help}")
        found = {key: self.settings[key].checked(self._named(key), given[key]) for key in self.settings if key in given}
        return found if len(found) > 1 else found[self.first]

    def parse(self, text: str) -> Any:
        """VALUE[,KEY=VALUE...] -> a plan's value. A technique with one setting takes all of the text for it."""
        first, *rest = text.split(",") if self.further else [text]
        found = {self.first: self.settings[self.first].parse(first)}
        for part in rest:
            key, equals, value = part.partition("=")
            if not equals and key in self.further:
                raise ShoestringError(f"{self.name}: {key} has no value: write it as {key}=VALUE")
            if not equals or key not in self.further:
                raise ShoestringError(self._no_setting(key))
            try:
                found[key] = self.settings[key].parse(value)
            except ShoestringError as error:
                raise ShoestringError(f"{key}: {error}") from None
        return found if len(found) > 1 else found[self.first]

    def _named(self, key: str) -> str:
        return self.name if key == self.first else f"{self.name} {key}"

    def _no_setting(self, key: str) -> str:
        further = f"after its value come {', '.join(self.further)}" if self.further else "it takes one value alone"
        return f"{self.name} has no setting {key!r}: {further}"


def in_words(value: Any) -> str:
    """A plan's value -> how the command line says it: the inverse of `Word.parse`."""
    if not isinstance(value, Mapping):
        return _text(value)
    (_, first), *rest = value.items()
    return ",".join([_text(first), *(f"{key}={_text(part)}" for key, part in rest)])


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "+".join(value) if isinstance(value, list | tuple) else str(value)


def described(settings: Iterable[tuple[str, Any]]) -> str:
    """Pairs of word and value -> "checkpoint no-bn, microbatch 10"; "" for none."""
    return ", ".join(f"{name} {in_words(value)}".strip() for name, value in settings)
