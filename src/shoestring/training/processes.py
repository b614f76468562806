"""A run of several processes: each reads its share of every batch, and process 0 writes the one run folder."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from ..data.draws import mix
from ..distributed import World, agreed, by_first, check_same
from ..errors import ShoestringError
from ..items import counted
from ..planning.plan import Plan
from ..runs.folder import RunFolder
from ..runs.save import Save
from ..runs.state import Stateful, pack, unpack
from ..structure import tensors
from ..task import Task
from ..techniques.microbatch.pieces import cut
from .evaluate import Data

OWN = ("parts", "random")  # the groups of a save that a process may have its own of


# -- the data -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Shares:
    """Data of whole batches -> that of one process: its examples of each batch, as many as others have or one fewer."""

    data: Data
    task: Task
    rank: int
    size: int

    def __len__(self) -> int:
        return len(self.data)

    def read(self, epoch: int, number: int) -> Any:
        return share_of(self.task, self.data.read(epoch, number), self.rank, self.size)


def share_of(task: Task, batch: Any, rank: int, size: int) -> Any:
    """A batch -> the examples of one of `size` processes; the first have the most."""
    examples = counted(batch, task.shared)[1]
    start, end = (place * examples // size for place in (size - 1 - rank, size - rank))
    return cut(batch, slice(examples - end, examples - start), task.shared)


def check_examples(examples: int, size: int) -> None:
    """Refuses a batch that is smaller than the number of processes; the last of an epoch may be."""
    if examples < size:
        raise ShoestringError(
            f"a batch of {examples} examples cannot be shared by {size} processes: use a larger batch, or fewer "
            "processes"
        )


def example_share(task: Task, devices: int) -> Task:
    """A task with a whole batch -> the same as one of several processes has it, with the largest share."""
    if devices == 1:
        return task
    check_examples(counted(task.batch, task.shared)[1], devices)
    return task.with_(batch=share_of(task, task.batch, 0, devices), devices=devices)


def shared(data: Any, task: Task, world: World) -> Data:
    """Data of whole batches -> this process's part of it; refused if it differs between processes."""
    if world.size == 1:
        return data
    first = agreed(world, lambda: data.read(0, 0))
    check_same(world, {"data": tensors(first)})
    parts = first if hasattr(data, "shared") else [first]
    examples = sum(counted(part, task.shared)[1] for part in parts)
    check_examples(examples, world.size)
    if hasattr(data, "shared"):
        return data.shared(world.rank, world.size)
    return Shares(data, task, world.rank, world.size)


def own_seed(seed: int, rank: int, *further: int) -> int:
    """The seed of what a process draws for itself, such as dropout: process 0's is the run's."""
    return int(mix(seed, rank, *further)[0] >> 1) if rank else seed


def planned_by_first(world: World, make: Callable[[], Plan]) -> Plan:
    """The plan of process 0, in all: what it measures is never the same twice."""
    return make() if world.size == 1 else Plan.from_json(by_first(world, lambda: make().to_json()))


# -- the saves ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Held:
    """A state that was received; and, for `unpack`, a file of its tensors."""

    packed: Any
    entries: Mapping[str, Tensor]

    def read_into(self, name: str, tensor: Tensor) -> None:
        tensor.copy_(self.entries[name])

    def state(self) -> Any:
        return unpack(self.packed, self)  # type: ignore[arg-type]

    def restore(self, state: Any) -> None:
        raise AssertionError("it is only written")


def gathered(world: World, groups: Mapping[str, Stateful]) -> dict[str, Stateful]:
    """The groups of this process -> in process 0, those of the others too where they are not as its own."""
    if world.size == 1:
        return dict(groups)
    found = dict(groups)
    for name in OWN:
        data = _bytes(groups[name])
        marks = world.gather(hashlib.sha256(data).digest())
        sent = world.gather(b"" if marks[world.rank] == marks[0] else data)
        found |= {own_name(name, rank): _held(text) for rank, text in enumerate(sent) if text and world.rank == 0}
    return found


def own_name(group: str, rank: int) -> str:
    return f"{group}_of_process_{rank}" if rank else group


def newest(folder: RunFolder, world: World) -> Save | None:
    """The save that process 0 finds to be the newest that is not damaged."""
    found: list[Save | None] = []

    def look() -> str:
        found.append(folder.saves.newest())
        return "" if found[0] is None else str(found[0].update)

    update = by_first(world, look)
    return found[0] if found else folder.saves.check(int(update)) if update else None


def restore(save: Save, groups: Mapping[str, Stateful], rank: int, seed: int) -> None:
    """Restores each group, of those that a process has its own of its own; a process that is new draws anew."""
    for name, part in groups.items():
        own = own_name(name, rank) if name in OWN else name
        if own in save.values or name != "random":
            save.restore(own if own in save.values else name, part, in_place=name in ("model", "optimizer"))
        else:
            torch.manual_seed(own_seed(seed, rank, save.update))


def _bytes(part: Stateful) -> bytes:
    packed, found = pack(part.state())
    text = json.dumps(packed).encode()
    arrays = {name: tensor.detach().cpu().contiguous() for name, tensor in found.items()}
    return len(text).to_bytes(8, "little") + text + safetensors.torch.save(arrays)


def _held(data: bytes) -> Held:
    end = 8 + int.from_bytes(data[:8], "little")
    return Held(json.loads(data[8:end]), safetensors.torch.load(data[end:]))
