"""Sharded parameters, gradients and optimizer state (ZeRO, FSDP): each of several processes holds its shard. Exact.

The card is docs/techniques/shard.md.

PyTorch's FSDP2 does it (distributed/sharding.py), when the first step is about to be done: a block's parameters are
gathered for its passes, and its gradients reduced to shards after each backward pass. So microbatches send as much
again, each of them. Without it the model is replicated, and gradients are added up once per update.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...distributed import refuse_unsharded
from ...errors import NoEffect, ShoestringError
from ...task import Task
from ..activations import Settings as Activations
from ..technique import Bounds, Technique


@dataclass(frozen=True)
class Settings:
    """`by`: fsdp, which is PyTorch's FSDP2."""

    by: str = "none"


def options(task: Task) -> list[str]:
    _require_several(task)
    _require_one_type(task)
    return ["fsdp"]


def apply(task: Task, settings: Settings) -> Task:
    """A task -> the same task, whose model is to be sharded before its first step."""
    if settings.by != "fsdp":
        raise ShoestringError(f"there are no shards by {settings.by!r}: use fsdp")
    _require_several(task)
    _require_shardable(task.settings)
    if "precision" not in task.settings:  # beside which norms stay FP32, and whole
        _require_one_type(task)
    return task.with_(sharded=True)


def _require_several(task: Task) -> None:
    if task.devices == 1:
        raise NoEffect("one process alone has nothing to shard: start several with torchrun, or plan for --devices N")


def _require_one_type(task: Task) -> None:
    if len({parameter.dtype for parameter in task.model.parameters()}) > 1:
        raise ShoestringError("FSDP2 shards parameters of one type, and the model has several: convert it to one")


def _require_shardable(settings: Mapping[str, Any]) -> None:
    """Refuses techniques that do not go beside shards."""
    refuse_unsharded(dict(settings))
    if "activations" in settings and Activations(settings["activations"]).adaptive:
        raise ShoestringError(
            "activations adaptive cannot be sharded, because it traces the model anew as it trains: name the codecs, "
            "as in activations pool2, or replicate the model by not sharding it"
        )


def refuses(task: Task, settings: Mapping[str, Any]) -> str:
    try:
        _require_shardable({name: value for name, value in settings.items() if name != "shard"})
    except ShoestringError as error:
        return str(error) if "shard" in settings else ""
    return ""


def bounds(task: Task, by: str) -> Bounds:
    """A process has its share of what lasts, and all activations of its share of the batch."""
    return Bounds(lasting=1 / task.devices, moving=1.0)


TECHNIQUE = Technique(Settings, apply, options, refuses=refuses, bounds=bounds)
