"""Settings of a model that a step changes for itself, and restores after it.

The model's own checkpointing is disabled: `torch.utils.checkpoint` just calls its function. Regions take its place; and
it compares the tensors that operations save, whereas lean operations save others, and store them elsewhere.

With regions, transformers' cache of keys and values (`config.use_cache`) is disabled too: it is for generating text,
the loss does not depend on it, and it would hold what checkpointing frees. transformers does the same.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.utils.checkpoint as checkpointing
from torch import nn

from ..ambient import Ambient
from ..patching import ForAllThreads

_GENERATOR = "_checkpoint_without_reentrant_generator"


@contextmanager
def switched(model: nn.Module) -> Iterator[None]:
    """Inside the context, the model neither checkpoints by itself nor fills a cache."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    with ExitStack() as stack:
        for module in model.modules():
            if vars(module).get("gradient_checkpointing") is True:
                _switch(stack, module, "gradient_checkpointing")
        for config in configs.values():
            if getattr(config, "use_cache", None) is True:
                _switch(stack, config, "use_cache")
        stack.enter_context(without_checkpoints())
        yield


def _switch(stack: ExitStack, owner: Any, name: str) -> None:
    setattr(owner, name, False)
    stack.callback(setattr, owner, name, True)


# torch.utils.checkpoint finds these two by name when it is called, however a model imported it.
_ORIGINALS = {name: getattr(checkpointing, name) for name in ("CheckpointFunction", _GENERATOR)}


class _Function:
    """In place of the autograd function that checkpoints."""

    @staticmethod
    def apply(function: Callable, preserve: bool, *args: Any) -> Any:
        if not Ambient.now().checkpoints:
            return function(*args)
        return _ORIGINALS["CheckpointFunction"].apply(function, preserve, *args)


def _generator(*call: Any, **more: Any) -> Iterator[None]:
    """In place of the generator that surrounds the function in non-reentrant checkpointing."""
    if not Ambient.now().checkpoints:
        yield
    else:
        yield from _ORIGINALS[_GENERATOR](*call, **more)


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """Inside the context, torch.utils.checkpoint does nothing but call its function, in this thread."""
    with Ambient.during(checkpoints=False), _checkpoints_ask:
        yield


@ForAllThreads
@contextmanager
def _checkpoints_ask() -> Iterator[None]:
    vars(checkpointing).update({"CheckpointFunction": _Function, _GENERATOR: _generator})
    try:
        yield
    finally:
        vars(checkpointing).update(_ORIGINALS)
