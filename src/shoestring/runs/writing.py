"""Around what writes into a run folder: the system's errors in one line."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .save import NotSaved


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Turns the system's errors into one line: a full disk, a folder without write permission, a file in the way."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        help = "make room, or choose another folder" if full else "choose another folder, or mend this one"
        raise NotSaved(f"{path} cannot be written: {error.strerror}; {help}") from error
