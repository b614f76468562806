"""log.jsonl and measures.jsonl: a line of JSON per event, each with a checksum of it and of all lines before it.

So a changed, lost or moved line is seen. Half a last line, which a killed process may leave, is no damage.
"""

import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from .writing import refusing

_SUM = re.compile(rb', "crc": "([0-9a-f]{8})"}\n')
_SUM_BYTES = len(', "crc": "00000000"}\n')


class Line(NamedTuple):
    """A line of a log: where it ends in the file, its content if it can be read, and whether it is as it was written;
    None where an earlier version has written no checksum."""

    end: int
    content: dict[str, Any] | None
    is_right: bool | None

    @property
    def is_damaged(self) -> bool:
        return self.content is None or self.is_right is False


@dataclass(frozen=True)
class Log:
    """The lines of a run; those of log.jsonl hold no times, so that equal runs have equal logs."""

    path: Path

    def write(self, line: dict[str, Any]) -> None:
        with refusing(self.path), self.path.open("a+b") as file:
            text = json.dumps(line).removesuffix("}").encode()
            file.write(text + b', "crc": "%08x"}\n' % zlib.crc32(text, _last_sum(file)))

    def sync(self) -> int:
        """Syncs all lines to disk -> their size in bytes."""
        with refusing(self.path), self.path.open("ab") as file:
            os.fsync(file.fileno())
            return file.tell()

    def forget_after(self, update: int, warn: Callable[[str], None]) -> None:
        """Drops the lines of later updates, which a resumed run repeats, and one that was cut off."""
        if not self.path.exists():
            return
        ends = [0]
        for line in self.read():
            if line.content is not None and line.content["update"] > update:
                break
            ends.append(line.end)
        self.cut(ends[-1], warn)

    def cut(self, size: int, warn: Callable[[str], None]) -> None:
        """Truncates the lines written after a save: the resumed run writes them again."""
        with refusing(self.path), self.path.open("ab") as file:
            if file.tell() < size:
                warn(f"{self.path} has {file.tell():,} bytes where {size:,} were written: a part of it is lost")
            file.truncate(min(size, file.tell()))
        if damage := self.damage():
            warn(f"{damage}; training does not need it and goes on")

    def damage(self) -> str:
        """What is wrong with the log, in words; "" if nothing is."""
        found = [number for number, line in enumerate(self.read(), 1) if line.is_damaged]
        more = f", and {len(found) - 1:,} more" if len(found) > 1 else ""
        return f"{self.path} is damaged: line {found[0]:,}{more} is not as it was written" if found else ""

    def read(self) -> Iterator[Line]:
        """The lines of the log, but for a last one that was cut off."""
        known = end = before = 0
        with refusing(self.path), self.path.open("rb") as file:
            for text in file:
                whole = text if text.endswith(b"\n") else text[:-1] + b"\n"
                mark = _SUM.fullmatch(whole, max(0, len(whole) - _SUM_BYTES))
                is_right = mark is not None and zlib.crc32(text[: mark.start()], before) == int(mark[1], 16)
                if whole is not text and not is_right:
                    return  # a whole line whose end was changed is damage, and half a line is none
                end, known = end + len(text), known + (mark is not None)
                before = int(mark[1], 16) if mark else before
                yield Line(end, _content(whole), is_right and whole is text if known else None)


def _last_sum(file: IO[bytes]) -> int:
    """The checksum of the last line of a file; 0 if there is none, as in logs of earlier versions."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - _SUM_BYTES))
    mark = _SUM.fullmatch(file.read())
    return int(mark[1], 16) if mark else 0


def _content(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or type(line.get("update")) is not int:
        return None
    return {name: value for name, value in line.items() if name != "crc"}
