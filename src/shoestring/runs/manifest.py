"""Validates the manifest of a save: every field is checked before it is used to read anything.

The seal of a manifest shows that it is not damaged, not who wrote it. ValueError names the key that is wrong.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from .tensorfile import Entry, Written

_FIELDS = {"version": int, "update": int, "fingerprint": str, "values": dict, "files": dict}
_GROUP = re.compile(r"\w+")
_MOST_DEPTH, _MOST_GAPS = 100, 64  # lists within lists; elements of memory for each of a tensor with strides
_MARKS = ("$tensor", "$tuple", "$items")


def check_fields(record: dict[str, Any]) -> dict[str, Written]:
    """A manifest -> its files; ValueError names the key that is missing, has the wrong type, or is not a plain name.

    A file is named after a group of values, which is a single word: it cannot be outside the save's folder.
    """
    for key, kind in _FIELDS.items():
        if type(record.get(key)) is not kind:
            raise ValueError(f"key {key!r} is {_kind(record, key)}, not {kind.__name__}")
    if type(record.get("run", "")) is not str:  # saves of earlier versions have none
        raise ValueError(f"key 'run' is {_kind(record, 'run')}, not str")
    files = {}
    for group in record["values"]:
        if not _GROUP.fullmatch(group):
            raise ValueError(f"key 'values' has {group!r:.60}, which is not the name of a group")
    for name, written in record["files"].items():
        if name.removesuffix(".safetensors") not in record["values"] or not name.endswith(".safetensors"):
            raise ValueError(f"key 'files' has {name!r:.60}, which is not the file of a group of values")
        for key, kind in (("bytes", int), ("sha256", str)):
            if not isinstance(written, dict) or type(written.get(key)) is not kind:
                raise ValueError(f"key 'files.{name}.{key}' is {_kind(written, key)}, not {kind.__name__}")
        files[name] = Written(written["bytes"], written["sha256"])
    return files


def _kind(record: Any, key: str) -> str:
    if not isinstance(record, dict):
        return f"in a {type(record).__name__}"
    return type(record[key]).__name__ if key in record else "missing"


def check_packed(packed: Any, key: str, entries: Mapping[str, Entry], depth: int = 0) -> None:
    """Checks the JSON of a state against its file; ValueError names the key that `pack` would not have written."""
    if depth > _MOST_DEPTH:
        raise ValueError(f"key {key!r:.100} is nested over {_MOST_DEPTH} deep")
    mark = next((mark for mark in _MARKS if isinstance(packed, dict) and mark in packed), None)
    if mark == "$tensor":
        return _check_tensor(packed, key, entries)
    parts = packed[mark] if mark else packed
    if mark and not isinstance(parts, list):
        raise ValueError(f"key '{key}.{mark}' is {type(parts).__name__}, not list")
    if mark == "$items":
        if not all(isinstance(pair, list) and len(pair) == 2 and _is_plain(pair[0]) for pair in parts):
            raise ValueError(f"key '{key}.{mark}' is not a list of plain keys and their values")
        parts = dict(parts)
    inside = parts.items() if isinstance(parts, dict) else enumerate(parts) if isinstance(parts, list) else ()
    for name, part in inside:
        check_packed(part, f"{key}.{name}", entries, depth + 1)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _check_tensor(packed: dict[str, Any], key: str, entries: Mapping[str, Entry]) -> None:
    entry = entries.get(packed["$tensor"]) if isinstance(packed["$tensor"], str) else None
    if entry is None:
        raise ValueError(f"key {key!r} names a tensor that its file does not hold")
    strides = packed.get("strides")
    if strides is not None and not _fit(strides, entry.shape):
        raise ValueError(f"key '{key}.strides' does not fit a tensor of shape {entry.shape}")
    if not isinstance(packed.get("device", ""), str):
        raise ValueError(f"key '{key}.device' is {type(packed['device']).__name__}, not str")


def _fit(strides: Any, shape: tuple[int, ...]) -> bool:
    """Whether these are strides for the shape whose memory, gaps included, is at most a few times its elements."""
    if not isinstance(strides, list) or len(strides) != len(shape):
        return False
    if not all(type(stride) is int and stride >= 0 for stride in strides):
        return False
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    return 0 in shape or reach <= _MOST_GAPS * math.prod(shape)
