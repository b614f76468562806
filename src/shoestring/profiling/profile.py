"""`profile(task) -> Profile`: two whole training steps traced, their peak attributed to the last byte."""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from ..errors import ShoestringError
from ..ledger import Category, Ledger, Peak, Phase, sum_bytes
from ..phases import listen, phase
from ..signature import Bound, Signature
from ..structure import tensors
from ..task import Task
from ..training.step import Stepper
from ..units import format_bytes
from .choices import Choices, short
from .fakes import Faker, faked
from .trace import Tracer, home

WAYS = 8  # that are tried, at most, where a step goes by what nobody can know


@dataclass(frozen=True)
class Profile:
    """What a task's training step would need; `ledger` holds every storage behind the figures."""

    task: str
    settings: dict[str, Any]
    ledger: Ledger = field(repr=False)
    peak: Peak
    flops: dict[str, float]
    unseen: list[str]
    signatures: list[Signature] = field(repr=False)
    uncalibrated: int = 0  # distinct operator calls whose scratch is not known, and not counted

    @property
    def peak_bytes(self) -> int:
        return self.peak.bytes

    @property
    def tensor_peak_bytes(self) -> int:
        """The peak of what operators return, without what they need inside themselves."""
        return self.ledger.only(*(set(Category) - {Category.WORKSPACE})).peak().bytes

    @property
    def workspace_peak_bytes(self) -> int:
        """The most that any one operator needs inside itself."""
        return self.ledger.only(Category.WORKSPACE).peak().bytes

    @property
    def bytes_by_category(self) -> dict[str, int]:
        """Bytes alive at the peak, for every category (0 where there are none)."""
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
                "workspace": None if self.uncalibrated else parts["workspace"],  # unknown is not nothing
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
    tracer = _larger_way(lambda choices: _traced(task, workspace, steps, brief, choices))
    return _summarise(task, tracer)


def _larger_way(trace: Callable[[Choices], Tracer]) -> Tracer:
    """Traces a task both ways at each place that goes by what nobody can know -> the trace that needs more memory."""
    tracer, tried = _first_way(trace), 0
    told: dict[str, None] = {}
    todo = list(tracer.choices.asked)
    while todo and tried < WAYS:
        place, tried = todo.pop(0), tried + 1
        try:
            other = trace(tracer.choices.flipped(place))
        except Exception:  # a way that cannot be gone
            continue
        peaks = tracer.ledger.peak().bytes, other.ledger.peak().bytes
        todo += [new for new in other.choices.asked if new not in tracer.choices.asked and new not in todo]
        why = tracer.choices.asked[place]
        tracer = other if peaks[1] > peaks[0] else tracer
        if peaks[0] != peaks[1]:
            told[f"{why} at {short(place)}: the way that needs more memory is counted"] = None
    tracer.unseen |= told
    return tracer


def _first_way(trace: Callable[[Choices], Tracer]) -> Tracer:
    """A way that can be gone: where one ends in an error, the last place before it may go the other way."""
    choices = Choices()
    for _ in range(WAYS):
        try:
            return trace(choices)
        except Exception:
            turns = [place for place in choices.asked if place not in choices.answers]
            if not turns:
                raise
            choices = choices.flipped(turns[-1])
    return trace(choices)


def _traced(
    task: Task, workspace: Mapping[str, int | None] | None, steps: int, brief: bool, choices: Choices
) -> Tracer:
    pieces = list(task.split(task.batch))
    weights = task.weights(pieces)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    faker = Faker(mode, _device(task))
    batch, fakes = faker.tree(task.batch), faker.tree(pieces)  # the batch outlives its pieces
    tracer = Tracer(workspace, choices)
    parameters = list(task.model.named_parameters())
    with _told_clearly(task), torch.random.fork_rng(devices=[]), faked(task.model, faker):
        learned = {parameter.untyped_storage()._cdata for _, parameter in task.model.named_parameters()}
        for real, fake in faker.pairs():
            if fake.untyped_storage()._cdata not in learned:
                tracer.values.lend(fake, real)
        faker.forget()
        with mode, listen(tracer.enter_phase), choices.drawing(), _as_in_a_run():
            for tensor in tensors([batch, fakes]):
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


