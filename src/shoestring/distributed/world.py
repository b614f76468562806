"""The processes that train together, as torchrun started them or the caller's process group has them.

`World` is one process alone, `Group` is several, and `Pretended` is several in a trace, in which nothing is sent. All
numbers that decide something go through `sum`, `max` or `gather`, so that every process decides alike.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ShoestringError

LET_GO_SECONDS = 0.1  # at most, for a thread that does not get its turn


class Lost(ShoestringError):
    """Another process of the run is gone, so that this one cannot go on."""

    exit_code = 1

    def with_more(self, words: str) -> "Lost":
        more = Lost(f"{self}; {words}")
        more.exit_code = self.exit_code
        return more


class World:
    """One process alone: what it knows, all know."""

    rank, size = 0, 1
    sent_bytes = 0  # of gradients that were added up, by this process, so far
    gathered_bytes = 0  # of parameters, from all processes, so far

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Numbers -> their sums over all processes, in FP64."""
        return list(numbers)

    def max(self, numbers: Sequence[float]) -> list[float]:
        return list(numbers)

    def gather(self, data: bytes) -> list[bytes]:
        """What each process has to say -> all of it, by rank."""
        return [data]

    def number(self, losses: Sequence[Tensor]) -> float:
        """The sum of a few numbers on a device."""
        return sum(map(float, losses))

    def add_up(self, flat: Tensor) -> Callable[[], None]:
        """Begins to add up a tensor over all processes, in place -> what to call before it is read."""
        return _nothing

    def from_first(self, tensors: Sequence[Tensor]) -> None:
        """Gives tensors the values that they have in process 0."""

    def gather_parts(self, flat: Tensor) -> None:
        """Gives each process's part of a tensor, of as many equal parts, the values that it has there."""
        self.gathered_bytes += flat.nbytes

    def bytes_per_second(self) -> float | None:
        """How fast the processes add up: the bytes that each sends, over the time of the slowest; None if alone."""
        return None


def _nothing() -> None:
    pass


ALONE = World()


def _holders(tensor: Tensor) -> int:
    """How many hold a tensor on a CPU; nothing is known of other devices, nor by an older PyTorch."""
    return tensor._use_count() if tensor.device.type == "cpu" and hasattr(tensor, "_use_count") else 0


def _until_let_go(tensor: Tensor, holders: int) -> None:
    """Waits until as few hold a tensor as did before it was sent: gloo's thread does until it runs again, a moment
    after it said that all is sent, and the peak of a step would depend on when."""
    patience = time.perf_counter() + LET_GO_SECONDS
    while holders < _holders(tensor) and time.perf_counter() < patience:
        time.sleep(0)


