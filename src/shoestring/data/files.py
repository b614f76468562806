"""Files on disk as arrays that take no memory: mapped, so that only a batch is ever copied out of them."""

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ..errors import ShoestringError


def cache_folder() -> Path:
    """The folder for what can be made again: $SHOESTRING_CACHE, or `shoestring` in the user's cache."""
    named = os.environ.get("SHOESTRING_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(named) if named else home / "shoestring"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ShoestringError(
            f"cannot make the cache folder {folder}: {error.strerror}; set SHOESTRING_CACHE to another"
        ) from error
    return folder


def need_file(path: Path) -> Path:
    """A path -> the same path, if it is a file that is not empty."""
    if not path.is_file():
        raise ShoestringError(f"{path} is missing: complete the folder {path.parent} or name another one")
    if path.stat().st_size == 0:
        raise ShoestringError(f"{path} is empty (0 bytes): download it again")
    return path


def map_file(path: Path) -> np.ndarray:
    """A file -> its bytes as a read-only array, mapped."""
    return np.asarray(np.memmap(need_file(path), dtype=np.uint8, mode="r"))


def spill(chunks: Iterable[bytes]) -> np.ndarray:
    """Pieces of bytes -> one read-only byte array, mapped from a nameless file on disk.

    The file has no name any more when this returns: nothing is left behind, whatever ends the process.
    """
    folder = cache_folder()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            return (
                np.asarray(np.memmap(file, dtype=np.uint8, mode="r"))
                if file.tell()
                else np.empty(0, np.uint8)
            )
    except OSError as error:
        raise ShoestringError(
            f"cannot write to {folder}: {error.strerror}; free some space, or set SHOESTRING_CACHE to another"
        ) from error
