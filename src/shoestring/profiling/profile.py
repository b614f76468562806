"""`profile(task) -> Profile`: two whole training steps traced, their peak attributed to the last byte."""

import html
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..distributed import Pretended, pretended_shards
from ..ledger import BUCKET, Category, Ledger, Peak, Phase, sum_bytes
from ..phases import listen, phase
from ..signature import Signature
from ..step import Stepper
from ..structure import tensors
from ..task import Task
from ..units import format_bytes
from .choices import Choices, short
from .dry import larger_way, on_fakes
from .objects import Fullest, fullest
from .scratch import Traced, unmeasured, with_scratch
from .trace import Tracer, home
from .updates import Pair, Unlike, Updates


@dataclass(frozen=True)
class Profile:
    """The predicted memory of a task's training step; `ledger` holds every storage behind the figures."""

    task: str
    settings: dict[str, Any]
    ledger: Ledger = field(repr=False)
    peak: Peak
    flops: dict[str, float]
    unseen: list[str]
    signatures: list[Signature] = field(repr=False)
    uncalibrated: int = 0  # distinct operator calls whose scratch is not known, and not counted
    scratch_bytes: int = 0  # of all distinct operator calls whose scratch is known
    nodes: int = 0  # of autograd's graph, at the end of the forward pass that has most
    leaves: int = 0  # of those, the ones that accumulate the gradients of parameters
    is_recorded: bool = False  # whether a step may write a tape of its passes
    flops_by_width: dict[int, int] = field(default_factory=dict, repr=False)  # of convolutions' maps; 0 for the rest
    draws: int = 0  # of random numbers, in the passes
    sent_bytes: int = 0  # to other processes, if the model is in shards
    repeated: tuple[int, int] = (0, 0)  # bytes born and calls of runs that a traced one stands for, not in the ledger
    traced: Traced | None = field(default=None, repr=False, compare=False)

    def with_scratch(self, table: Mapping[str, int | None]) -> "Profile | None":
        """The same trace with the scratch of another table; None if with that table the trace itself is another."""
        traced = self.traced
        if traced is None or traced.branches or any(key in table for key in traced.open_outputs):
            return None
        return _profile_of(traced, table)

    @property
    def peak_bytes(self) -> int:
        return self.peak.bytes

    @cached_property
    def fullest(self) -> Fullest:
        """What is there when tensors and the objects around them are most together."""
        return fullest(self.ledger, self.nodes, self.leaves, self.is_recorded)

    @property
    def needed_bytes(self) -> int:
        """What a budget counts: tensors and the Python objects around them."""
        return self.fullest.needed

    @property
    def object_bytes(self) -> int:
        """Of what a budget counts, the Python objects around tensors, which are estimated."""
        return self.needed_bytes - self.peak_bytes

    @property
    def tensor_peak_bytes(self) -> int:
        """The peak of the tensors that operators return, without their scratch."""
        return self.ledger.only(*(set(Category) - {Category.WORKSPACE})).peak().bytes

    @property
    def workspace_peak_bytes(self) -> int:
        """The largest scratch of any one operator."""
        return self.ledger.only(Category.WORKSPACE).peak().bytes

    @property
    def bytes_by_category(self) -> dict[str, int]:
        """Bytes alive at the peak, for every category (0 if there are none)."""
        found = self.ledger.bytes_by(lambda e: str(e.category), self.peak.time)
        return dict.fromkeys(map(str, Category), 0) | found

    @property
    def by_module(self) -> list[dict[str, Any]]:
        """Bytes alive at the peak for each module, heaviest first, and their categories."""
        live = self.ledger.live_at(self.peak.time)
        totals = sum_bytes(live, lambda e: e.module)
        return [
            {"module": module, "bytes": total}
            | sum_bytes((e for e in live if e.module == module), lambda e: str(e.category))
            for module, total in totals.items()
        ]

    def to_json(self) -> dict[str, Any]:
        parts = self.bytes_by_category
        return {
            "rules": "real",
            "task": self.task,
            "settings": self.settings,
            "bytes": {
                "model": parts["model"],
                "optimizer": parts["gradient"] + parts["optimizer_state"],
                "activations": parts["input"] + parts["activation"] + parts["activation_gradient"],
                "workspace": None if self.uncalibrated else parts["workspace"],  # unknown is not zero
                "total": self.peak_bytes,
            },
            "object_bytes": self.object_bytes,
            "by_category": parts,
            "by_module": self.by_module,
            "flops": self.flops,
            "peak": {
                "bytes": self.peak_bytes,
                "phase": str(self.peak.phase),
                "module": self.peak.module,
                "operation": self.peak.operation,
            },
            "unseen": self.unseen,
        }

    def _repr_html_(self) -> str:
        """The bytes at the peak, by category, for a notebook."""
        rows = [(name.replace("_", " "), size) for name, size in self.bytes_by_category.items() if size]
        cells = "".join(
            f"<tr><td>{html.escape(name)}</td><td style='text-align:right'>{format_bytes(size)}</td>"
            f"<td><div style='background:#5b97c9;height:0.8em;width:{200 * size // max(1, self.peak_bytes)}px'>"
            "</div></td></tr>"
            for name, size in sorted(rows, key=lambda row: -row[1])
        )
        unseen = "".join(f"<div>not counted: {html.escape(words)}</div>" for words in self.unseen)
        head = html.escape(f"{self.task}: {format_bytes(self.peak_bytes)} at the peak")
        return f"<b>{head}</b><table>{cells}</table>{unseen}"

    def __str__(self) -> str:
        parts = [f"{name} {format_bytes(size)}" for name, size in self.bytes_by_category.items() if size]
        lines = [f"{self.task}: {format_bytes(self.peak_bytes)} at the peak ({', '.join(parts)})"]
        return "\n".join(lines + [f"not seen: {words}" for words in self.unseen])


