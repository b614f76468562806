"""Writes docs/api.md from the docstrings of everything that is public: `python docs/make_api.py`.

Public is what `PUBLIC` names. Anything else may change in any version, and docs and examples do without it
(tests/test_api.py).
"""

import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

import shoestring

PAGE = Path(__file__).with_name("api.md")
PUBLIC: dict[str, tuple[str, ...]] = {
    "shoestring": tuple(sorted(shoestring.__all__, key=str.lower)),
    "shoestring.errors": ("Diverged", "DamagedSave", "NoEffect"),
    "shoestring.models": ("materialise",),
    "shoestring.training.apply": ("LeanTask",),
    "shoestring.training.evaluate": ("Evaluation", "mean_loss"),
    "shoestring.training.schedules": ("schedule", "Constant", "Cosine", "InverseSqrt", "Steps"),
    "shoestring.runs.record": ("RunRecord",),
    "shoestring.runs.start": ("start_from",),
    "shoestring.techniques.optimizer.factored": ("Adafactor", "SM3"),
    "shoestring.techniques.sparsity.conversion": ("convert_to_dense", "from_dense"),
    "shoestring.techniques.activations.codecs": ("CODECS", "Codec"),
    "shoestring.techniques.technique": ("Risk",),
}
# Public too, with a page each: what they inherit is their library's, and need not be installed.
PAGES = {
    "shoestring.integrations.huggingface": (("LeanTrainer", "LeanMixin"), "integrations/huggingface.md"),
    "shoestring.integrations.lightning": (("Shoestring",), "integrations/lightning.md"),
}
INTRODUCTION = """\
# API
Made from the docstrings by `python docs/make_api.py`. What is listed here is public; everything else may change in any
version. Words that are our own are in the [glossary](glossary.md); commands have `shoestring COMMAND --help`.
"""


def page() -> str:
    linked = [
        f"- `{name}` of `{module}`: [{path}]({path})\n" for module, (names, path) in PAGES.items() for name in names
    ]
    sections = (section(module, names) for module, names in PUBLIC.items())
    return INTRODUCTION + "".join(sections) + "\n## Integrations\n" + "".join(linked)


def section(module: str, names: tuple[str, ...]) -> str:
    """A module -> its heading and an entry per name."""
    found = import_module(module)
    return f"\n## `{module}`\n" + "\n".join(entry(name, getattr(found, name)) for name in names)


def entry(name: str, thing: Any) -> str:
    if not callable(thing):  # a registry
        return f"### `{name}`\n{', '.join(f'`{key}`' for key in thing)}\n"
    lines = [f"### `{name}{signature(thing)}`", _fenced(inspect.getdoc(thing) or "")]
    if inspect.isclass(thing):
        lines += [f"- {line}" for line in members(thing)]
    return "\n".join(filter(None, lines)) + "\n"


def signature(thing: Any) -> str:
    """Names and defaults: the types are in the source."""
    if inspect.isclass(thing) and issubclass(thing, Exception | Enum):
        return ""
    found = inspect.signature(thing)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in found.parameters.values()]
    shown = found.replace(parameters=[p.replace(default=_default(p)) for p in bare], return_annotation=found.empty)
    return str(shown)


class _Made:
    """What stands for a default that is made anew, or has no words."""

    def __repr__(self) -> str:
        return "..."


def _default(parameter: inspect.Parameter) -> Any:
    """A default that is no plain value is shown as dots."""
    value = parameter.default
    plain = value is parameter.empty or isinstance(value, str | int | float | tuple | None)
    return value if plain else _Made()


def _fenced(words: str) -> str:
    """A docstring with the examples at its end as a block."""
    text, found, examples = words.partition(">>> ")
    return f"{text}```pycon\n{found}{examples}\n```" if found else words


def members(kind: type) -> Iterator[str]:
    """A class -> its documented methods and properties; an enum's members."""
    if issubclass(kind, Enum):
        yield from (f"`{name}`" for name in kind.__members__)
    for name, member in vars(kind).items():
        if name.startswith("_") or (is_dataclass(kind) and name in {field.name for field in fields(kind)}):
            continue
        words = inspect.getdoc(member)
        if not words or isinstance(member, int):
            continue
        if isinstance(member, property):
            yield f"`{name}`: {_first(words)}"
        elif isinstance(member, classmethod | staticmethod):
            yield f"`{name}{signature(getattr(kind, name))}`: {_first(words)}"
        elif inspect.isfunction(member):
            yield f"`{name}{signature(member).replace('(self, ', '(').replace('(self)', '()')}`: {_first(words)}"


def _first(words: str) -> str:
    return " ".join(words.split("\n\n")[0].split())


if __name__ == "__main__":
    PAGE.write_text(page())
