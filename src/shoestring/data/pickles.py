"""Reads CIFAR-10's python files into plain data, without running a pickle.

The files are programs for a stack machine. This reader knows the few instructions that build dictionaries,
lists, numbers, strings and one array of bytes, and refuses every other one; it imports and calls nothing.
Long strings are not copied: a `Span` says where in the file they are, so that the pixels can be mapped.

Nothing beyond what those files need is built: one dictionary with string keys; in it lists of plain values, and arrays;
tuples within tuples at most once. So nothing is deeply nested or contains itself, and time and memory are at most
proportional to the file.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ShoestringError
from .files import map_file

# The only names that may occur; the arrays that they build are bytes in C order.
_NAMES = {
    "numpy.core.multiarray _reconstruct": "reconstruct",
    "numpy ndarray": "ndarray",
    "numpy dtype": "dtype",
}
_MARK = object()
_MOST_STEPS = 1_000_000  # those files take about 60,000
_MOST_LINE = 100  # characters of a name
_CONTAINERS = (tuple, list, dict)


@dataclass(frozen=True)
class Span:
    """A string of `length` bytes that begins `offset` bytes into the file."""

    offset: int
    length: int


@dataclass
class Bytes:
    """An array of unsigned bytes: its shape, and where in the file it is."""

    shape: tuple[int, ...] = ()
    span: Span | None = None


class _Refused(Exception):
    """The instruction just read is not allowed, with the reason."""


def read_pickle(path: Path) -> dict[str, Any]:
    """A file in the dialect of CIFAR-10's python files -> its dictionary, in which an array is a `Bytes`."""
    machine = _Machine(map_file(path).data)
    try:
        value = machine.run()
        if not isinstance(value, dict):
            raise _Refused(f"it holds a {type(value).__name__}, not a dictionary")
        return value
    except (_Refused, IndexError, TypeError, ValueError, AttributeError, struct.error) as error:
        cause = str(error) if isinstance(error, _Refused) else "the instructions do not fit together"
        raise ShoestringError(
            f"{path} is not one of CIFAR-10's python files: at byte {machine.at:,} {cause}; "
            "nothing was run; unpack the official archive again"
        ) from None