def profile(
    task: Task,
    workspace: Mapping[str, int | None] | None = None,
    steps: int = 2,
    brief: bool = False,
    updates: Updates | None = None,
) -> Profile:
    """A task -> its predicted memory: `steps` whole steps (the second has the optimizer's state in place).

    Nothing is computed and nothing is allocated, so the model may be on the meta device and of any size.
    `workspace` gives the scratch bytes of operators as calibrated on a machine; without it they are unseen.
    A `brief` one has the same peak sooner: it puts optimizer state and gradients in place and runs the largest
    microbatch alone. Its FLOPs are those of what it ran. Brief ones may share `updates`.
    """
    try:
        tracer = larger_way(lambda choices: _traced(task, workspace, steps, brief, choices, updates or Updates()))
    except Unlike:
        tracer = larger_way(lambda choices: _traced(task, workspace, steps, brief, choices, Updates()))
    return _profile_of(_traced_by(task, tracer), workspace or {})


def _traced(
    task: Task,
    workspace: Mapping[str, int | None] | None,
    steps: int,
    brief: bool,
    choices: Choices,
    updates: Updates,
) -> Tracer:
    pieces = list(task.split(task.batch))
    weights = task.weights(pieces)
    tracer = Tracer(workspace, choices)
    parameters = list(task.model.named_parameters())
    with on_fakes(task, tracer, [task.batch, pieces]) as (batch, fakes), listen(tracer.enter_phase):
        for tensor in tensors([batch, fakes]):  # the batch outlives its pieces
            tracer.watch(tensor, Category.INPUT, "", "batch", Phase.BUILD)
        world = Pretended(task.devices, lambda bucket: tracer.claim(bucket, Category.GRADIENT, "", BUCKET))
        with _sharded(task, tracer, world), tracer.inside(task.model):
            stepper = Stepper(_as_traced(task, tracer), world=world)
            if brief:
                _brief_step(task, tracer, stepper, fakes, weights, updates)
            else:
                _steps(task, tracer, stepper, fakes, weights, steps)
        for path, parameter in parameters:
            if isinstance(parameter.grad, FakeTensor):
                tracer.unseen[f"{path!r} is used directly and not through the model: counted twice"] = None
    for place, why in choices.asked.items():
        if why != "a random draw":
            tracer.unseen[f"{why} is read at {short(place)}: {int(choices.answers.get(place, True))} is assumed"] = None
    return tracer


