"""Predicts the time of a step: the FLOPs, bytes and calls of its trace, at the rates of this device.

    seconds = flops / speed + 3 born_bytes / bytes_per_second + calls seconds_per_call
              + passes weights seconds_per_weight
              + 2 offloaded_bytes / disk_bytes_per_second
              + sent_bytes / link_bytes_per_second

The speed is that of PyTorch's, of our dense or of our sparse kernels, on maps of the width that each convolution has:
ours are faster on wide maps and slower on narrow ones. A tensor is written once and read about twice; each that is born
comes with some calls, which take longer through our Python and less from a tape. Each pass widens, reorders or decodes
the weights, however small its microbatch is. Offloaded bytes are written and read back. Processes that share a batch
pass their gradients around a ring once per update: 2 (devices - 1) / devices of their bytes; or, in shards, parameters
and gradients in every pass, as the trace counts them. What of that goes on during the passes is not taken off. The
rates come from a calibration of some seconds; only ratios of predictions are used, so that what all plans share
cancels. benchmarks/predicted_time.py measures how accurate they are.
"""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from ..profiling import Profile
from ..rates import LEAN, PLAIN, SPARSE, Rates
from ..task import Task
from .estimate import forward_start

# Calls that come with a tensor, in those of a plain layer: each kernel is called by Python functions of ours, or from a
# tape. The first was fitted on a small GPT, the second on WRN-28-2 in microbatches of 4 (docs/predicted_time.md).
LEAN_CALL, TAPED_CALL = 3.0, 1.3


class Work(NamedTuple):
    """What takes time in one traced step of the whole batch."""

    flops: Mapping[int, float]  # by the width of convolutions' maps, 0 for the rest
    born_bytes: int
    calls: int
    offloaded_bytes: int
    sent_bytes: int = 0  # for shards, in one pass
    weights: Mapping[int, int] = {}  # of matrix products (0) and of convolutions (1)
    narrow: bool = False  # whether weights have 16 bits
    static: bool = False  # whether passes may run from a tape


def work_of(traced: Profile, task: Task, offloaded_bytes: int = 0) -> Work:
    """A brief trace -> its work from the forward pass on: before it, optimizer state is created."""
    start = forward_start(traced)
    born = [entry.bytes for entry in traced.ledger.entries if entry.born >= start]
    more_bytes, more_calls = traced.repeated
    bytes_born, calls = sum(born) + more_bytes, len(born) + more_calls
    narrow = any(parameter.element_size() == 2 for parameter in task.model.parameters())
    static = task.static_graph and task.devices == 1 and not traced.draws and not offloaded_bytes
    weights = _weights(task.model)
    return Work(traced.flops_by_width, bytes_born, calls, offloaded_bytes, traced.sent_bytes, weights, narrow, static)


def _weights(model: nn.Module) -> dict[int, int]:
    """A model -> how many weights its matrix products (0) and its convolutions (1) have. Embeddings are not."""
    looked_up = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)}
    found = Counter[int]()
    for weight in model.parameters():
        if weight.dim() > 1 and id(weight) not in looked_up:
            found[int(weight.dim() > 2)] += weight.numel()
    return dict(found)


def sent_bytes(gradient_bytes: float, devices: int) -> float:
    """What each of several processes sends to add up their gradients around a ring: nearly all of them, twice."""
    return 2 * (devices - 1) / devices * gradient_bytes


def seconds_of(
    work: Work, rates: Rates, pieces: int = 1, density: float = 1.0, lean: bool = False, sent: float = 0.0
) -> float:
    """The predicted time of a step that runs in `pieces`, computes a share `density` of its FLOPs and sends bytes."""

    def kind(width: int) -> str:
        if density != 1:
            return SPARSE
        return LEAN if lean and (width or work.narrow) else PLAIN  # in 32 bits a matrix product is PyTorch's

    computed = sum(density * flops / rates.speed(kind(width), width) for width, flops in work.flops.items())
    moved = work.born_bytes * rates.seconds_per_byte("memory") + work.offloaded_bytes * rates.seconds_per_byte("disk")
    moved += sent / rates.link_bytes_per_second
    weighed = sum(density * count * rates.seconds_per_weight(kind(at), at) for at, count in work.weights.items())
    call = (TAPED_CALL if work.static else LEAN_CALL) if lean else 1.0
    return computed + moved + pieces * (weighed + work.calls * call * rates.seconds_per_call)