class _Machine:
    """The stack, the memo, and the position in the file."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0
        self.stack: list[Any] = []
        self.numbered: dict[int, Any] = {}

    def run(self) -> Any:
        for _ in range(_MOST_STEPS):
            if (code := bytes(self.take(1))) == b".":
                return self.stack.pop()
            step = _STEPS.get(code)
            if step is None:
                raise _Refused(f"stands instruction {code!r}, which those files do not use")
            step(self)
        raise _Refused(f"{_MOST_STEPS:,} instructions have passed, and those files have fewer")

    def take(self, length: int) -> memoryview:
        if self.at + length > len(self.data):
            raise _Refused(f"{length:,} more bytes are needed and the file ends after {len(self.data):,}")
        self.at += length
        return self.data[self.at - length : self.at]

    def number(self, form: str) -> int:
        return struct.unpack("<" + form, bytes(self.take(struct.calcsize(form))))[0]

    def line(self) -> str:
        start = self.at
        while self.take(1)[0] != ord("\n"):
            if self.at - start > _MOST_LINE:
                raise _Refused(f"stands a name of over {_MOST_LINE} characters")
        return bytes(self.data[start : self.at - 1]).decode("ascii")

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self, count: int) -> list[Any]:
        return [self.stack.pop() for _ in range(count)][::-1]

    def pop_to_mark(self) -> list[Any]:
        items = []
        while (item := self.stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    def long_string(self) -> None:
        length = self.number("I")
        self.take(length)
        self.push(Span(self.at - length, length))

    def name(self) -> None:
        name = f"{self.line()} {self.line()}"
        if name not in _NAMES:
            raise _Refused(f"stands the name {name!r}, which those files do not use")
        self.push(_NAMES[name])

    def call(self) -> None:
        name, values = self.pop(2)
        if not isinstance(name, str) or not isinstance(values, tuple) or not values:
            raise _Refused("something is called that is no name, or with nothing")
        if name == "reconstruct" and values[0] == "ndarray":
            self.push(Bytes())
        elif name == "dtype" and values[0] == "u1":
            self.push("u1")
        else:
            raise _Refused(f"{name!r:.40} is called, in a way that those files do not use")

    def fill(self) -> None:
        """Gives an array its shape and bytes; a type has nothing more to say."""
        target, values = self.pop(2)
        if isinstance(target, Bytes):
            _, shape, kind, column_order, span = values
            if not isinstance(shape, tuple) or len(shape) > 4 or not all(type(size) is int for size in shape):
                raise _Refused("ends an array whose shape is not a few numbers")
            if kind != "u1" or column_order or not isinstance(span, Span):
                raise _Refused("ends an array that is not of unsigned bytes in C order")
            target.shape, target.span = shape, span
        elif target != "u1":
            raise _Refused("something other than an array is filled")
        self.push(target)

    def append(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise _Refused("something other than a list is appended to")
        if any(isinstance(item, _CONTAINERS) for item in items):
            raise _Refused("a list is given something other than plain values")
        self.stack[-1].extend(items)

    def set_items(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], dict):
            raise _Refused("something other than a dictionary is given an entry")
        if not all(type(key) is str for key in items[::2]):
            raise _Refused("a dictionary is given a key that is no string")
        if any(isinstance(value, dict | tuple) for value in items[1::2]):
            raise _Refused("a dictionary is given an entry that is neither plain, a list nor an array")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def make_tuple(self, items: list[Any]) -> None:
        inner = (item for item in items if isinstance(item, _CONTAINERS))
        if any(not isinstance(item, tuple) or any(isinstance(part, _CONTAINERS) for part in item) for item in inner):
            raise _Refused("a tuple holds more than plain values and tuples of them")
        self.push(tuple(items))

    def remember(self, number: int) -> None:
        self.numbered[number] = self.stack[-1]

    def recall(self, number: int) -> None:
        if number not in self.numbered:
            raise _Refused(f"value {number} is used before it was made")
        self.push(self.numbered[number])

    def protocol(self) -> None:
        if (version := self.number("B")) != 2:
            raise _Refused(f"stands pickle protocol {version}, and those files are written in protocol 2")


_STEPS = {
    b"\x80": _Machine.protocol,
    b"(": lambda m: m.push(_MARK),
    b"}": lambda m: m.push({}),
    b"]": lambda m: m.push([]),
    b")": lambda m: m.push(()),
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    b"K": lambda m: m.push(m.number("B")),
    b"M": lambda m: m.push(m.number("H")),
    b"J": lambda m: m.push(m.number("i")),
    b"U": lambda m: m.push(bytes(m.take(m.number("B"))).decode("latin-1")),
    b"T": _Machine.long_string,
    b"t": lambda m: m.make_tuple(m.pop_to_mark()),
    b"\x85": lambda m: m.make_tuple(m.pop(1)),
    b"\x86": lambda m: m.make_tuple(m.pop(2)),
    b"\x87": lambda m: m.make_tuple(m.pop(3)),
    b"a": lambda m: m.append(m.pop(1)),
    b"e": lambda m: m.append(m.pop_to_mark()),
    b"s": lambda m: m.set_items(m.pop(2)),
    b"u": lambda m: m.set_items(m.pop_to_mark()),
    b"c": _Machine.name,
    b"R": _Machine.call,
    b"b": _Machine.fill,
    b"q": lambda m: m.remember(m.number("B")),
    b"r": lambda m: m.remember(m.number("I")),
    b"h": lambda m: m.recall(m.number("B")),
    b"j": lambda m: m.recall(m.number("I")),
}
