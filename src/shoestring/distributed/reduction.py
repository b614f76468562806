"""One step of several processes: gradients, losses and errors, added up over all of them.

Gradients are accumulated in each process alone, and added up once, during the backward pass of its last microbatch: a
bucket goes on its way as soon as its gradients are complete, in an order that is the same in all processes. A bucket's
gradients become views of it, so that it is transient memory only while it is filled. A gradient as large as a bucket is
added up where it lies. What is sent is what is stored: FP16 as FP16, of a sparse layer its values.

A process that fails, or has no items, still sends its share of every bucket, zeros, so that no other waits for it; then
all see the error.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..errors import ShoestringError
from ..finite import Buffers, is_statistic
from ..kernels.gradients import squared_norm
from .agreement import raise_together
from .digests import check_same
from .sharding import is_sharded, local
from .synchronised import SynchronisedNorms, refuse_unsynchronised
from .world import World

T = TypeVar("T")
BUCKET_BYTES = 1 << 18


class Together:
    """One process alone: its share is the batch, and its errors are its own."""

    contexts: tuple[Any, ...] = ()  # entered around each forward and backward pass, innermost

    def sends(self, is_last: bool) -> bool:
        """Whether messages are sent in a step's last pass, or in the others."""
        return False

    def counted(self, act: Callable[[], tuple[T, int]]) -> tuple[T, int]:
        """What each process does before a step, and the items that it finds -> its result, and the items of all."""
        return act()

    def begin(self, share: float) -> None:
        """Called before a step in which this process has such a share of the items."""

    def last_pass(self) -> AbstractContextManager:
        """Around the backward pass of the last microbatch."""
        return nullcontext()

    def finish(self, losses: list[Tensor], before: Buffers) -> list[Tensor]:
        """The weighted losses of a step's microbatches -> those of the whole batch; adds up gradients."""
        return losses

    def fail(self, before: Buffers, error: Exception) -> None:
        """Called instead of `finish` with what the step raised, before that goes on."""

    def check_same(self, changed: bool) -> None:
        """Raises if the model is no longer the same everywhere, where a hook in any process says that it acted."""

    def check_passes(self, count: int) -> None:
        """Raises if this process cannot run so many microbatches."""

    def squared_norm(self, gradients: Sequence[Tensor]) -> float:
        """The square of the norm of all gradients, of which this process may have parts."""
        return sum(map(squared_norm, gradients))

    def overflow(self, found: str | None) -> str | None:
        """What one process found not to be finite, or None -> what any of them found."""
        return found


def together(world: World, task: Any) -> Together:
    """The processes, and the task that they train -> what a step asks."""
    if world.size == 1:
        return Together()
    kind = Sharded if any(map(is_sharded, task.model.parameters())) else Reduction
    found = kind(world, task.model)
    if task.sync_batch_norm:
        refuse_unsynchronised(task.settings)
        found.contexts = (SynchronisedNorms(world),)
    return found


