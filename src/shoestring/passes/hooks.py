"""A user's forward hooks under checkpointing: those that only look are called once per pass, as in plain training."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from ..ledger import Phase
from ..phases import current_phase


class _Looking:
    """A forward hook that is skipped in recomputation, unless it was seen to replace the output."""

    def __init__(self, hook: Callable) -> None:
        self.hook, self.changes = hook, False

    def __call__(self, *call: Any, **more: Any) -> Any:
        if current_phase() == Phase.RECOMPUTE and not self.changes:
            return None
        result = self.hook(*call, **more)
        self.changes |= result is not None
        return result


@contextmanager
def looking_once(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Forward hooks of these modules that return nothing are not called in recomputation.

    Pre-hooks are: weight normalisation and pruning compute the layer's weight in one, and return nothing.
    """
    with ExitStack() as stack:
        for module in modules:
            for number, hook in module._forward_hooks.items():
                module._forward_hooks[number] = looking = _Looking(hook)
                stack.callback(_put_back, module._forward_hooks, number, looking)
        yield


def _put_back(hooks: dict[int, Callable], number: int, looking: _Looking) -> None:
    if hooks.get(number) is looking:  # it may have removed itself
        hooks[number] = looking.hook