@contextmanager
def _sharded(task: Task, tracer: Tracer, world: Pretended) -> Iterator[None]:
    """The model as process 0 has it, if the task's is in shards."""
    if not task.sharded:
        yield
        return

    def resized(tensor: Tensor) -> None:
        tracer.watch(tensor, Category.MODEL, "", "gathered", tracer.phase)

    with pretended_shards(task.model, task.settings, world, resized):
        yield
    tracer.sent_bytes = round((world.size - 1) / world.size * (2 * world.sent_bytes + world.gathered_bytes))


def _as_traced(task: Task, tracer: Tracer) -> Task:
    """The task without what is done after an update, to weights that a trace does not have; its graph is counted."""

    def loss(model: torch.nn.Module, batch: Any) -> Tensor:
        found = task.loss_of(model, batch)
        nodes = nodes_of(found)
        tracer.nodes = max(tracer.nodes, len(nodes))
        tracer.leaves = max(tracer.leaves, sum(not node.next_functions for node in nodes))
        return found

    return task.with_(after_update=(), loss=loss)


def nodes_of(output: Tensor) -> set[Any]:
    """What autograd remembers for the backward pass of an output: operations, and the leaves where it ends."""
    found: set[Any] = set()
    waiting = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [follower for follower, _ in node.next_functions]
    return found


def _steps(task: Task, tracer: Tracer, stepper: Stepper, pieces: list[Any], weights: list[float], steps: int) -> None:
    """Runs `steps` whole steps under the tracer; FLOPs, and what is sent, are those of the last."""
    for _ in range(steps):
        _count_anew(tracer, stepper)
        stepper.run(pieces, weights)
        _claim_state(task, tracer, stepper)


def _brief_step(
    task: Task, tracer: Tracer, stepper: Stepper, pieces: list[Any], weights: list[float], updates: Updates
) -> None:
    """Runs the largest microbatches of a step under the tracer, as if others had run before."""
    chosen = _largest(pieces)
    if task.devices > 1 and chosen[-1] != len(pieces) - 1:
        chosen.append(len(pieces) - 1)  # in the last, gradients are on their way to the other processes
    stepper.begin(len(pieces))
    _give_gradients(task, tracer, stepper)
    shared = task.devices == 1 and not stepper.in_backward  # else it is no thing of its own
    update = Pair(updates, tracer, stepper).run if shared else stepper.update
    _update(stepper, update)
    _claim_state(task, tracer, stepper)
    if chosen[0] > 0:
        _give_gradients(task, tracer, stepper)
    _count_anew(tracer, stepper)
    _note_losses(tracer, chosen[0])
    losses = [stepper.one_pass(pieces[n], weights[n], is_last=n == chosen[-1]) for n in chosen]
    _note_losses(tracer, len(pieces) - chosen[0] - len(chosen))
    losses = stepper.finish(losses)
    _update(stepper, update)
    del losses  # a step holds them to its end


def _count_anew(tracer: Tracer, stepper: Stepper) -> None:
    tracer.flops, tracer.repeated = dict.fromkeys(Phase, 0), (0, 0)
    tracer.flops_by_width.clear()
    stepper.world.sent_bytes = stepper.world.gathered_bytes = 0


