"""A step whose loss or gradients are not finite changes nothing: how that is found, and how buffers are restored.

Weights and optimizer state are updated only after all gradients were checked. Buffers are not: the forward pass itself
changes the running statistics of batch norm. So a step begins with a copy of those that may change, `Buffers`:
statistics, small ones, and any that an earlier step was seen to change in place. Generators are not rewound.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .errors import Diverged
from .kernels.gradients import all_finite

SMALL = 4096  # elements: buffers up to this size are copied whether or not steps change them
MOST_SKIPPED = 30  # consecutive steps after which a skipping run stops: about as many as take a loss scale to its floor
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


# -- what is not finite -----------------------------------------------------------------------------------------
def check_finite(loss: Tensor, updates: int, narrow: bool) -> None:
    """Refuses a loss that is not finite after so many updates; `narrow` if FP16 may be the cause."""
    if all_finite(loss.detach()):
        return
    value = float(loss.detach())
    if not updates:
        raise Diverged(
            f"the loss is {value} before the first update: look for values in the batch or the weights that "
            f"are not finite{', or too large for FP16 (65,504), or use bf16' if narrow else ''}"
        )
    raise Diverged(
        f"the loss is {value} after {updates:,} updates (the weights are as the last one left them): lower "
        f"the learning rate, {'clip the gradients, or use bf16' if narrow else 'or clip the gradients'}"
    )


def first_not_finite(model: nn.Module) -> str | None:
    """Names the first gradient, in the order of the backward pass, or statistic that is not finite; None if all are."""
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.grad is not None and not all_finite(_values(parameter.grad)):
            return f"the gradient of {name}"
    if not all(map(all_finite, statistics_of(model))):
        return "a running statistic of batch norm"
    return None


def statistics_of(model: nn.Module) -> Iterator[Tensor]:
    """The running means and variances of a model's norms."""
    for module in model.modules():
        found = (module._buffers[name] for name in _statistics(module))
        yield from (tensor for tensor in found if tensor is not None and tensor.is_floating_point())


def _values(gradient: Tensor) -> Tensor:
    """The values of a gradient that this process holds; an embedding's may be sparse, and FSDP2's is a shard."""
    local: Any = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local._values() if local.is_sparse else local


def is_statistic(buffer: "Buffer") -> bool:
    """Whether a buffer is one of a norm's running statistics."""
    return buffer.name in _statistics(buffer.module)


def _statistics(module: nn.Module) -> list[str]:
    """The names of a norm's running statistics, if it has any."""
    found = [name for name in STATISTICS if module._buffers.get(name) is not None]
    return found if "running_mean" in found else []


# -- buffers ----------------------------------------------------------------------------------------------------
class Buffer(NamedTuple):
    module: nn.Module
    name: str
    tensor: Tensor
    version: int  # PyTorch counts the changes in place


class Buffers:
    """A model's buffers at the start of a step. `changing` are those that steps were seen to change, by module and
    name; the copies of one type are one tensor."""

    def __init__(self, model: nn.Module, changing: set[tuple[nn.Module, str]]) -> None:
        self.changing, self.all = changing, list(_buffers(model))
        chosen = {id(b.tensor): b.tensor for b in self.all if self._is_copied(b)}
        kinds: dict[tuple, list[Tensor]] = {}
        for tensor in chosen.values():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        with torch.no_grad():
            self.copies = [(kind, torch.cat([t.reshape(-1) for t in kind])) for kind in kinds.values()]

    def _is_copied(self, buffer: Buffer) -> bool:
        module, name, tensor, _ = buffer
        if name in getattr(module, "constant_buffers", ()):
            return False
        return tensor.numel() <= SMALL or is_statistic(buffer) or (module, name) in self.changing

    def changed(self) -> list[bool]:
        """Of each buffer, whether the step has changed it so far, in place or for another tensor. Batch norm changes
        its statistics in training, and PyTorch does not count that."""
        return [
            (is_statistic(b) and b.module.training)
            or b.tensor._version != b.version
            or b.module._buffers[b.name] is not b.tensor
            for b in self.all
        ]

    def learn(self) -> None:
        """After a step: notes the buffers that it changed in place, so that the next ones copy them."""
        for buffer in self.all:
            if buffer.tensor._version != buffer.version:
                self.changing.add(buffer[:2])

    @torch.no_grad()
    def restore(self) -> None:
        """Each buffer is the same tensor as before, with its old values."""
        self.learn()
        for module, name, tensor, _ in self.all:
            module._buffers[name] = tensor
        for tensors, copy in self.copies:
            for tensor, part in zip(tensors, copy.split([t.numel() for t in tensors]), strict=True):
                tensor.copy_(part.view(tensor.shape))


def _buffers(model: nn.Module) -> Iterator[Buffer]:
    for module in model.modules():
        for name, tensor in module._buffers.items():
            if tensor is not None and tensor.layout == torch.strided:
                yield Buffer(module, name, tensor, tensor._version)


class Skipping:
    """Counts the consecutive steps that were skipped because something was not finite."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def skip(self, error: Diverged) -> None:
        self.in_a_row += 1
        if self.in_a_row >= MOST_SKIPPED:
            raise Diverged(f"{self.in_a_row} steps in a row were skipped, the last because {error}")

    def state(self) -> dict[str, int]:
        return {"in_a_row": self.in_a_row}

    def restore(self, state: dict[str, int]) -> None:
        self.in_a_row = state["in_a_row"]