class Group(World):
    """The processes of torch.distributed's default group. Numbers and texts travel in tensors on the CPU."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._texts: Any = None if "gloo" in str(dist.get_backend_config()) else dist.new_group(backend="gloo")

    def sum(self, numbers: Sequence[float]) -> list[float]:
        return self._all(numbers, dist.ReduceOp.SUM)

    def max(self, numbers: Sequence[float]) -> list[float]:
        return self._all(numbers, dist.ReduceOp.MAX)

    def _all(self, numbers: Sequence[float], operation: Any) -> list[float]:
        message = torch.tensor(numbers, dtype=torch.float64)
        with sending(message):
            dist.all_reduce(message, operation, group=self._texts)
        return message.tolist()

    def gather(self, data: bytes) -> list[bytes]:
        sizes = [int(size) for size in self.sum([len(data) * (rank == self.rank) for rank in range(self.size)])]
        mine = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
        found = [torch.empty_like(mine) for _ in range(self.size)]
        with sending(mine):
            dist.all_gather(found, mine, group=self._texts)
        return [bytes(part[:size].numpy()) for part, size in zip(found, sizes, strict=True)]

    def add_up(self, flat: Tensor) -> Callable[[], None]:
        self.sent_bytes += flat.nbytes
        holders = _holders(flat)
        with losing():
            works = [dist.all_reduce(flat, async_op=True)]

        def wait() -> None:
            with losing():
                while works:
                    works.pop().wait()  # which holds the connections: voice.py wants to close them
            _until_let_go(flat, holders)

        return wait

    def from_first(self, tensors: Sequence[Tensor]) -> None:
        parts = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]  # a backend may not know the type
        flat = torch.cat(parts)
        with sending(flat):
            dist.broadcast(flat, 0)
        for tensor, part in zip(tensors, flat.split([part.numel() for part in parts]), strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))

    def gather_parts(self, flat: Tensor) -> None:
        super().gather_parts(flat)
        for rank, part in enumerate(flat.chunk(self.size)):  # gloo's own way would copy all of it
            with sending(part):
                dist.broadcast(part, rank)

    def bytes_per_second(self) -> float | None:
        flat = torch.zeros(1 << 20, dtype=torch.uint8)
        taken = []
        for _ in range(3):
            start = time.perf_counter()
            with losing():
                dist.all_reduce(flat, group=self._texts)
            taken.append(time.perf_counter() - start)
        return 2 * (self.size - 1) / self.size * flat.nbytes / self.max([min(taken)])[0]


class Pretended(World):
    """So many processes in a trace: messages take their memory and are not sent. `claim` is told of each bucket."""

    def __init__(self, size: int, claim: Callable[[Tensor], None] = lambda flat: None) -> None:
        self.size, self.claim = size, claim

    def sum(self, numbers: Sequence[float]) -> list[float]:
        torch.empty(len(numbers), dtype=torch.float64)
        return list(numbers)

    def number(self, losses: Sequence[Tensor]) -> float:
        return 0.0

    def add_up(self, flat: Tensor) -> Callable[[], None]:
        self.sent_bytes += flat.nbytes
        self.claim(flat)
        return _nothing


@contextmanager
def losing() -> Iterator[None]:
    """Turns what the backend raises into one line: most of the time, a process at the other end has died."""
    try:
        yield
    except RuntimeError as error:
        words = " ".join(str(error).split())
        raise _lost(words) from error


@contextmanager
def sending(tensor: Tensor) -> Iterator[None]:
    """Around a message that is sent whole before it ends: as `losing`, and nobody holds the tensor after it."""
    holders = _holders(tensor)
    with losing():
        yield
    _until_let_go(tensor, holders)


def _lost(words: str) -> Lost:
    """What a process that is gone left to say, or else what the backend says."""
    code, colon, told = _last_words().partition(":")
    error = Lost(told or f"another process of this run is gone, so this one stops ({words[:160]})")
    error.exit_code = int(code) if colon else Lost.exit_code
    return error


# -- torchrun ----------------------------------------------------------------------------------------------------
class Launched(NamedTuple):
    """A process as torchrun started it."""

    rank: int
    size: int


def launched_as() -> Launched | None:
    """The rank and the number of processes by the environment; None if this process was not started by torchrun."""
    words = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE")]
    if None in words:
        return None
    try:
        rank, size = map(int, words)  # type: ignore[arg-type]
    except ValueError:
        rank, size = -1, 0
    if not 0 <= rank < size:
        raise ShoestringError(
            f"RANK={words[0]} of WORLD_SIZE={words[1]} is no process of a run: start with torchrun, or unset both"
        )
    return Launched(rank, size)


def attempt() -> str:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


# -- last words: the store outlives a process that ends with an error ----------------------------------------------
FAILED = "shoestring/failed"


def leave_word(words: str) -> None:
    """Tells the other processes why this one ends, for when they miss it."""
    if dist.is_available() and dist.is_initialized():
        default_store().set(FAILED, words)


def _last_words() -> str:
    try:
        return default_store().get(FAILED).decode() if default_store().check([FAILED]) else ""
    except (RuntimeError, ValueError):  # the store is gone, too
        return ""


def default_store() -> Any:
    return dist.distributed_c10d._get_default_store()
