"""One family of errors: each message says what, the number, the cause and what to do next."""

from pathlib import Path
from typing import Any


def how_to_install(extra: str) -> str:
    """An optional extra -> the command that installs it, also from a checkout: the name alone is another's on PyPI."""
    checkout = Path(__file__).parents[2]
    place = checkout if (checkout / "pyproject.toml").is_file() else _installed_from()
    return f"pip install '{place or 'PATH_OF_SHOESTRING'}[{extra}]'"


def _installed_from() -> Path | None:
    """The checkout or the wheel that pip installed this from, if it is still there."""
    import json
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import unquote, urlsplit

    try:
        origin = json.loads(distribution("shoestring").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return None
    place = Path(unquote(urlsplit(origin.get("url", "")).path))
    return place if place.is_absolute() and place.exists() else None


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
