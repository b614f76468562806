"""JSON files of ours as dataclasses: every field is checked by its declared type before anything uses it.

A sealed file ends with the SHA-256 of the rest: it shows that no byte has changed, not who wrote it.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

MOST_CHARACTERS = 16 * 2**20  # of a file; a record is a few thousand
MOST_NUMBER = 2**63


def file_bytes(path: Path) -> bytes:
    """The content of a file that somebody else may have put there: opening a pipe would wait for ever, and a device
    never ends. ValueError if it is no regular file, or a large one."""
    if path.exists() and not path.is_file():
        raise ValueError("it is not a regular file")
    if (size := path.stat().st_size) > MOST_CHARACTERS:
        raise ValueError(f"it has {size:,} bytes, and at most {MOST_CHARACTERS:,} are read")
    return path.read_bytes()


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


def seal(record: Mapping[str, Any]) -> bytes:
    """A record -> JSON with the SHA-256 of the rest as its last entry, so that any changed byte is detected."""
    digest = hashlib.sha256(json.dumps(record).encode()).hexdigest()
    return json.dumps({**record, "sha256": digest}, indent=1).encode()


def unseal(data: bytes) -> dict[str, Any]:
    """The output of `seal` -> the record; ValueError if a byte has changed."""
    record, is_sealed = read_sealed(data)
    if not is_sealed:
        raise ValueError("it has no checksum")
    return record


def read_sealed(data: bytes) -> tuple[dict[str, Any], bool]:
    """A file of ours -> the record, and whether it was sealed; ValueError if a byte has changed since."""
    record = read_object(data)
    if "sha256" not in record:
        return record, False
    del record["sha256"]
    if seal(record) != data:
        raise ValueError("its checksum does not match; if you changed it yourself, take out its line sha256")
    return record, True


def checked(cls: type, record: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass that a record has, lists as tuples where they are declared so; ValueError names the
    first key whose value is of another type."""
    hints = get_type_hints(cls)
    found = {}
    for name in (field.name for field in fields(cls) if field.name in record):
        if not matches(record[name], hints[name]):
            wanted = "a number that a file of ours holds" if hints[name] is Any else _declared(hints[name])
            raise ValueError(f"{name} is {_named(record[name])}, not {wanted}")
        if name.endswith("_bytes") and isinstance(record[name], int) and record[name] < 0:
            raise ValueError(f"{name} is {record[name]:,}, and bytes are counted from 0 on")
        if name.endswith("_ratio") and isinstance(record[name], int | float) and not 0 <= record[name] < math.inf:
            raise ValueError(f"{name} is {record[name]:g}, and a ratio is a finite number from 0 on")
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
