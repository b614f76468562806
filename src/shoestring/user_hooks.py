"""Hooks on modules that a user registered: whoever replaces a module's calls must leave theirs to be called."""

from collections.abc import Callable

from torch import nn
from torch.nn.modules import module as module_hooks

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def hooked_modules(model: nn.Module) -> frozenset[str]:
    """The modules whose inputs or outputs a user's hook sees: all of them if the hook is a global one."""
    if any(map(_has_users_hook, global_hooks())):
        return frozenset(path for path, _ in model.named_modules())
    return frozenset(
        path
        for path, module in model.named_modules()
        if any(_has_users_hook(hooks) for kind in HOOKS if (hooks := getattr(module, kind)))
    )


def global_hooks() -> list[dict[int, Callable]]:
    """The hooks on all modules, of each kind."""
    return [getattr(module_hooks, f"_global{kind}") for kind in HOOKS]


def _has_users_hook(hooks: dict[int, Callable]) -> bool:
    ours = __name__.partition(".")[0]
    return any(str(getattr(hook, "__module__", "")).partition(".")[0] != ours for hook in hooks.values())
