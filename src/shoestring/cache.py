"""Folders on this machine: the cache, which can be deleted, and the folder for offloaded tensors; atomic writes."""

import os
import tempfile
from pathlib import Path

from .errors import ShoestringError


def cache_folder() -> Path:
    """-> $SHOESTRING_CACHE, or `shoestring` in the user's cache; it may not exist yet."""
    named = os.environ.get("SHOESTRING_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(named) if named else home / "shoestring"


def made_cache_folder() -> Path:
    """-> the same folder, created if needed; raises with the reason if that fails."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ShoestringError(
            f"cannot create the cache folder {folder}: {error.strerror}; set SHOESTRING_CACHE to another"
        ) from error
    return folder


def spill_folder() -> str:
    """Where tensors are offloaded: $TMPDIR or /var/tmp. Not /tmp, which is often a file system in memory."""
    return os.environ.get("TMPDIR") or "/var/tmp"


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file atomically, however many processes write it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