class Reduction(Together):
    """Several processes."""

    in_every_pass = False  # whether gradients are sent in each backward pass, and not in the last alone

    def __init__(self, world: World, model: nn.Module) -> None:
        self.world, self.model = world, model
        self.buckets: list[list[nn.Parameter]] = []
        self._sent: set[nn.Parameter] = set()
        self._ready: set[nn.Parameter] = set()
        self._had: set[nn.Parameter] = set()  # a gradient of its own
        self._waits: list[Callable[[], None]] = []
        self._share = 0.0

    def sends(self, is_last: bool) -> bool:
        return is_last or self.in_every_pass or bool(self.contexts)

    # -- before the passes --------------------------------------------------------------------------------------
    def counted(self, act: Callable[[], tuple[T, int]]) -> tuple[T, int]:
        try:
            result, items = act()
        except Exception as error:
            raise_together(self.world, self.world.sum([0, True])[1], error)
            raise
        total, failed = self.world.sum([items, False])
        raise_together(self.world, failed, None)
        return result, int(total)

    def begin(self, share: float) -> None:
        self.buckets = list(buckets(self.model))
        self._share = share
        for done in (self._sent, self._ready, self._had, self._waits):
            done.clear()

    def check_passes(self, count: int) -> None:
        """Where all processes exchange messages in every pass, all must run as many."""
        if not self.sends(is_last=False):
            return
        most, least = self.world.max([count, -count])
        if most != -least or not most:
            what = "sharded parameters" if self.in_every_pass else "synchronised batch norm"
            raise ShoestringError(
                f"the processes have {-least:.0f} to {most:.0f} microbatches, and with {what} each must have as many, "
                "and at least one: give them equal shares"
            )

    # -- the gradients ------------------------------------------------------------------------------------------
    @contextmanager
    def last_pass(self) -> Iterator[None]:
        with ExitStack() as stack:
            for parameter in self._parameters():
                stack.callback(parameter.register_post_accumulate_grad_hook(self._arrived).remove)
            yield

    def _arrived(self, parameter: Tensor) -> None:
        if _gradient(parameter) is None:
            raise ShoestringError(
                f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient, which several processes cannot "
                "add up: make the embedding with sparse=False"
            )
        if parameter in self._sent:
            raise ShoestringError(
                f"a parameter of shape {tuple(parameter.shape)} got its gradient in two parts, the second after the "
                "first was sent to the other processes: use torch.utils.checkpoint with use_reentrant=False"
            )
        self._ready.add(parameter)  # type: ignore[arg-type]
        while (place := self._next()) is not None and self._ready.issuperset(self.buckets[place]):
            self._send(self.buckets[place])

    def _next(self) -> int | None:
        """The next bucket to send: they go in one order everywhere, or sums would be of different things."""
        return len(self._waits) if len(self._waits) < len(self.buckets) else None

    @torch.no_grad()
    def _send(self, bucket: list[nn.Parameter]) -> None:
        self._sent.update(bucket)
        self._had.update(parameter for parameter in bucket if _gradient(parameter) is not None)
        self._waits.append(self.world.add_up(self._flat(bucket)))

    def _flat(self, bucket: list[nn.Parameter]) -> Tensor:
        """A bucket's gradients as one tensor, of which they are views from now on; zeros where there is none."""
        first, only = bucket[0], _gradient(bucket[0])
        if len(bucket) == 1 and only is not None and only.stride() == _strides(first):
            return only.as_strided((only.numel(),), (1,))
        flat = first.new_empty(sum(map(Tensor.numel, bucket)))
        start = 0
        for parameter in bucket:
            part = flat.as_strided(parameter.shape, _strides(parameter), start)
            gradient = _gradient(parameter)
            part.zero_() if gradient is None else part.copy_(gradient)
            parameter.grad = part
            start += parameter.numel()
        return flat

    # -- after the passes ---------------------------------------------------------------------------------------
    def finish(self, losses: list[Tensor], before: Buffers) -> list[Tensor]:
        parameters = self._parameters()
        loss, *told = self._settled(before, self.world.number(losses))
        for parameter, anyone in zip(parameters, told, strict=False):
            if not anyone:
                parameter.grad = None
        self._share_buffers(before, told[len(parameters) :])
        return [torch.tensor(loss, dtype=losses[0].dtype if losses else torch.float32)]

    def fail(self, before: Buffers, error: Exception) -> None:
        self._settled(before, 0.0, error)

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for bucket in self.buckets for parameter in bucket]

    def _settled(self, before: Buffers, loss: float, error: Exception | None = None) -> list[float]:
        """Sends the rest and waits for all -> the loss, and how many processes have a gradient of each parameter and
        changed each buffer."""
        while (place := self._next()) is not None:
            self._send(self.buckets[place])
        for wait in self._waits:
            wait()
        had = [parameter in self._had for parameter in self._parameters()]
        failed, *told = self.world.sum([error is not None, loss, *had, *before.changed()])
        raise_together(self.world, failed, error)
        return told

    @torch.no_grad()
    def _share_buffers(self, before: Buffers, changed: Sequence[float]) -> None:
        """Batch-norm statistics become the mean over the items of all processes; any other buffer is process 0's."""
        now = [(b.module._buffers[b.name], is_statistic(b)) for b, by in zip(before.all, changed, strict=True) if by]
        found = [(tensor, averages) for tensor, averages in now if tensor is not None]
        means = [tensor for tensor, averages in found if averages and tensor.is_floating_point()]
        for kind in {(tensor.dtype, tensor.device): None for tensor in means}:
            self._mean([tensor for tensor in means if (tensor.dtype, tensor.device) == kind])
        others = [tensor for tensor, averages in found if not (averages and tensor.is_floating_point())]
        for device in {tensor.device: None for tensor in others}:
            self.world.from_first([tensor for tensor in others if tensor.device == device])

    def _mean(self, tensors: list[Tensor]) -> None:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).mul_(self._share)
        self.world.add_up(flat)()
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))

    def check_same(self, changed: bool) -> None:
        if self.world.max([changed])[0]:
            check_same(self.world, {"rewired model": self.model})


class Sharded(Reduction):
    """Several processes, among which FSDP2 has sharded parameters: it reduces their gradients itself."""

    in_every_pass = True

    def squared_norm(self, gradients: Sequence[Tensor]) -> float:
        shards = [local(gradient) for gradient in gradients if is_sharded(gradient)]
        others = [gradient for gradient in gradients if not is_sharded(gradient)]
        return self.world.sum([super().squared_norm(shards)])[0] + super().squared_norm(others)

    def overflow(self, found: str | None) -> str | None:
        return (found or "a gradient in another process") if self.world.max([found is not None])[0] else None

    def check_same(self, changed: bool) -> None:
        """Each process has shards of its own."""


def buckets(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """A model -> its trainable parameters in buckets of one type, in about the order in which gradients are made."""
    filling: dict[tuple, list[nn.Parameter]] = {}
    for name, parameter in reversed(list(model.named_parameters())):
        if not parameter.requires_grad or is_sharded(parameter):
            continue
        if parameter.layout != torch.strided:
            raise ShoestringError(f"{name} is {parameter.layout}, which several processes cannot add up: make it dense")
        kind = parameter.dtype, parameter.device
        bucket = filling.setdefault(kind, [])
        if bucket and sum(p.nbytes for p in bucket) + parameter.nbytes > BUCKET_BYTES:
            yield filling.pop(kind)
            bucket = filling.setdefault(kind, [])
        bucket.append(parameter)
    yield from (bucket for bucket in filling.values() if bucket)


def _gradient(parameter: Tensor) -> Tensor | None:
    """A parameter's gradient, if it has one that can be sent."""
    gradient = parameter.grad
    return gradient if gradient is not None and gradient.layout == torch.strided else None


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """The strides of a parameter's gradient in a bucket: its own, if they leave no gaps."""
    if torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return parameter.stride()
    return torch.empty(parameter.shape, device="meta").stride()
