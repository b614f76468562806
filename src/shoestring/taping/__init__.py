"""Tapes: passes whose Python does the same each time, recorded once and run again without it.

A pass over a small microbatch spends most of its time in the code of modules, modes, hooks and autograd, and little in
kernels. If that code does the same in every pass (`Task.static_graph`), its operators can be written down: which ones,
on which tensors, in which order. Running them again gives the same bits, and each tensor is freed after its last use.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack

from ..kernels.core import threads
from ..ledger import Phase
from ..phases import phase
from ..user_hooks import HOOKS, global_hooks
from .recorder import record
from .tape import Leaves, Tape, form_of, given_tensors, gradients_of


class Tapes:
    """The tape of a model's passes. One is recorded when two passes in a row have the same form, and kept until two of
    another form follow each other. A step's first pass makes the gradients to which the others add: a tape of one of
    the others runs it too, if adding is all that it does with them (`Tape.may_begin`).

    `reason` says why a pass could not be recorded: from then on none is.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.reason = model, ""
        self._last: Any = None, None  # the form of the pass before, and of the gradients that it found
        self._form: Any = None  # of the tape,
        self._found: int | None = None  # and of the gradients that were there when it was recorded
        self._tape: Tape | None = None

    def one_pass(self, decided: Any, leaves: Leaves, run: Callable[[], Tensor]) -> Tensor:
        """The loss of a pass, by its tape or as `run` does it. `decided` is what it depends on besides the tensors and
        modules."""
        if self.reason or not _is_alone():
            return run()
        given, gradients = list(given_tensors(self.model, leaves)), list(gradients_of(self.model))
        form = (decided, threads(), form_of(given), _modes(self.model), *map(_like, leaves))
        found = None if all(gradient is None for gradient in gradients) else form_of(gradients)
        (last, found_last), self._last = self._last, (form, found)
        if self._tape is not None and form == self._form and found in self._finds():
            with phase(Phase.FORWARD):
                return self._tape.run([*given, *gradients])
        del given, gradients
        if form != last or found_last not in (found, None):
            return run()
        self._tape, self._form = None, form
        loss, tape = record(run, self.model, leaves)
        if isinstance(tape, Tape):
            self._tape, self._found = tape, found
        else:
            self.reason = tape
        return loss

    def _finds(self) -> tuple:
        """The forms of gradients with which the tape can be run; None: without any."""
        return (self._found, None) if self._tape is not None and self._tape.may_begin else (self._found,)

    @property
    def length(self) -> int:
        """The operators on the tape; 0 if there is none."""
        return 0 if self._tape is None else self._tape.calls

    def clear(self) -> None:
        """Forgets the tape: something of the model is about to change."""
        self._tape, self._last = None, (None, None)


def _is_alone() -> bool:
    """Whether nobody watches the pass who would miss the Python of it, as traces and modes do."""
    return not (_len_torch_dispatch_stack() or _len_torch_function_stack())


def _modes(model: nn.Module) -> int:
    """Hash of what decides besides tensors what modules do: their modes, and whether somebody hooks into them."""
    own = ((module.training, *(len(getattr(module, kind)) for kind in HOOKS)) for module in model.modules())
    return hash((*map(len, global_hooks()), *own))


def _like(leaf: Any) -> Any:
    """What a leaf of the batch is, for comparing; what cannot be compared is like nothing else."""
    if isinstance(leaf, Tensor):
        return None
    return (type(leaf), leaf) if isinstance(leaf, str | bytes | int | float | None) else object()
