"""`profile(task) -> Profile`: two whole training steps traced, their peak attributed to the last byte."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils import _pytree as pytree

from ..errors import ShoestringError
from ..ledger import Category, Ledger, Peak, Phase, sum_bytes
from ..phases import listen
from ..signature import Signature
from ..task import Task
from ..training.step import Stepper
from ..units import format_bytes
from .fakes import Faker, faked
from .trace import Tracer


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

    @property
    def peak_bytes(self) -> int:
        return self.peak.bytes

    @property
    def bytes_by_category(self) -> dict[str, int]:
        """Bytes alive at the peak, for every category (0 where there are none)."""
        return dict.fromkeys(map(str, Category), 0) | self.ledger.bytes_by(lambda e: str(e.category), self.peak.time)

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
                "workspace": parts["workspace"],
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
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.bytes_by_category.items() if size)
        return f"{self.task}: {format_bytes(self.peak_bytes)} at the peak ({parts})"


def profile(task: Task, workspace: dict[str, int | None] | None = None, steps: int = 2) -> Profile:
    """A task -> its predicted memory: `steps` whole steps (the second has the optimizer's state in place).

    Nothing is computed and nothing is allocated, so the model may be on the meta device and of any size.
    `workspace` gives the scratch bytes of operators as calibrated on this machine; without it they are unseen.
    """
    pieces = list(task.split(task.batch))
    counts = [task.count(piece) for piece in pieces]
    device = _device(task)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    faker = Faker(mode, device)
    tracer = Tracer(workspace)
    batch = [faker.tree(piece) for piece in pieces]
    try:
        with faked(task.model, faker), mode, tracer.inside(task.model), listen(tracer.enter_phase):
            for tensor in pytree.tree_leaves(batch):
                if isinstance(tensor, Tensor):
                    tracer.watch(tensor, Category.INPUT, "", "batch", Phase.BUILD)
            stepper = Stepper(task.with_(after_update=()))  # they change weights that a trace does not have
            for _ in range(steps):
                tracer.flops = dict.fromkeys(Phase, 0)
                stepper.run(batch, counts)
            del stepper
    except DynamicOutputShapeException as error:
        raise ShoestringError(
            f"{task.name or 'the task'} cannot be traced: the size of what {error.func} makes depends on the data; "
            "move it into the data preparation"
        ) from error
    except UnsupportedOperatorException as error:
        raise ShoestringError(
            f"{task.name or 'the task'} cannot be traced: {error.func} has no fake implementation; "
            "register one with torch.library.register_fake"
        ) from error
    return _summarise(task, tracer)


def _summarise(task: Task, tracer: Tracer) -> Profile:
    forward, backward, recompute = (tracer.flops[p] for p in (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE))
    unseen = list(tracer.unseen)
    if missing := sum(tracer.workspace.get(str(signature)) is None for signature in tracer.signatures):
        unseen.append(f"the scratch that {missing} distinct operator calls allocate inside PyTorch: not calibrated")
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
        signatures=list(tracer.signatures),
    )


def _device(task: Task) -> torch.device:
    """The device that the step would run on; meta stands for wherever the batch is."""
    homes = {t.device for t in task.model.parameters()} | {t.device for t in task.model.buffers()}
    homes |= {leaf.device for leaf in pytree.tree_leaves(task.batch) if isinstance(leaf, Tensor)}
    homes = {home for home in homes if home.type != "meta"}
    if len(homes) > 1:
        names = ", ".join(sorted(map(str, homes)))
        raise ShoestringError(f"the model and the batch are on different devices ({names}): move them to one")
    return homes.pop() if homes else torch.device("cpu")
