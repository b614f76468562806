"""Parameters, gradients and optimizer state in shards, one per process, by PyTorch's FSDP2 (`fully_shard`).

FSDP2 gathers the parameters of a block for its passes and reduces its gradients to shards after each backward pass, so
that no process holds all of them (with checkpointing, parameters stay gathered from forward to backward). What is left
to do here: FSDP2 takes the mean over processes, and a step wants the mean over items, so it is told to add up; it
shards parameters of one type, so those of another, as norms beside 16 bits, stay whole; and what a process sees of its
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
from .world import World, losing, sending

# The techniques whose layers hold dense weights, of which FSDP2 can gather the parts.
DENSE = ("precision", "optimizer", "checkpoint", "microbatch", "activations", "shard")


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
    how = {"mesh": mesh, "reshard_after_forward": free, "ignored_params": set(kept_whole(model))}
    for block in (child for one in lists for child in one.children()):
        parameters = set(block.parameters()) - how["ignored_params"]
        if parameters and not any(map(is_sharded, parameters)):
            fully_shard(block, **how)
    fully_shard(model, **how)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            if _is_on_cpu(model):
                module.set_custom_all_gather(Gathering(world))  # type: ignore[arg-type]
                module.set_custom_reduce_scatter(Reducing(world))  # type: ignore[arg-type]


def kept_whole(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of a model that FSDP2 cannot shard with the rest: of another type than most values, or one number.
    Each process holds all of them."""
    sizes: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    most = max(sizes, key=sizes.__getitem__)
    return [parameter for parameter in model.parameters() if parameter.dtype != most or not parameter.dim()]


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


def part_like(weight: Tensor, part: Tensor, shape: tuple[int, ...]) -> Tensor:
    """This process's part of a tensor of a shape -> that tensor, if the weight that it goes with is in shards; the part
    itself if it is whole."""
    if not isinstance(weight, DTensor):
        return part
    stride = torch.empty(shape, device="meta").stride()
    mesh, placements = weight.device_mesh, weight.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def parts_of(tensor: Tensor) -> int:
    """The number of processes that have a part of a tensor."""
    return tensor.device_mesh.size() if isinstance(tensor, DTensor) else 1


def largest_part(tensor: Tensor) -> int:
    """The number of values in the largest part of a tensor."""
    if not is_sharded(tensor):
        return tensor.numel()
    rows = -(-tensor.shape[0] // parts_of(tensor))
    return rows * (tensor.numel() // tensor.shape[0])


def part_number(tensor: Tensor) -> int:
    """Which of a tensor's parts this process has."""
    return tensor.device_mesh.get_local_rank() if isinstance(tensor, DTensor) else 0


def over_parts(weight: Tensor, found: Tensor, largest: bool = False) -> Tensor:
    """What each process found in its part of a weight -> the sum over all parts, or the largest of each; in place."""
    if isinstance(weight, DTensor):
        operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        with sending(found):
            dist.all_reduce(found, operation, weight.device_mesh.get_group())
    return found


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
    """Refuses techniques whose layers do not hold dense weights."""
    refuse_others(
        settings, DENSE, "cannot be sharded, because a sparse layer's values and its index go together and FSDP2 would "
        "cut them in different places: leave it out, or replicate the model by not sharding it",
    )  # fmt: skip


def refuse_others(settings: dict[str, Any], beside: tuple[str, ...], why: str) -> None:
    """Refuses techniques that are not among those that go beside something."""
    for name in settings:
        if name not in beside:
            raise ShoestringError(f"{name} {why}")
