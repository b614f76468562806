"""Files on disk as memory-mapped arrays: only a batch is ever copied out of them."""

import hashlib
import os
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..cache import made_cache_folder
from ..errors import ShoestringError


def need_file(path: Path) -> Path:
    """A path -> the same path, if it is a regular file and not empty: opening a pipe would wait for ever."""
    if path.exists() and not path.is_file():
        raise ShoestringError(f"{path} is not a regular file: replace or remove it")
    if not path.is_file():
        raise ShoestringError(f"{path} is missing: complete the folder {path.parent} or choose another")
    if path.stat().st_size == 0:
        raise ShoestringError(f"{path} is empty (0 bytes): download it again")
    if not os.access(path, os.R_OK):
        raise ShoestringError(f"{path} cannot be read by this user: change its permissions")
    return path


def map_file(path: Path) -> np.ndarray:
    """A file -> its bytes as a read-only array, mapped."""
    return np.asarray(np.memmap(need_file(path), dtype=np.uint8, mode="r"))


def spill(chunks: Iterable[bytes]) -> np.ndarray:
    """Chunks of bytes -> one read-only byte array, mapped from an unnamed file on disk.

    The file has no name, so nothing is left behind, however the process ends.
    """
    folder = made_cache_folder()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            if file.tell() == 0:
                return np.empty(0, np.uint8)  # an empty file cannot be mapped
            return np.asarray(np.memmap(file, dtype=np.uint8, mode="r"))
    except OSError as error:
        raise ShoestringError(
            f"cannot write to {folder}: {error.strerror}; free some space, or set SHOESTRING_CACHE to another"
        ) from error


@dataclass(frozen=True)
class Rows:
    """Rows of different lengths, stored one after another in a mapped file: `rows[i]` -> array."""

    data: np.ndarray
    ends: np.ndarray

    @classmethod
    def spilled(cls, rows: Iterable[np.ndarray]) -> "Rows":
        """Arrays of one type -> the rows, on disk."""
        ends, dtype = array("q", [0]), np.dtype(np.uint8)

        def chunks() -> Iterator[bytes]:
            nonlocal dtype
            for row in rows:
                dtype = row.dtype
                ends.append(ends[-1] + len(row))
                yield row.tobytes()

        data = spill(chunks())
        return cls(data.view(dtype), spill([ends.tobytes()]).view(np.int64))

    @classmethod
    def of_texts(cls, texts: Iterable[str]) -> "Rows":
        return cls.spilled(np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8) for text in texts)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.data[self.ends[index] : self.ends[index + 1]]

    def text(self, index: int) -> str:
        return self[index].tobytes().decode("utf-8", "surrogateescape")

    def texts(self) -> Iterator[str]:
        return (self.text(index) for index in range(len(self)))

    def lengths(self) -> np.ndarray:
        return np.diff(self.ends)


def write_checked(path: Path, data: bytes) -> None:
    """Writes `data` and its SHA-256 to `path`, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(hashlib.sha256(data).digest() + data)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def read_checked(path: Path) -> bytes | None:
    """Reads what `write_checked` wrote; None if it is missing or any byte has changed."""
    whole = path.read_bytes() if path.is_file() else b""
    return whole[32:] if hashlib.sha256(whole[32:]).digest() == whole[:32] else None
