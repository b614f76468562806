"""Makes a task's optimizer for its model's parameters: from settings, a class, a function, or an existing instance.

A function takes the trainable parameters; or pairs of name and parameter, if its argument is called `named_parameters`,
so that it can make groups by name. From an existing optimizer, groups and settings are taken by parameter name: it is
made anew for the parameters of a trace, or of a model whose layers were swapped.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .errors import ShoestringError

Named = Iterable[tuple[str, nn.Parameter]]
NAMES = "named_parameters"


class Trainable(NamedTuple):
    """A parameter, and the name and shape that an optimizer's function sees: those of the dense weight if a layer holds
    only its nonzeros, because groups often go by name or number of dimensions."""

    name: str
    shape: torch.Size
    parameter: nn.Parameter


def trainable(model: nn.Module) -> Iterator[Trainable]:
    """A model -> its trainable parameters, each once."""
    told = {
        f"{path}.{own}".lstrip("."): (f"{path}.{name}".lstrip("."), torch.Size(shape))
        for path, module in model.named_modules()
        for own, (name, shape) in getattr(module, "dense_parameters", {}).items()
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield Trainable(*told.get(name, (name, parameter.shape)), parameter)


def make(optimizer: Callable, model: nn.Module) -> torch.optim.Optimizer:
    """A task's optimizer and a model -> the optimizer of the model's trainable parameters."""
    parts = list(trainable(model))
    if not parts:
        raise ShoestringError("the model has no parameter that requires a gradient: there is nothing to train")
    seen = [part.parameter if part.shape == part.parameter.shape else _stand_in(part) for part in parts]
    made = _call(optimizer, [part.name for part in parts], seen)
    if any(tensor in made.state for tensor in seen):  # the constructor made state of these sizes
        seen = [part.parameter for part in parts]
        made = _call(optimizer, [part.name for part in parts], seen)
    real = {id(tensor): part.parameter for tensor, part in zip(seen, parts, strict=True)}
    for group in made.param_groups:
        _check_given(group["params"], real)
        group["params"] = [real[id(tensor)] for tensor in group["params"]]
    return made


def outline(optimizer: Callable, model: nn.Module) -> tuple[torch.optim.Optimizer, dict[Tensor, str]]:
    """The same for parameters without values, and their names: to see which optimizer it is."""
    stand_ins: dict[Tensor, str] = {_stand_in(part): part.name for part in trainable(model)}
    made = _call(optimizer, list(stand_ins.values()), list(stand_ins))
    for group in made.param_groups:
        _check_given(group["params"], {id(tensor): tensor for tensor in stand_ins})
    return made, stand_ins


def _call(optimizer: Callable, names: list[str], parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    made = optimizer(list(zip(names, parameters, strict=True)) if takes_names(optimizer) else parameters)
    if not isinstance(made, torch.optim.Optimizer):
        raise ShoestringError(
            f"the task's optimizer made a {type(made).__name__}, not a torch.optim.Optimizer: return the optimizer"
        )
    return made


def takes_names(optimizer: Callable) -> bool:
    try:
        return NAMES in inspect.signature(optimizer).parameters
    except (TypeError, ValueError):  # a callable without a signature
        return False


def _stand_in(part: Trainable) -> nn.Parameter:
    """A parameter of that shape with a single value in memory, and with the attributes that a function may look for."""
    stand_in = nn.Parameter(part.parameter.detach().new_empty(()).expand(part.shape))
    vars(stand_in).update(vars(part.parameter))
    return stand_in


def _check_given(parameters: list[Tensor], given: dict[int, Any]) -> None:
    for parameter in parameters:
        if id(parameter) not in given:
            raise ShoestringError(
                f"the optimizer has a parameter of shape {tuple(parameter.shape)} that its function was not given: "
                f"make groups from the function's argument, which has names too if it is called {NAMES}"
            )


@dataclass(frozen=True, repr=False)
class Remade:
    """An existing optimizer as data: its class, its groups (parameter names, settings) and its defaults."""

    kind: type[torch.optim.Optimizer]
    groups: tuple[tuple[tuple[str, ...], dict[str, Any]], ...]
    defaults: dict[str, Any]

    def __call__(self, named_parameters: Named) -> torch.optim.Optimizer:
        found = dict(named_parameters)
        groups = [{"params": [found[n] for n in names if n in found], **settings} for names, settings in self.groups]
        accepted = inspect.signature(self.kind).parameters
        defaults = {name: value for name, value in self.defaults.items() if name in accepted}
        return self.kind([group for group in groups if group["params"]], **defaults)

    def __repr__(self) -> str:
        groups = "; ".join(f"{len(names)} parameters: {settings}" for names, settings in self.groups)
        return f"{self.kind.__name__}({groups})"


def remade(optimizer: torch.optim.Optimizer, model: nn.Module) -> Remade:
    """An optimizer of a model's parameters -> how to make one like it; the given one itself is not used.

    The learning rate is the one that a scheduler started from, if there is one: `train(schedule=...)` replaces it.
    """
    if optimizer.state:
        raise ShoestringError(
            f"the optimizer already has state for {len(optimizer.state)} parameters, which a task does not take over: "
            "pass a new one, and resume runs from their saves"
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        _check_model(group["params"], names)
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names", "initial_lr")}
        settings["lr"] = group.get("initial_lr", group.get("lr"))
        groups.append((tuple(names[id(parameter)] for parameter in group["params"]), settings))
    return Remade(type(optimizer), tuple(groups), dict(optimizer.defaults))


def _check_model(parameters: list[Tensor], names: dict[int, str]) -> None:
    for parameter in parameters:
        if id(parameter) not in names:
            raise ShoestringError(
                f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the model's: "
                "make it from model.parameters()"
            )
