"""How each category of bytes is shown everywhere: its label, its colour, and its place in a stack.

Blue is what grows with the model, amber and rust what grows with the batch. Neighbours in the stack differ in
lightness, so that a print in grey can still be read, and all are seen on a dark terminal.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Look:
    """The label and the colour of a category."""

    label: str
    colour: str


_FORWARD = Look("forward activations", "#f2b652")
_BACKWARD = Look("backward activations", "#b5482c")
LOOKS = {
    "model": Look("model", "#27588c"),
    "gradient": Look("gradients", "#a9cfe8"),
    "optimizer_state": Look("optimizer state", "#5b97c9"),
    "optimizer": Look("optimizer", "#8fbfe0"),
    "input": Look("input", "#7d7468"),
    "activation": _FORWARD,
    "forward": _FORWARD,
    "activation_gradient": _BACKWARD,
    "backward": _BACKWARD,
    "workspace": Look("workspace", "#a9a396"),
}
_RANK = {name: place for place, name in enumerate(LOOKS)}
INK, MUTED, FAINT = "#222222", "#7a7a7a", "#e4e4e4"
ACCENT = "#0b7a75"  # the second of two things that are compared


def look(kind: str) -> Look:
    """The name of a category -> its look; an unknown name is shown as it is, in grey."""
    return LOOKS.get(kind, Look(kind.replace("_", " "), MUTED))


def in_order(sizes: dict[str, int]) -> dict[str, int]:
    """Bytes by category -> the same in the order of the stack, without zeros."""
    return {kind: sizes[kind] for kind in sort_kinds(kind for kind in sizes if sizes[kind])}


def sort_kinds(kinds: Iterable[str]) -> list[str]:
    """Categories -> the same in the order of the stack; unknown ones come last."""
    return sorted(kinds, key=lambda kind: _RANK.get(kind, len(_RANK)))


def is_light(colour: str) -> bool:
    """Whether black letters read better than white ones on a "#rrggbb" colour, by its luma."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue > 128
