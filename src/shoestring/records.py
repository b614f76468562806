"""JSON files of ours as dataclasses: every field is checked by its declared type before anything uses it."""

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

MOST_CHARACTERS = 64 * 2**20  # of a file; a record is a few thousand
MOST_NUMBER = 2**63


def read_object(text: str | bytes) -> dict[str, Any]:
    """JSON text -> the object in it; ValueError says why it is none."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"it has {len(text):,} characters, and at most {MOST_CHARACTERS:,} are read")
    try:
        record = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(record, dict):
        raise ValueError(f"it holds {_named(record)}, not an object")
    return record


def checked(cls: type, record: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass that a record has, lists as tuples where they are declared so; ValueError names the
    first key whose value is of another type."""
    hints = get_type_hints(cls)
    found = {}
    for name in (field.name for field in fields(cls) if field.name in record):
        if not matches(record[name], hints[name]):
            raise ValueError(f"{name} is {_named(record[name])}, not {_declared(hints[name])}")
        found[name] = tuple(record[name]) if get_origin(hints[name]) is tuple else record[name]
    return found


def matches(value: Any, hint: Any) -> bool:
    """Whether a value from JSON is of a declared type. No number is beyond 64 bits, and an int is not a bool.

    >>> matches([[1, 2], [3]], list[list[int]]), matches({"a": True}, dict[str, int]), matches(1, float | None)
    (True, False, True)
    """
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return _is_sane(value)
    if origin in (Union, UnionType):
        return any(matches(value, one) for one in inner)
    if origin in (list, tuple):
        return isinstance(value, list) and all(matches(one, inner[0]) for one in value)
    if is_typeddict(hint):
        known = get_type_hints(hint)
        return (
            isinstance(value, dict)
            and hint.__required_keys__ <= set(value) <= set(known)
            and all(matches(one, known[name]) for name, one in value.items())
        )
    if origin is dict:
        return isinstance(value, dict) and all(matches(one, inner[1]) for one in value.values())
    if hint is NoneType:
        return value is None
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and _is_sane(value)
    return type(value) is hint and _is_sane(value)


def _is_sane(value: Any) -> bool:
    """Whether all numbers in it have a meaning: NaN and infinity have, an integer of a thousand digits has not."""
    if isinstance(value, dict):
        return all(map(_is_sane, value.values()))
    if isinstance(value, list):
        return all(map(_is_sane, value))
    if isinstance(value, float) and not math.isfinite(value):
        return True
    return not isinstance(value, int | float) or abs(value) < MOST_NUMBER


def _named(value: Any) -> str:
    words = json.dumps(value) if isinstance(value, str | int | float | NoneType) else type(value).__name__
    return words if len(words) <= 40 else f"{words[:37]}..."


def _declared(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).replace("typing.", "")
