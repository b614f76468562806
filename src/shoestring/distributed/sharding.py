"""Parameters, gradients and optimizer state in shards, one per process, by PyTorch's FSDP2 (`fully_shard`).

FSDP2 gathers the parameters of a block for its passes and reduces its gradients to shards after each backward pass, so
that no process holds all of them (with checkpointing, parameters stay gathered from forward to backward). What is left
to do here: FSDP2 takes the mean over processes, and a step wants the mean over items; and what a process sees of its
own shards is not what the others see of theirs.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import ShoestringError
from .world import World, losing

# The techniques that leave weights and their update to PyTorch.
DENSE = ("checkpoint", "microbatch", "activations", "shard")


def is_sharded(tensor: Tensor | None) -> bool:
    return isinstance(tensor, DTensor)


def shard(model: nn.Module, settings: dict[str, Any], world: World, mesh: Any = None) -> None:
    """Shards a model over all processes: each block of its ModuleLists and Sequentials, then the rest."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    refuse_unsharded(settings)
    # A region that is recomputed begins before the block whose backward pass asks for it, and finds what is gathered;
    # so parameters stay gathered from forward to backward there.
    free = "checkpoint" not in settings
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    for block in (child for one in lists for child in one.children() if any(True for _ in child.parameters())):
        if not any(is_sharded(parameter) for parameter in block.parameters()):
            fully_shard(block, mesh=mesh, reshard_after_forward=free)
    fully_shard(model, mesh=mesh, reshard_after_forward=free)
    for module in model.modules():
        if isinstance(module, FSDPModule) and _is_on_cpu(model):
            module.set_custom_all_gather(Gathering(world))  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(Reducing(world))  # type: ignore[arg-type]


def _is_on_cpu(model: nn.Module) -> bool:
    return all(parameter.device.type == "cpu" for parameter in model.parameters())


@dataclass(frozen=True)
class Gathering:
    """FSDP2 gathers parameters by this on CPUs, where gloo would copy what it gathers."""

    world: World

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        self.world.gather_parts(output_tensor)  # of which the input is this process's part


@dataclass(frozen=True)
class Reducing:
    """FSDP2 reduces gradients by this on CPUs, where gloo would copy what it reduces, and then add up all of it."""

    world: World
    allocate = Gathering.allocate

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        self.world.add_up(input_tensor)()
        output_tensor.copy_(input_tensor.chunk(self.world.size)[self.world.rank])
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(self.world.size)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that is in this process."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """A tensor with the parts of all processes; each must call it."""
    if not isinstance(tensor, DTensor):
        return tensor
    with losing():
        return tensor.full_tensor()


class Lending:
    """Sharded tensors that all processes make whole, one by one, for the one that writes them. `finish` makes those
    whole that it has not asked for, so that none waits for another, whatever was raised."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._waiting = deque(filter(is_sharded, tensors))

    def whole(self, tensor: Tensor) -> Tensor:
        if is_sharded(tensor):
            assert self._waiting.popleft() is tensor, "they are asked for in their order"
        return whole(tensor)

    def finish(self) -> None:
        while self._waiting:
            whole(self._waiting.popleft())


def first_row(tensor: Tensor) -> int:
    """The row of a tensor with which the part in this process begins."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor):
        return 0
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offset[0]


def empty_shard(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of which each process holds its rows; alone, all of it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, empty

    if not dist.is_initialized():
        return torch.empty(shape, dtype=dtype)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return empty(shape, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])


def reshard(model: nn.Module) -> None:
    """Frees what was gathered of a sharded model that was called without a backward pass."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def refuse_unsharded(settings: dict[str, Any]) -> None:
    """Refuses techniques whose weights, or their update, are not PyTorch's own."""
    refuse_others(
        settings, DENSE, "cannot be sharded, because its kernels work on whole tensors and FSDP2 leaves a process "
        f"parts of them: use {' and '.join(DENSE[:-1])} beside shards, or replicate the model by not sharding it",
    )  # fmt: skip


def refuse_others(settings: dict[str, Any], beside: tuple[str, ...], why: str) -> None:
    """Refuses techniques that are not among those that go beside something."""
    for name in settings:
        if name not in beside:
            raise ShoestringError(f"{name} {why}")
