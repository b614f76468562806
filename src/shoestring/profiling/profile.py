"""`profile(task) -> Profile`: two whole training steps traced, their peak attributed to the last byte."""

import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..distributed import Pretended
from ..ledger import BUCKET, Category, Ledger, Peak, Phase, sum_bytes
from ..phases import listen, phase
from ..signature import Bound, Signature
from ..step import Stepper
from ..structure import tensors
from ..task import Task
from ..units import format_bytes
from .choices import Choices, short
from .dry import larger_way, on_fakes
from .trace import Tracer, home


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

    @property
    def peak_bytes(self) -> int:
        return self.peak.bytes

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
    task: Task, workspace: Mapping[str, int | None] | None = None, steps: int = 2, brief: bool = False
) -> Profile:
    """A task -> its predicted memory: `steps` whole steps (the second has the optimizer's state in place).

    Nothing is computed and nothing is allocated, so the model may be on the meta device and of any size.
    `workspace` gives the scratch bytes of operators as calibrated on a machine; without it they are unseen.
    A `brief` one has the same peak sooner: it puts optimizer state and gradients in place and runs the largest
    microbatch alone. Its FLOPs are those of what it ran.
    """
    tracer = larger_way(lambda choices: _traced(task, workspace, steps, brief, choices))
    return _summarise(task, tracer)


def _traced(
    task: Task, workspace: Mapping[str, int | None] | None, steps: int, brief: bool, choices: Choices
) -> Tracer:
    pieces = list(task.split(task.batch))
    weights = task.weights(pieces)
    tracer = Tracer(workspace, choices)
    parameters = list(task.model.named_parameters())
    with on_fakes(task, tracer, [task.batch, pieces]) as (batch, fakes), listen(tracer.enter_phase):
        for tensor in tensors([batch, fakes]):  # the batch outlives its pieces
            tracer.watch(tensor, Category.INPUT, "", "batch", Phase.BUILD)
        with tracer.inside(task.model):
            if brief:
                _brief_step(task, tracer, fakes, weights)
            else:
                _steps(task, tracer, fakes, weights, steps)
        for path, parameter in parameters:
            if isinstance(parameter.grad, FakeTensor):
                tracer.unseen[f"{path!r} is used directly and not through the model: counted twice"] = None
    for place, why in choices.asked.items():
        if why != "a random draw":
            tracer.unseen[f"{why} is read at {short(place)}: {int(choices.answers.get(place, True))} is assumed"] = None
    return tracer


def _as_traced(task: Task, tracer: Tracer) -> Task:
    """The task without what is done after an update, to weights that a trace does not have; its graph is counted."""

    def loss(model: torch.nn.Module, batch: Any) -> Tensor:
        found = task.loss_of(model, batch)
        tracer.nodes = max(tracer.nodes, count_nodes(found))
        return found

    return task.with_(after_update=(), loss=loss)


def count_nodes(loss: Tensor) -> int:
    """How many operations autograd remembers for the backward pass of a loss, its leaves included."""
    found, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [follower for follower, _ in node.next_functions]
    return len(found)


def _stepper(task: Task, tracer: Tracer) -> Stepper:
    """The stepper of a trace; if several processes share the batch, of one of them, with its buckets."""
    world = Pretended(task.devices, lambda bucket: tracer.claim(bucket, Category.GRADIENT, "", BUCKET))
    return Stepper(_as_traced(task, tracer), world=world)


def _steps(task: Task, tracer: Tracer, pieces: list[Any], weights: list[float], steps: int) -> None:
    """Runs `steps` whole steps under the tracer; FLOPs are those of the last."""
    stepper = _stepper(task, tracer)
    for _ in range(steps):
        tracer.flops = dict.fromkeys(Phase, 0)
        stepper.run(pieces, weights)
        _claim_state(task, tracer, stepper)


def _brief_step(task: Task, tracer: Tracer, pieces: list[Any], weights: list[float]) -> None:
    """Runs the largest microbatches of a step under the tracer, as if others had run before."""
    stepper = _stepper(task, tracer)
    chosen = _largest(pieces)
    if task.devices > 1 and chosen[-1] != len(pieces) - 1:
        chosen.append(len(pieces) - 1)  # in the last, gradients are on their way to the other processes
    stepper.begin(len(pieces))
    if stepper.in_backward:
        stepper.one_pass(pieces[chosen[0]], weights[chosen[0]])
    else:
        _give_gradients(task, tracer)
    _update(stepper)
    _claim_state(task, tracer, stepper)
    if chosen[0] > 0 and not stepper.in_backward:
        _give_gradients(task, tracer)
    tracer.flops = dict.fromkeys(Phase, 0)
    _note_losses(tracer, chosen[0])
    losses = [stepper.one_pass(pieces[n], weights[n], is_last=n == chosen[-1]) for n in chosen]
    _note_losses(tracer, len(pieces) - chosen[0] - len(chosen))
    losses = stepper.finish(losses)
    _update(stepper)
    del losses  # a step holds them to its end


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


def _update(stepper: Stepper) -> None:
    with phase(Phase.UPDATE):
        stepper.update()
    stepper.optimizer.zero_grad(set_to_none=True)


def _note_losses(tracer: Tracer, count: int) -> None:
    tracer.ledger.birth(4 * count, Category.ACTIVATION, "", "losses of microbatches")


def _give_gradients(task: Task, tracer: Tracer) -> None:
    """Gives each trainable parameter a gradient, as earlier microbatches would have left it."""
    for path, parameter in task.model.named_parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
            tracer.claim(parameter.grad, Category.GRADIENT, home(path))


def _claim_state(task: Task, tracer: Tracer, stepper: Stepper) -> None:
    homes: dict[Tensor, str] = {parameter: home(path) for path, parameter in task.model.named_parameters()}
    for parameter, state in stepper.optimizer.state.items():
        for tensor in tensors(state):
            tracer.claim(tensor, Category.OPTIMIZER, homes.get(parameter, ""))


def _summarise(task: Task, tracer: Tracer) -> Profile:
    forward, backward, recompute = (tracer.flops[p] for p in (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE))
    unseen = list(tracer.unseen) + (["what is done after each update"] if task.after_update else [])
    scratch = [tracer.workspace.get(str(signature)) for signature in tracer.signatures]
    uncalibrated = scratch.count(None)
    unseen += _unmeasured(uncalibrated, [size for size in scratch if isinstance(size, Bound)])
    return Profile(
        task=task.name or type(task.model).__name__,
        settings=task.settings,
        ledger=tracer.ledger,
        peak=tracer.ledger.peak(),
        flops={
            "forward": forward,
            "backward": backward,
            "recompute": recompute,
            "ratio": (forward + backward + recompute) / max(1, forward + backward),
        },
        unseen=unseen,
        signatures=tracer.signatures,
        uncalibrated=uncalibrated,
        scratch_bytes=sum(size or 0 for size in scratch),
        nodes=tracer.nodes,
    )


def _unmeasured(uncalibrated: int, bounds: list[Bound]) -> list[str]:
    """What is not known of the scratch inside PyTorch's operators: not counted, or counted by a bound."""
    words = []
    if uncalibrated:
        words.append(f"the scratch inside {uncalibrated} distinct operator calls: not calibrated, not counted")
    if any(bounds):
        words.append(
            f"the scratch inside {len(bounds)} distinct operator calls, which could not be made here: "
            f"bounds of up to {format_bytes(max(bounds))} are counted in its place"
        )
    return words