def _largest(pieces: list[Any]) -> list[int]:
    """Microbatches -> the numbers of the last with most elements and of the one with the longest rows, in order.

    If the largest is the first, which finds no gradients yet, the largest of the others is included as well.
    """
    shapes = [[t.shape for t in tensors(piece)] for piece in pieces]
    elements = [sum(map(torch.Size.numel, piece)) for piece in shapes]
    rows = [max((shape[-1] for shape in piece if len(shape) > 1), default=0) for piece in shapes]
    most = max(range(len(pieces)), key=lambda n: (elements[n], n))
    chosen = {most} if rows[most] == max(rows) else {most, rows.index(max(rows))}
    if chosen == {0} and len(pieces) > 1:
        chosen.add(max(range(1, len(pieces)), key=elements.__getitem__))
    return sorted(chosen)


def _update(stepper: Stepper, update: Callable[[], object]) -> None:
    with phase(Phase.UPDATE):
        update()
    stepper.optimizer.zero_grad(set_to_none=True)


def _note_losses(tracer: Tracer, count: int) -> None:
    tracer.ledger.birth(4 * count, Category.ACTIVATION, "", "losses of microbatches")


def _give_gradients(task: Task, tracer: Tracer, stepper: Stepper) -> None:
    """Gives each trainable parameter a gradient, as earlier microbatches would have left it: an optimizer in backward
    takes each before the next."""
    optimizer: Any = stepper.optimizer  # ours, if it is in backward
    takers = dict(optimizer.takers(task.model)) if stepper.in_backward else {}
    for path, parameter in task.model.named_parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
            tracer.values.drop(parameter.grad)  # else the update of small ones would be computed for real
            tracer.claim(parameter.grad, Category.GRADIENT, home(path))
            if parameter in takers:
                takers[parameter](parameter)


def _claim_state(task: Task, tracer: Tracer, stepper: Stepper) -> None:
    homes: dict[Tensor, str] = {parameter: home(path) for path, parameter in task.model.named_parameters()}
    for parameter, state in stepper.optimizer.state.items():
        for tensor in tensors(state):
            tracer.claim(tensor, Category.OPTIMIZER, homes.get(parameter, ""))


def _traced_by(task: Task, tracer: Tracer) -> Traced:
    forward, backward, recompute = (tracer.flops[p] for p in (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE))
    return Traced(
        task=task.name or type(task.model).__name__,
        settings=task.settings,
        ledger=tracer.ledger,
        moments=tracer.moments,
        signatures=tracer.signatures,
        flops={
            "forward": forward,
            "backward": backward,
            "recompute": recompute,
            "ratio": (forward + backward + recompute) / max(1, forward + backward),
        },
        unseen=list(tracer.unseen) + (["what is done after each update"] if task.after_update else []),
        nodes=tracer.nodes,
        leaves=tracer.leaves,
        is_recorded=task.static_graph and task.devices == 1,
        flops_by_width=dict(tracer.flops_by_width),
        draws=tracer.draws,
        sent_bytes=tracer.sent_bytes,
        repeated=tracer.repeated,
        open_outputs=tracer.open_outputs,
        branches=bool(tracer.choices.asked),
    )


def _profile_of(traced: Traced, table: Mapping[str, int | None]) -> Profile:
    scratch = [table.get(str(signature)) for signature in traced.signatures]
    ledger = with_scratch(traced.ledger, traced.moments, table)
    return Profile(
        task=traced.task,
        settings=traced.settings,
        ledger=ledger,
        peak=ledger.peak(),
        flops=traced.flops,
        unseen=traced.unseen + unmeasured(scratch),
        signatures=traced.signatures,
        uncalibrated=scratch.count(None),
        scratch_bytes=sum(size or 0 for size in scratch),
        nodes=traced.nodes,
        leaves=traced.leaves,
        is_recorded=traced.is_recorded,
        flops_by_width=traced.flops_by_width,
        draws=traced.draws,
        sent_bytes=traced.sent_bytes,
        repeated=traced.repeated,
        traced=traced,
    )
