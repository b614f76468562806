"""The languages of a translation model in a folder of their own: how text is split, and the id of each piece.

A run holds them, so that it can translate, be evaluated and go on wherever it is copied to.
"""

import hashlib
from pathlib import Path
from typing import Any

from ..errors import DamagedSave, ShoestringError
from ..records import file_bytes, read_object, seal, unseal
from .files import Rows
from .vocabulary import BytePairs, Languages, Vocabulary

INDEX, ENCODING, SIDES = "languages.json", "byte_pairs.model", ("source.txt", "target.txt")


def keep_languages(folder: Path, languages: Languages) -> None:
    """Writes the languages into a folder; the index, with the SHA-256 of the other files, comes last."""
    files = {
        name: "\n".join(side.pieces.texts()).encode("utf-8", "surrogateescape")
        for name, side in zip(SIDES, (languages.source, languages.target), strict=True)
    }
    if isinstance(languages.split, BytePairs):
        files[ENCODING] = languages.split.model
    index: dict[str, Any] = {"names": languages.names, "mark": languages.source.mark}
    index["files"] = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)
        (folder / INDEX).write_bytes(seal(index))
    except OSError as error:
        raise ShoestringError(f"{folder} cannot be written: {error.strerror}; choose another folder") from error


def kept_languages(folder: Path) -> Languages | None:
    """The languages that were kept in a folder, if any; refuses a folder in which a byte has changed."""
    if not (folder / INDEX).is_file():
        return None
    try:
        index = _index(file_bytes(folder / INDEX))
        sums, mark, (one, other) = index["files"], index["mark"], index["names"]
        files = {name: _checked(folder / name, sums[name]) for name in (*SIDES, ENCODING) if name in sums}
        source, target = (Vocabulary(Rows.of_texts(_lines(files[name])), mark) for name in SIDES)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedSave(f"{folder} is damaged: its vocabulary cannot be read ({error})") from error
    split = BytePairs(files[ENCODING]) if ENCODING in files else str.split
    return Languages(source, target, (one, other), split)


def _index(data: bytes) -> dict[str, Any]:
    """The sealed index; earlier versions wrote the checksums of the files under sha256, and none of the index."""
    record = read_object(data)
    return record | {"files": record["sha256"]} if isinstance(record.get("sha256"), dict) else unseal(data)


def _checked(path: Path, wanted: str) -> bytes:
    data = file_bytes(path)
    if hashlib.sha256(data).hexdigest() != wanted:
        raise ValueError(f"the SHA-256 of {path.name} is not that of what was written")
    return data


def _lines(data: bytes) -> list[str]:
    return data.decode("utf-8", "surrogateescape").split("\n")
