"""The allocator meter: every block that torch's CPU allocator handed out during a run -> timeline and peak.

It listens to torch.profiler's memory events, so oneDNN's reorders and im2col buffers count as tensors do.
What it cannot see, found by experiment with torch 2.13:
- Blocks older than the run: neither their bytes nor their end (torch logs a warning and reports no event).
  So allocate what is to be counted inside the run, or list what stays in `held`.
- Other threads. Only the calling thread is observed (the backward pass on the CPU runs in it). A block that
  another thread frees seems alive until its address is reused.
- Memory that does not come from torch's allocator: NumPy arrays, MKL's and oneDNN's own malloc, the nodes of
  autograd's graph (a few hundred bytes each; 5 MB for a recurrent net of 10,000 operators). The heap meter
  sees those.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _EventType, _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from ..errors import ShoestringError
from .measurement import Measurement

OUTSIDE = -1  # the call number of events outside any operator


@dataclass(frozen=True, slots=True)
class Event:
    """A block allocated (`bytes` > 0) or freed (< 0), in operator call number `call`."""

    time: int
    address: int
    bytes: int
    operation: str
    call: int


@dataclass(slots=True)
class Block:
    """A block from allocation to free, as event numbers; scratch is allocated and freed within one call."""

    bytes: int
    operation: str
    call: int
    born: int
    died: int | None = None
    scratch: bool = False


def measure_allocator(run: Callable[[], Any], held: Iterable[Tensor] = ()) -> Measurement:
    """Runs `run()` -> what torch's CPU allocator handed out meanwhile.

    `held` are existing tensors that stay alive throughout; their storages are added to every reading.

    >>> measure_allocator(lambda: torch.empty(1000, dtype=torch.uint8)).peak_bytes
    1000
    """
    start = storage_bytes(held)
    return read(record(run), start)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Tensors -> the bytes of their storages; tensors that share one count it once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def record(run: Callable[[], Any]) -> list[Event]:
    """Runs `run()` under torch's profiler -> its allocator events in order of time."""
    require_idle_profiler()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it logs to stderr at every start and stop
    names = _ExperimentalConfig(capture_overload_names=True)
    session: Any = profile(activities=[ProfilerActivity.CPU], profile_memory=True, experimental_config=names)
    with session:
        result = run()
    del result  # held until here: what a run returns is alive at its end
    return sorted(_events(session.profiler.kineto_results.experimental_event_tree()), key=lambda e: e.time)


def require_idle_profiler() -> None:
    """Refuses to meter inside another profile: torch can run only one per thread."""
    if torch.autograd._profiler_enabled():
        raise ShoestringError(
            "the allocator meter cannot start: torch.profiler is already running in this thread; stop it first"
        )


def _events(roots: Sequence[Any]) -> Iterator[Event]:
    """The profiler's tree of calls -> its allocator events, each with the operator call that it is in."""
    calls = 0
    stack = [(node, "", OUTSIDE) for node in reversed(roots)]
    while stack:
        node, operation, call = stack.pop()
        kind, fields = node.typed
        if kind == _EventType.Allocation:
            if fields.device.type == "cpu":
                yield Event(node.start_time_ns, fields.ptr, fields.alloc_size, operation, call)
            continue
        if call == OUTSIDE and kind == _EventType.TorchOp:
            operation = node.name
            if is_one_operator(node.name, node.overload_name):
                call, calls = calls, calls + 1
        stack.extend((child, operation, call) for child in reversed(node.children))


@cache
def is_one_operator(name: str, overload: str) -> bool:
    """Whether a profiler event is an operator that a dispatch mode sees as one call, with all that it calls.

    Composite operators (linear, layer_norm) only call others: those are the operators. Other events
    are autograd nodes and user annotations.
    """
    if "::" not in name or torch._C._get_operation_overload(name, overload) is None:
        return False
    qualified = f"{name}.{overload}" if overload else name
    return not torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "CompositeImplicitAutograd")


def read(events: list[Event], start_bytes: int = 0) -> Measurement:
    """Allocator events in order -> the reading, with scratch separated from tensors.

    An operator's outputs are counted as tensors from the operator's first event on, as in a prediction:
    oneDNN writes the output into a blocked buffer first and copies it at the end, and that buffer stands in
    the output's place. Workspace is what the operator needs on top of its outputs.
    """
    blocks = trace_blocks(events)
    first_of_call: dict[int, int] = {}
    for number, event in enumerate(events):
        first_of_call.setdefault(event.call, number)
    live, tensors = [0] * len(events), [0] * len(events)
    for block in blocks:
        _add(live, block, block.born)
        if not block.scratch:
            _add(tensors, block, block.born if block.call == OUTSIDE else first_of_call[block.call])
    timeline = [start_bytes + b for b in accumulate(live)] or [start_bytes]
    tensor_timeline = [start_bytes + b for b in accumulate(tensors)] or [start_bytes]
    peak = max(range(len(timeline)), key=timeline.__getitem__)
    workspace = [max(0, a - b) for a, b in zip(timeline, tensor_timeline, strict=True)]
    return Measurement(
        meter="allocator",
        peak_bytes=timeline[peak],
        end_bytes=timeline[-1],
        start_bytes=start_bytes,
        tensor_peak_bytes=max(tensor_timeline),
        workspace_peak_bytes=max(workspace),
        workspace_at_peak_bytes=workspace[peak],
        peak_operation=events[peak].operation if events else "",
        by_operation=_by_operation(blocks, peak),
        timeline=tuple(timeline),
        tensor_timeline=tuple(tensor_timeline),
    )


def trace_blocks(events: list[Event]) -> list[Block]:
    """Allocator events in order -> the blocks that were allocated among them, with their ends.

    The free of a block that was not allocated here is skipped. If an address is reused while its block seems alive,
    another thread freed it unobserved: that block ends there.
    """
    blocks: list[Block] = []
    alive: dict[int, Block] = {}
    for number, event in enumerate(events):
        ended = alive.pop(event.address, None)
        if ended is not None:
            ended.died = number
            ended.scratch = event.bytes < 0 and event.call == ended.call != OUTSIDE
        if event.bytes > 0:
            alive[event.address] = Block(event.bytes, event.operation, event.call, number)
            blocks.append(alive[event.address])
    return blocks


def _add(changes: list[int], block: Block, born: int) -> None:
    changes[born] += block.bytes
    if block.died is not None:
        changes[block.died] -= block.bytes


def _by_operation(blocks: list[Block], time: int) -> dict[str, int]:
    sums: dict[str, int] = {}
    for block in blocks:
        if block.born <= time and (block.died is None or time < block.died):
            sums[block.operation] = sums.get(block.operation, 0) + block.bytes
    return dict(sorted(sums.items(), key=lambda item: -item[1]))
