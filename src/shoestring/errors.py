"""One family of errors: each message says what, the number, the cause and what to do next."""


class ShoestringError(Exception):
    """Anything that Shoestring refuses; `exit_code` is what the command line returns for it."""

    exit_code = 2


class NoEffect(ShoestringError):
    """A technique that changed nothing where it was applied."""


class NoPlanFits(ShoestringError):
    """No combination of techniques fits the budget; the message names the smallest peak found."""

    exit_code = 3


class OverBudget(ShoestringError):
    """A run that would need more bytes than its budget."""

    exit_code = 3


class DamagedSave(ShoestringError):
    """A save whose bytes are not those that were written."""

    exit_code = 4


class Diverged(ShoestringError):
    """Training that lost its numbers: a loss that is not finite, or a loss scale at its floor."""

    exit_code = 5
