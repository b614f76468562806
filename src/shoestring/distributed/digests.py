"""What must be the same in every process, compared by hashes: no weight is ever sent."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ShoestringError
from .sharding import is_sharded
from .world import World

CURES = {
    "plan": "apply the same plan in each",
    "model": "build the same model in each",
    "weights": "seed every process alike before the model is built, or load the same file",
    "seed": "give each the same seed",
    "data": "give each the same data, of which it takes its share itself",
    "rewired model": "rewiring, or a hook of yours, drew other numbers there: give its generator the same seed in each",
    "recipe": "train with the same settings in each",
}


def check_same(world: World, what: Mapping[str, Any]) -> None:
    """Names (of `CURES`) and values -> ShoestringError in every process if one of them has another value."""
    if world.size == 1:
        return
    mine = {name: digest(value) for name, value in what.items()}
    found = [json.loads(text) for text in world.gather(json.dumps(mine).encode())]
    for name in mine:
        other = next((rank for rank, theirs in enumerate(found) if theirs[name] != found[0][name]), None)
        if other is not None:
            raise ShoestringError(
                f"the {name} of process {other} is not that of process 0 ({world.size} processes): {CURES[name]}"
            )


def digest(value: Any) -> str:
    """Text, bytes, plain data, tensors in a list or dict, or a model with all its tensors -> SHA-256."""
    sha = hashlib.sha256()
    _feed(sha, value)
    return sha.hexdigest()


def _feed(sha: Any, value: Any) -> None:
    if isinstance(value, nn.Module):
        value = dict([*value.named_parameters(), *value.named_buffers()])
    if isinstance(value, Tensor):
        sha.update(f"{value.dtype} {tuple(value.shape)} ".encode())
        _feed_values(sha, value.detach())
    elif isinstance(value, Mapping):
        for key in value:
            sha.update(f"{key} ".encode())
            _feed(sha, value[key])
    elif isinstance(value, list | tuple):
        for part in value:
            _feed(sha, part)
    else:
        sha.update(value if isinstance(value, bytes) else repr(value).encode())


def _feed_values(sha: Any, tensor: Tensor, most: int = 1 << 20) -> None:
    """At most so many values are copied at a time."""
    if is_sharded(tensor) or tensor.is_meta or tensor.layout != torch.strided or not tensor.numel():
        return
    dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    flat = torch.as_strided(tensor, (tensor.numel(),), (1,)) if dense else tensor.reshape(-1)
    for part in flat.split(most):
        sha.update(part.cpu().contiguous().view(torch.uint8).numpy())
