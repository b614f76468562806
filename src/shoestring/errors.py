"""One family of errors: each message says what, the number, the cause and what to do next."""

from typing import Any


def how_to_install(extra: str) -> str:
    """An optional extra -> the command that installs it, also from a checkout: the name alone is another's on PyPI."""
    from pathlib import Path

    checkout = Path(__file__).parents[2]
    place = str(checkout) if (checkout / "pyproject.toml").is_file() else "PATH_OF_SHOESTRING"
    return f"pip install '{place}[{extra}]'"


class ShoestringError(Exception):
    """Anything that Shoestring refuses; `exit_code` is what the command line returns for it."""

    exit_code = 2


class NoEffect(ShoestringError):
    """A technique that changed nothing where it was applied."""


class NotWritten(ShoestringError):
    """A file could not be written, for example on a full disk."""

    exit_code = 1

    @classmethod
    def because(cls, path: Any, error: OSError) -> "NotWritten":
        """The error for a file that the user named."""
        return cls(f"{str(path)!r} cannot be written: {error.strerror or error}; make room, or write elsewhere")


class NoPlanFits(ShoestringError):
    """No combination of techniques fits the budget; the message names the smallest peak found."""

    exit_code = 3


class OverBudget(ShoestringError):
    """A run that would need more bytes than its budget."""

    exit_code = 3


class OutOfMemory(ShoestringError):
    """The system had less memory than the run needed, whatever its budget."""

    exit_code = 6


class DamagedSave(ShoestringError):
    """A save whose bytes are not those that were written."""

    exit_code = 4


class Diverged(ShoestringError):
    """Training that lost its numbers: a loss that is not finite, or a loss scale at its floor."""

    exit_code = 5