@contextmanager
def _as_in_a_run() -> Iterator[None]:
    """Transformers asks whether a tensor is fake, and goes another way for an export's sake: it is told no."""
    library: Any = sys.modules.get("transformers.utils.import_utils")
    asks = getattr(library, "is_fake_tensor", None)
    if asks is not None:
        library.is_fake_tensor = lambda x: False
    try:
        yield
    finally:
        if asks is not None:
            library.is_fake_tensor = asks


def _steps(task: Task, tracer: Tracer, pieces: list[Any], weights: list[float], steps: int) -> None:
    """Runs `steps` whole steps under the tracer; FLOPs are those of the last."""
    stepper = Stepper(task.with_(after_update=()))  # they change weights that a trace does not have
    for _ in range(steps):
        tracer.flops = dict.fromkeys(Phase, 0)
        stepper.run(pieces, weights)
        _claim_state(task, tracer, stepper)


def _brief_step(task: Task, tracer: Tracer, pieces: list[Any], weights: list[float]) -> None:
    """Runs the largest microbatches of a step under the tracer, as if others had been before."""
    stepper = Stepper(task.with_(after_update=()))
    uses_up = bool(getattr(stepper.optimizer, "contexts", ()))  # gradients, as they are made
    chosen = _largest(pieces)
    stepper.begin(len(pieces))
    if uses_up:
        stepper.one_pass(pieces[chosen[0]], weights[chosen[0]])
    else:
        _give_gradients(task, tracer)
    _update(stepper)
    _claim_state(task, tracer, stepper)
    if chosen[0] > 0 and not uses_up:
        _give_gradients(task, tracer)
    tracer.flops = dict.fromkeys(Phase, 0)
    _note_losses(tracer, chosen[0])
    losses = [stepper.one_pass(pieces[number], weights[number]) for number in chosen]
    _note_losses(tracer, len(pieces) - chosen[0] - len(chosen))
    _update(stepper)
    del losses  # a step holds them to its end


def _largest(pieces: list[Any]) -> list[int]:
    """Microbatches -> the numbers of the last with most elements and of the one with the longest rows, in order.

    Where the largest is the first, which finds no gradients yet, the largest of the others is there as well.
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
    """Each trainable parameter has a gradient, as microbatches before would have left it."""
    for path, parameter in task.model.named_parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
            tracer.claim(parameter.grad, Category.GRADIENT, home(path))


def _claim_state(task: Task, tracer: Tracer, stepper: Stepper) -> None:
    homes: dict[Tensor, str] = {parameter: home(path) for path, parameter in task.model.named_parameters()}
    for parameter, state in stepper.optimizer.state.items():
        for tensor in tensors(state):
            tracer.claim(tensor, Category.OPTIMIZER, homes.get(parameter, ""))


@contextmanager
def _told_clearly(task: Task) -> Iterator[None]:
    """What cannot be traced is refused with the reason and a way out; other errors are the user's own."""
    name = task.name or type(task.model).__name__
    log = logging.getLogger("torch._subclasses.fake_tensor")  # writes a traceback of what is raised anyway
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    except DataDependentOutputException as error:
        reason = f"{error.func} reads values of the data; move it into the data preparation"
    except DynamicOutputShapeException as error:
        reason = f"the size of what {error.func} makes depends on the data; move it into the data preparation"
    except UnsupportedOperatorException as error:
        reason = f"{error.func} has no fake implementation; register one with torch.library.register_fake"
    except RuntimeError as error:
        reason = next((words for sign, words in _UNTRACEABLE.items() if sign in str(error)), "")
        if not reason:
            raise
    else:
        return
    finally:
        log.disabled = was_disabled
    raise ShoestringError(f"{name} cannot be traced: {reason}")


_UNTRACEABLE = {
    "no fake impl registered": "a custom operator has no fake; register one with its register_fake",
    ".numpy() is not supported": "a tensor is read with .numpy(); move it into the data preparation",
}


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


def _device(task: Task) -> torch.device:
    """The device that the step would run on; meta stands for wherever the batch is."""
    homes = {t.device for t in task.model.parameters()} | {t.device for t in task.model.buffers()}
    homes |= {tensor.device for tensor in tensors(task.batch)}
    homes = {home for home in homes if home.type != "meta"}
    if len(homes) > 1:
        names = ", ".join(sorted(map(str, homes)))
        raise ShoestringError(f"the model and the batch are on different devices ({names}): move them to one")
    return homes.pop() if homes else torch.device("cpu")
