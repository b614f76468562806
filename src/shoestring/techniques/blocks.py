"""The blocks of a model: repeated children of a Sequential or ModuleList, found from the module structure."""

from fnmatch import fnmatch

from torch import nn

from ..errors import ShoestringError


def find_blocks(model: nn.Module, names: tuple[str, ...] = ()) -> list[list[str]]:
    """A model -> runs of block names, each run in the order in which its blocks follow each other.

    A run is the children of one Sequential or ModuleList that are of one class and not leaves, such as residual
    blocks or transformer layers; at least two make a run. `names` (with * and ?) picks blocks by hand instead, in
    the order of the model.
    """
    if names:
        return _named(model, names)
    runs, inside = [], []
    for path, module in model.named_modules():
        if any(path.startswith(prefix) for prefix in inside):
            continue  # a block inside a block is part of it
        if isinstance(module, nn.Sequential | nn.ModuleList) and (run := _run(path, module)):
            runs.append(run)
            inside += [f"{name}." for name in run]
    return runs


def _run(path: str, container: nn.Module) -> list[str]:
    inner = [(name, child) for name, child in container.named_children() if any(True for _ in child.children())]
    kinds = [type(child) for _, child in inner]
    repeated = {kind for kind in kinds if kinds.count(kind) > 1}
    return [f"{path}.{name}" if path else name for name, child in inner if type(child) in repeated]


def _named(model: nn.Module, names: tuple[str, ...]) -> list[list[str]]:
    modules = [path for path, _ in model.named_modules() if path]
    for name in names:
        if not any(fnmatch(path, name) for path in modules):
            near = ", ".join(modules[:5])
            raise ShoestringError(f"the model has no module {name!r} to checkpoint: its modules are {near}, ...")
    run = [path for path in modules if any(fnmatch(path, name) for name in names)]
    return [[path for path in run if not any(path.startswith(f"{other}.") for other in run)]]
