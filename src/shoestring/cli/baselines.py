"""Plain PyTorch as a user would run it without Shoestring: as the model is, in channels_last, or compiled."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..training.apply import LeanTask

Batch = Any


@dataclass(frozen=True)
class Baseline:
    """`words` describe it, `change` a model and `lay_out` a batch; an eager one counts where the best layout is asked
    for. Before it is measured it takes `warm_up` steps: what compiles, compiles then."""

    words: str
    change: Callable[["LeanTask"], Any] = lambda lean: None
    lay_out: Callable[[Batch], Batch] = lambda batch: batch
    eager: bool = True
    warm_up: int = 0


def baselines(model: Any, compiled: bool) -> dict[str, Baseline]:
    """The ways of plain PyTorch that differ for this model, by name; the first is the model as it is."""
    found = {"baseline": Baseline("plain PyTorch")}
    if any(parameter.dim() == 4 for parameter in model.parameters()):
        found["channels_last"] = Baseline("plain PyTorch, channels_last", _to_channels_last, _maps_to_channels_last)
    if compiled:
        found["compiled"] = Baseline("plain PyTorch, torch.compile", _compile, eager=False, warm_up=1)
    return found


def _to_channels_last(lean: "LeanTask") -> None:
    import torch

    lean.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _maps_to_channels_last(batch: Batch) -> Batch:
    import torch
    from torch.utils._pytree import tree_map_only

    def lay_out(x: torch.Tensor) -> torch.Tensor:
        return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x

    return tree_map_only(torch.Tensor, lay_out, batch)


def _compile(lean: "LeanTask") -> None:
    lean.model.compile()
