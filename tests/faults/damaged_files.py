"""Files of ours with wrong types, odd numbers, deep nesting and changed bytes: read, or refused in one line.

A family is a good file as data, how it is written, and how it is read; damage is done to the data, or to the bytes.
"""

import copy
import json
import random
import struct
import tomllib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoestring import Plan, ShoestringError
from shoestring.records import seal
from shoestring.runs.record import RunRecord, read_record
from shoestring.runs.save import Saves, check
from shoestring.runs.start import start_from
from shoestring.runs.tensorfile import TensorFile
from shoestring.studies.jobs import Store
from shoestring.studies.study import load
from shoestring.techniques import WORDS

DEEP = json.loads("[" * 400 + "]" * 400)
ODD: list[Any] = [
    None, True, False, -1, 0, 1.5, float("nan"), float("inf"), -float("inf"), 1e308, 10**400, 2**63, -(2**63) - 1, "",
    "x", "nan", "x" * 300, "\0", "..", "../../secret", "/etc/passwd", "\ud800", [], [[]], {}, {"a": {}}, [None], DEEP,
    ["x"] * 3, {"$tensor": "x"}, {"$tuple": 3}, {"$items": [[[], 1]]}, [0, 4], "F32", "30,method=set",
]  # fmt: skip


def damage(record: Any, draw: random.Random) -> None:
    """Damages something inside a record, in place: a value replaced, removed, moved to another key, or added."""
    if not record:
        return
    key = draw.choice(list(record) if isinstance(record, dict) else range(len(record)))
    if isinstance(record[key], dict | list) and record[key] and draw.random() < 0.6:
        return damage(record[key], draw)
    what = draw.randrange(4)
    if what == 0 and isinstance(record, dict):
        del record[key]
    elif what == 1 and isinstance(record, dict):
        record[draw.choice(["other", "", "version", "microbatch", "rows", "x" * 300])] = record.pop(key)
    elif what == 2 and isinstance(record, list):
        record.insert(key, copy.deepcopy(draw.choice(ODD)))
    else:
        record[key] = copy.deepcopy(draw.choice(ODD))


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Bytes with a few changed, cut, repeated or put in."""
    found = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 8])):
        place = draw.randrange(len(found) + 1)
        what = draw.randrange(4)
        if what == 0 and place < len(found):
            found[place] ^= 1 << draw.randrange(8)
        elif what == 1:
            del found[place : place + draw.choice([1, 4, 100])]
        elif what == 2:
            found[place:place] = draw.choice([b"\0", b"\xff", b"[", b"{", b'"', b"9" * 30, b"-", b"e999", b"\n"])
        else:
            found[place:place] = found[place : place + 20]
    return bytes(found)


@dataclass(frozen=True)
class Family:
    """A kind of file: a good one as data, its bytes, and what reads it."""

    good: Any
    write: Callable[[Any], bytes]
    read: Callable[[bytes], Any]


def _json(record: Any) -> bytes:
    return json.dumps(record).encode("utf-8", "surrogatepass")


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def plans(_: Path) -> Family:
    row = {"settings": {}, "risk": "exact", "predicted_peak_bytes": 1, "predicted_time_ratio": 1.0}
    plan = Plan(
        nonzero={"nonzero": 30, "method": "set"}, microbatch=10, checkpoint="every-2", optimizer="8bit", task="net",
        budget_bytes=7_000_000, predicted_bytes={"model": 3}, reasons=("why",), alternatives=(row,),
    )  # fmt: skip
    return Family(
        json.loads(plan.to_json()), _json, lambda data: str(Plan.from_json(data.decode("utf-8", "surrogateescape")))
    )


def records(folder: Path) -> Family:
    good = RunRecord("net", {"seed": 0}, {"torch": "2"}, 7, 6, {"model": 3}, measured_peaks=[[0, 5]], quality=1.5)
    return Family(good.to_json(), _json, lambda data: read_record(_written(folder / "record.json", data)))


class _Part:
    def state(self) -> dict[str, Any]:
        return {"a": torch.ones(3), "b": [1, 2.5, None, (1, "x")], "c": {1: torch.zeros(2, 2).t()}}


def manifests(folder: Path) -> Family:
    """Sealed again after the damage, as somebody would who means it."""
    path = Saves(folder / "saves").write(1, "f", {"part": _Part()}) / "manifest.json"
    good = {key: value for key, value in json.loads(path.read_bytes()).items() if key != "sha256"}

    def read(data: bytes) -> Any:
        save = check(_written(path, data).parent)
        return save.restore("part", _Restored())

    return Family(good, lambda record: seal(record) if isinstance(record, dict) else _json(record), read)


class _Restored(_Part):
    def restore(self, state: Any) -> None:
        str(state)


def headers(folder: Path) -> Family:
    """The header of a file of weights, with values behind it."""
    places = {
        "0.weight": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]},
        "0.bias": {"dtype": "F32", "shape": [3], "data_offsets": [48, 60]},
    }

    def write(record: Any) -> bytes:
        text = _json(record)
        return struct.pack("<Q", len(text)) + text + bytes(60)

    def read(data: bytes) -> Any:
        path = _written(folder / "weights.safetensors", data)
        found = TensorFile(path)
        for name in found.entries:
            found.read(name)
        return start_from(torch.nn.Sequential(torch.nn.Linear(4, 3)), path, partial=True)

    return Family(places | {"__metadata__": {"format": "pt"}}, write, read)


def studies(folder: Path) -> Family:
    text = (Path(load.__code__.co_filename).parent / "files" / "table3.toml").read_text()

    def read(data: bytes) -> Any:
        study = load(str(_written(folder / "study.toml", data)))
        return [study.scale(name) for name in ("memory", "small", "full")]

    return Family(tomllib.loads(text), lambda record: _toml(record).encode("utf-8", "surrogatepass"), read)


def _toml(record: Any) -> str:
    return "".join(f"{json.dumps(key)} = {_toml_value(value)}\n" for key, value in record.items())


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml_value(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, float) and value != value:
        return "nan"
    return json.dumps(value).replace("Infinity", "inf").replace("null", '"null"')


def results(folder: Path) -> Family:
    """A result in a study's store: a damaged one counts as none."""
    store, job = Store(folder / "store"), {"study": "x", "seed": 0}
    store.adopt(job, {"quality": 1.0, "by_epoch": [1, 2], "environment": {"cpu": "x"}})
    (path,) = (folder / "store" / "done").iterdir()
    return Family(json.loads(path.read_bytes()), _json, lambda data: (_written(path, data), store.result(job)))


