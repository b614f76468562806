"""Parameters, gradients and optimizer state in shards, one per process, by PyTorch's FSDP2 (`fully_shard`).

FSDP2 gathers the parameters of a block for its passes and reduces its gradients to shards after each backward pass, so
that no process holds all of them (with checkpointing, parameters stay gathered from forward to backward). What is left
to do here: FSDP2 takes the mean over processes, and a step wants the mean over items; and what a process sees of its
own shards is not what the others see of theirs.
"""

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import ShoestringError

DENSE = ("checkpoint", "microbatch")  # the techniques that leave weights and their update to PyTorch


def is_sharded(tensor: Tensor | None) -> bool:
    return isinstance(tensor, DTensor)


def shard(model: nn.Module, settings: dict[str, Any]) -> None:
    """Shards a model over all processes: each block of its ModuleLists and Sequentials, then the rest."""
    from torch.distributed.fsdp import fully_shard

    refuse_unsharded(settings)
    # A region that is recomputed begins before the block whose backward pass asks for it, and finds what is gathered;
    # so parameters stay gathered from forward to backward there.
    free = "checkpoint" not in settings
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    for block in (child for one in lists for child in one.children() if any(True for _ in child.parameters())):
        if not any(is_sharded(parameter) for parameter in block.parameters()):
            fully_shard(block, reshard_after_forward=free)
    fully_shard(model, reshard_after_forward=free)


def refuse_unsharded(settings: dict[str, Any]) -> None:
    """Refuses techniques whose weights, or their update, are not PyTorch's own."""
    for name in settings:
        if name not in DENSE:
            raise ShoestringError(
                f"{name} cannot be sharded, because its kernels work on whole tensors and FSDP2 leaves a process parts "
                f"of them: use {' and '.join(DENSE)} beside it, or replicate the model by not sharding it"
            )
