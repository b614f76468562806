"""The folder for what is made once on a machine, and how files get into it."""

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """-> $XDG_CACHE_HOME/shoestring, or ~/.cache/shoestring; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoestring"


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all, however many processes write it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