def settings(_: Path) -> Family:
    """Values of techniques, as the words of a command line."""
    texts = ["30,method=set,layers=a+b", "8bit+no-gradient", "every-2,blocks=a", "int4,*:batch_norm=int2", "2"]

    def read(data: bytes) -> Any:
        text = data.decode("utf-8", "surrogateescape")
        for word in WORDS:
            try:
                Plan(**{word.name: word.parse(text)})
            except ShoestringError as error:
                require_one_line(error)

    return Family(texts, lambda texts: str(texts[0] if texts else "").encode("utf-8", "surrogatepass"), read)


FAMILIES: dict[str, Callable[[Path], Family]] = {
    "plans": plans, "records": records, "manifests": manifests, "headers": headers, "studies": studies,
    "results": results, "settings": settings,
}  # fmt: skip


def require_one_line(error: Exception) -> None:
    assert "\n" not in str(error).strip() and len(str(error)) < 2000, f"not one line: {error}"


def check_family(name: str, count: int, seed: int, folder: Path) -> tuple[Counter, list[tuple[bytes, str]]]:
    """So many damaged files of a family -> how many were read and refused, and those that did something else."""
    draw, family = random.Random(f"{name} {seed}"), FAMILIES[name](folder)
    found, bad = Counter(), []
    good = family.write(family.good)
    family.read(good)
    for number in range(count):
        record = copy.deepcopy(family.good)
        if name == "settings":
            draw.shuffle(record)
        for _ in range(draw.choice([1, 1, 3])):
            damage(record, draw)
        try:
            data = mutated(good, draw) if number % 3 == 0 else family.write(record)
        except (TypeError, AttributeError, RecursionError, ValueError):
            continue  # what cannot be written as a file of this kind
        try:
            family.read(data)
            found["read"] += 1
        except ShoestringError as error:
            require_one_line(error)
            found["refused"] += 1
        except Exception as error:
            bad.append((data, f"{type(error).__name__}: {error}"))
    return found, bad
