"""A study: one table or figure of a paper as data, read from a TOML file.

title = "Pareto-optimal settings for WRN-28-2 on CIFAR-10"
paper = "sohoni"                   # one of PAPERS
place = "Table 3"
model = "wrn-28-2"
batch = 100
quality = "accuracy"               # or "bleu", "cosine"; left out where nothing is trained

[defaults]                         # settings of every row
precision = "fp16"

[[rows]]                           # a row: its label, its settings, what the paper printed
label = "30%, 10"
nonzero = 30
microbatch = 10
paper = {memory_mb = 6.7, accuracy = 93.95, interval = 0.18}

[grid]                             # or in place of rows: every combination
nonzero = [100, 50, 30]

[scales.small]                     # how it is trained at a scale; `memory` trains nothing and needs no entry
epochs = 10
image = 16
seeds = [0]

[[claims]]                         # what the paper says about it, and how that is judged (results.py)
claim = "30% nonzeros cost 0.42 points"
metric = "accuracy"
row = "30%, 10"
minus = "dense"
paper = -0.42
at_least = -1.0
"""

import itertools
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ShoestringError
from ..records import file_bytes

FOLDER = Path(__file__).parent / "files"
PAPERS = {
    "sohoni": "Sohoni, Aberger, Leszczynski, Zhang, Ré: Low-Memory Neural Network Training: A Technical Report "
    "(arXiv 1904.10631)",
    "barley": "Barley, Fröning: Less Memory Means smaller GPUs: Backpropagation with Compressed Activations "
    "(arXiv 2409.11902)",
}
SCALES = ("memory", "small", "full")
NUMBER = (int, float)
MOST_NUMBER = 2**63
SETTINGS: dict[str, tuple[type, ...]] = {
    "model": (str,),
    "nonzero": NUMBER,
    "method": (str,),
    "rewire_fraction": NUMBER,
    "rewire_frequency": NUMBER,
    "precision": (str,),
    "optimizer": (str,),
    "checkpoint": (str,),
    "microbatch": (int,),
    "simulated": (bool,),
    "activations": (str,),
    "lr_multiplier": NUMBER,
    "width": NUMBER,  # of a translation network, in times of the scale's
    "length": NUMBER,  # of the training, in times of the scale's
}
LEARNED = ("accuracy", "bleu")
QUALITIES = (*LEARNED, "cosine")  # cosine: of the gradient with the exact one, in a brief plain training
_TOP: dict[str, tuple[type, ...]] = {
    "title": (str,), "paper": (str,), "place": (str,), "about": (str,), "model": (str,), "batch": (int,),
    "tokens": (int,), "quality": (str,), "tuning": (bool,), "by_epoch": (bool,), "pareto": (bool,), "defaults": (dict,),
    "grid": (dict,), "rows": (list,), "scales": (dict,), "claims": (list,),
}  # fmt: skip
_SCALE: dict[str, tuple[type, ...]] = {
    "data": (str,), "epochs": (int,), "updates": (int,), "image": (int,), "width": (int,), "seeds": (list,),
    "schedule": (str,), "tokens": (int,), "batch": (int,), "untrained": (list,),
}  # fmt: skip
EXACT = ("checkpoint", "microbatch")  # without batch norm they change a gradient by rounding and dropout's draw alone
_CLAIM: dict[str, tuple[type, ...]] = {
    "claim": (str,), "metric": (str,), "row": (str,), "minus": (str,), "over": (str,), "paper": NUMBER,
    "digits": (int,), "percent": NUMBER, "at_least": NUMBER, "at_most": NUMBER, "every": (bool,),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A setting of the study and what the paper printed for it; `seeds` if they are not its scale's."""

    label: str
    settings: dict[str, Any]
    paper: dict[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Scale:
    """How a study is trained: the data's folder name, its length, the side of the images or the network's width;
    `untrained`: settings that are measured but left out of the trainings, since they change no gradient."""

    data: str = "cifar-10"
    epochs: int | None = None
    updates: int | None = None
    image: int | None = None
    width: int | None = None
    seeds: tuple[int, ...] = (0,)
    schedule: str = ""
    tokens: int | None = None
    batch: int | None = None
    untrained: tuple[str, ...] = ()


@dataclass(frozen=True)
class Study:
    """A table or figure: rows, how they are trained at each scale, and the paper's claims."""

    name: str
    title: str
    paper: str
    place: str
    model: str
    rows: tuple[Row, ...]
    about: str = ""
    batch: int | None = None
    tokens: int | None = None
    quality: str = ""
    tuning: bool = False
    by_epoch: bool = False  # the page shows the quality after each epoch, too,
    pareto: bool = False  # or by memory
    scales: dict[str, Scale] = field(default_factory=dict)
    claims: tuple[dict[str, Any], ...] = ()

    def scale(self, name: str) -> Scale | None:
        """The entry of a scale; None for `memory`, and if the study is not trained at that scale."""
        if name not in SCALES:
            raise ShoestringError(f"there is no scale {name!r}: use {', '.join(SCALES)}")
        return self.scales.get(name)


def names() -> list[str]:
    """The names of all studies."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str) -> Study:
    """A study by its name, or by the path of a TOML file."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.is_file():
        raise ShoestringError(f"there is no study {name!r}: use one of {', '.join(names())}, or a .toml file")
    try:
        text = file_bytes(path).decode()
    except (OSError, ValueError) as error:
        raise ShoestringError(f"{path} cannot be read as the text of a study: {error}") from None
    return parse(text, path.stem, str(path))


class _Source:
    """The text of a study file, to say in which line a mistake is."""

    def __init__(self, text: str, path: str) -> None:
        self.text, self.path = text, path

    def wrong(self, key: str, why: str, number: int = 0) -> ShoestringError:
        """The error for a key; `number`: which of its appearances it is."""
        name = re.escape(key)
        pattern = re.compile(rf"\s*\[*\s*([\w.]*\.)?{name}\s*(=|\])|.*[{{,]\s*{name}\s*=")
        found = [n for n, line in enumerate(self.text.splitlines(), 1) if pattern.match(line)]
        place = f", line {found[min(number, len(found) - 1)]}" if found else ""
        return ShoestringError(f"{self.path}{place}: {key} {why}")

    def check(self, table: Any, known: Mapping[str, tuple[type, ...]], where: str) -> None:
        """Refuses keys that are not known and values of another type."""
        if not isinstance(table, dict):
            raise self.wrong(where, f"must be a table, not {type(table).__name__}")
        for key, value in table.items():
            if key not in known:
                raise self.wrong(key, f"is not known in {where}: use {', '.join(known)}")
            if not isinstance(value, known[key]) or (isinstance(value, bool) and bool not in known[key]):
                wanted = " or ".join(kind.__name__ for kind in known[key])
                raise self.wrong(key, f"of {where} is {value!r:.60}, and must be {wanted}")
            if isinstance(value, int | float) and not abs(value) < MOST_NUMBER:  # nor is NaN
                raise self.wrong(key, f"of {where} is {value!r:.60}, which is no number to count with")


def parse(text: str, name: str, path: str) -> Study:
    """The text of a study file -> the study; a mistake is named with its key and line."""
    source = _Source(text, path)
    try:
        top = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ShoestringError(f"{path} is not TOML: {error}") from None
    source.check(top, _TOP, "a study")
    for key in ("title", "paper", "place", "model"):
        if key not in top:
            raise ShoestringError(f"{path}: {key} is missing")
    for key in ("batch", "tokens"):
        if top.get(key, 1) < 1:
            raise source.wrong(key, f"is {top[key]}, and must be at least 1")
    if top["paper"] not in PAPERS:
        raise source.wrong("paper", f"is {top['paper']!r:.60}: use {' or '.join(PAPERS)}")
    if top.get("quality", "accuracy") not in QUALITIES:
        raise source.wrong("quality", f"is {top['quality']!r:.60}: use {' or '.join(QUALITIES)}")
    rows = tuple(_rows(top, source))
    return Study(
        name=name,
        rows=rows,
        scales={key: _scale(key, table, source) for key, table in top.pop("scales", {}).items()},
        claims=tuple(_claims(top, rows, source)),
        **{key: top[key] for key in top if key not in ("rows", "grid", "defaults", "claims")},
    )


def _rows(top: dict[str, Any], source: _Source) -> Iterable[Row]:
    defaults = top.get("defaults", {})
    source.check(defaults, SETTINGS, "defaults")
    if ("rows" in top) == ("grid" in top):
        raise ShoestringError(f"{source.path}: give either rows or a grid")
    if "grid" in top:
        yield from _grid(top["grid"], defaults, source)
        return
    if not top["rows"]:
        raise source.wrong("rows", "are an empty list: give at least one")
    labels: set[str] = set()
    for number, table in enumerate(top["rows"]):
        source.check(table, SETTINGS | {"label": (str,), "paper": (dict,), "seeds": (list,)}, "rows")
        settings = defaults | {key: value for key, value in table.items() if key in SETTINGS}
        label = table.get("label") or label_of(settings)
        if label in labels:
            raise source.wrong("label", f"{label!r} is there twice", number)
        labels.add(label)
        seeds = tuple(_seeds(table["seeds"], source)) if "seeds" in table else None
        yield Row(label, settings, table.get("paper", {}), seeds)


def _grid(grid: Any, defaults: dict[str, Any], source: _Source) -> Iterable[Row]:
    source.check(grid, dict.fromkeys(SETTINGS, (list,)), "grid")
    if not grid:
        raise source.wrong("grid", "is empty: give at least one list")
    for key, values in grid.items():
        if not values:
            raise source.wrong(key, "of the grid is an empty list, so that there is no combination")
        for value in values:
            source.check({key: value}, SETTINGS, "grid")
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        yield Row(label_of(chosen), defaults | chosen)


def label_of(settings: Mapping[str, Any]) -> str:
    """Settings in words: "nonzero 30, microbatch 10"."""
    return ", ".join(f"{key} {value}" for key, value in settings.items()) or "plain"


def _scale(name: str, table: Any, source: _Source) -> Scale:
    if name not in SCALES[1:]:
        raise source.wrong(name, f"is no scale that is trained: use {' or '.join(SCALES[1:])}")
    source.check(table, _SCALE, name)
    if ("epochs" in table) == ("updates" in table):
        raise source.wrong(name, "needs either epochs or updates")
    for key in ("epochs", "updates", "image", "width", "tokens", "batch"):
        if key in table and table[key] < 1:
            raise source.wrong(key, f"of {name} is {table[key]}, and must be at least 1")
    seeds, untrained = tuple(_seeds(table.get("seeds", [0]), source)), tuple(table.get("untrained", []))
    if untrained and ("tokens" not in table or not all(word in EXACT for word in untrained)):
        words = f"of a network that is fed with tokens, and so without batch norm: some of {', '.join(EXACT)}"
        raise source.wrong("untrained", f"are {list(untrained)!s:.60}: give settings that change no gradient, {words}")
    return Scale(**(table | {"seeds": seeds, "untrained": untrained}))


def _seeds(values: list[Any], source: _Source) -> Iterable[int]:
    if not values or len(set(map(str, values))) != len(values):
        raise source.wrong("seeds", f"are {values!s:.60}: give different whole numbers from 0 on")
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MOST_NUMBER:
            raise source.wrong("seeds", f"have {value!r:.60} among them: give whole numbers from 0 on")
        yield value


def _claims(top: dict[str, Any], rows: tuple[Row, ...], source: _Source) -> Iterable[dict[str, Any]]:
    labels = {row.label for row in rows}
    for number, claim in enumerate(top.get("claims", [])):
        source.check(claim, _CLAIM, "claims")
        for key in ("claim", "metric"):
            if key not in claim:
                raise source.wrong("claim", f"number {number + 1} has no {key}", number)
        for key in ("row", "minus", "over"):
            if claim.get(key, next(iter(labels))) not in labels:
                raise source.wrong(key, f"{claim[key]!r} of a claim is no label of a row: use {', '.join(labels)}")
        if "row" not in claim and not claim.get("every"):
            raise source.wrong("claim", f"{claim['claim']!r} names no row: give row, or every = true", number)
        if not {"digits", "percent", "at_least", "at_most"} & set(claim) and not claim.get("every"):
            raise source.wrong(
                "claim", f"{claim['claim']!r} does not say how it is judged: give digits, percent, at_least or at_most",
                number,
            )  # fmt: skip
        yield claim
