"""Lightning inside a budget: `Trainer(callbacks=[Shoestring(budget="4GB")])`, all else as it is.

The plan is made from the first training batch, when the module has configured its optimizer. From then on a training
step runs forward and backward in the way of the plan; Lightning's loop, schedulers, gradient accumulation, clipping,
validation, loggers and checkpoints stay as they are. The page is docs/integrations/lightning.md.
"""

import inspect
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed import speak_as_one
from ..errors import ShoestringError, how_to_install
from ..items import counted
from ..planning.plan import Plan
from ..randomness import unmoved
from ..runs.state import has_extra_state
from ..task import Task
from .guest import Guest, GuestOptimizer, move_scheduler

try:
    import lightning.pytorch as pl
    from lightning.pytorch.core.optimizer import _configure_optimizers
    from lightning.pytorch.strategies import SingleDeviceStrategy
except ImportError as error:
    raise ImportError(f"this callback needs lightning: {how_to_install('integrations')}") from error

logger = logging.getLogger(__name__)


class Shoestring(pl.Callback):
    """Trains a module within `budget` (such as "4GB"); `risk` is the most that techniques may change the result.

    A `plan` is used as it is. Beside the module's own metrics, mem/peak_bytes, mem/budget_bytes and mem/predicted_bytes
    are logged. The module needs automatic optimization with one optimizer.
    """

    def __init__(self, budget: str | int | None = None, risk: str = "neutral", plan: Plan | None = None) -> None:
        speak_as_one()
        if budget is None and plan is None:
            raise ShoestringError('Shoestring needs budget="4GB", or a plan')
        self.budget, self.risk, self.plan = budget, risk, plan
        self.guest: Guest | None = None
        self._saved_weights: dict[str, Tensor] | None = None
        self._patched: list[str] = []

    # -- Lightning's hooks --------------------------------------------------------------------------------------
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        check(trainer, pl_module)
        theirs = pl_module.configure_optimizers
        self._patch(pl_module, configure_optimizers=lambda: self._configure(trainer, pl_module, theirs()))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        assert self.guest is not None
        for name, number in self.guest.metrics().items():
            pl_module.log(name, torch.tensor(number, dtype=torch.float64), batch_size=1)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for name in self._patched:
            vars(pl_module).pop(name, None)
        self._patched.clear()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    def state_dict(self) -> dict[str, Any]:
        return {} if self.guest is None else {"plan": self.guest.lean.plan.to_json()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """A run goes on under the plan that it was saved with, unless it is given another."""
        if self.plan is None and "plan" in state_dict:
            self.plan = Plan.from_json(state_dict["plan"])

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        self._saved_weights = checkpoint["state_dict"]  # until the module has the layers that they are for

    # -- the plan -----------------------------------------------------------------------------------------------
    def _configure(self, trainer: pl.Trainer, module: pl.LightningModule, returned: Any) -> Any:
        """What configure_optimizers returned -> the same with the plan's optimizer, for a module under that plan."""
        optimizers, schedulers, monitor = _configure_optimizers(returned) if returned is not None else ([], [], None)
        if len(optimizers) != 1:
            raise ShoestringError(f"configure_optimizers gives {len(optimizers)} optimizers: a plan is made for one")
        loss = ModulesLoss(module)
        task = Task(module, loss, first_batch(trainer, module), optimizers[0], clip=clip_of(trainer, module))
        with patched(module, log=lambda *args, **kwargs: None):
            steps = trainer.accumulate_grad_batches
            # Lightning fetches the next batch before it runs this one.
            how: dict[str, Any] = {"accumulation": steps, "fetched": 1, "warn": logger.warning}
            self.guest = Guest(task, self.budget, risk=self.risk, plan=self.plan, **how)
        self._restore_layers(module)
        logger.info(self.guest.describe())
        ours = GuestOptimizer(self.guest)
        for scheduler in schedulers:
            found = scheduler["scheduler"] if isinstance(scheduler, dict) else scheduler
            move_scheduler(found, optimizers[0], ours)
        self._patch(
            module,
            training_step=self._training_step(trainer, module, loss),
            backward=lambda loss, *args, **kwargs: None,  # training_step has done it
            optimizer_zero_grad=lambda *args, **kwargs: None,  # an update leaves no gradient behind
        )
        if clips_by_norm(trainer, module):
            self._patch(module, configure_gradient_clipping=lambda *args, **kwargs: None)  # the update clips
        named = {"lr_scheduler": schedulers[0]} if len(schedulers) == 1 else {}
        if monitor is not None and named:
            return {"optimizer": ours, **named, "monitor": monitor}
        return [ours], schedulers

    def _restore_layers(self, module: pl.LightningModule) -> None:
        weights, self._saved_weights = self._saved_weights, None
        if weights is not None and any(map(has_extra_state, module.modules())):
            module.load_state_dict(weights)  # into sparse layers, which know their positions

    def _training_step(self, trainer: pl.Trainer, module: pl.LightningModule, loss: "ModulesLoss") -> Callable:
        def training_step(batch: Any, *rest: Any) -> Tensor:
            assert self.guest is not None
            weight = 1 / trainer.accumulate_grad_batches
            with loss.logged_as_one(rest):
                return self.guest.backward(batch, weight) / weight

        return training_step

    def _patch(self, module: pl.LightningModule, **methods: Callable) -> None:
        for name, method in methods.items():
            vars(module)[name] = method
            self._patched.append(name)


class ModulesLoss:
    """A module's training_step as a task's loss. What it logs in each microbatch is logged once, as the mean over the
    examples, so that metrics do not depend on the plan."""

    def __init__(self, module: pl.LightningModule) -> None:
        names = list(inspect.signature(type(module).training_step).parameters)
        if "dataloader_iter" in names:
            raise ShoestringError("training_step(dataloader_iter) fetches batches itself: take a batch instead")
        self._taken = len(names) - 2  # besides the module and the batch: the batch's number, if that
        self.rest: tuple = (0,) * self._taken
        self._logged: dict[str, tuple[list[tuple[int, Any]], tuple, dict]] = {}
        self._examples, self.module = 1, module

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        self._examples = counted(batch)[1]
        kind: Any = type(model)  # whose method is the user's: the module's own is patched
        return kind.training_step(model, batch, *self.rest)

    @contextmanager
    def logged_as_one(self, rest: tuple) -> Iterator[None]:
        self.rest, self._logged = rest[: self._taken], {}
        module = self.module
        with patched(module, log=self._note):
            yield
        for name, (values, args, kwargs) in self._logged.items():
            module.log(name, mean(values), *args, **kwargs)

    def _note(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        value = value.detach() if isinstance(value, Tensor) else value
        self._logged.setdefault(name, ([], args, kwargs))[0].append((self._examples, value))


def mean(values: list[tuple[int, Any]]) -> Any:
    """Numbers with weights -> their mean; one alone, or what is no number (a metric object), as it is."""
    if len(values) == 1 or not all(isinstance(value, Tensor | int | float) for _, value in values):
        return values[-1][1]
    return sum(weight * value for weight, value in values) / sum(weight for weight, _ in values)


@contextmanager
def patched(module: pl.LightningModule, **methods: Callable) -> Iterator[None]:
    vars(module).update(methods)
    try:
        yield
    finally:
        for name in methods:
            del vars(module)[name]


def first_batch(trainer: pl.Trainer, module: pl.LightningModule) -> Any:
    """The first training batch, as training_step will get it; no generator is moved by looking at it."""
    with unmoved():
        batch = next(iter(trainer.fit_loop._data_source.dataloader()), None)
    if batch is None:
        raise ShoestringError("the training data gives no batch to plan from")
    return module._apply_batch_transfer_handler(batch, trainer.strategy.root_device, 0)


def clips_by_norm(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    by_norm = trainer.gradient_clip_algorithm in (None, "norm")
    own = type(module).configure_gradient_clipping is not pl.LightningModule.configure_gradient_clipping
    return by_norm and not own


def clip_of(trainer: pl.Trainer, module: pl.LightningModule) -> float | None:
    """The norm that the update clips to; infinity where gradients are needed and the module clips by itself."""
    if not clips_by_norm(trainer, module):
        return math.inf
    return float(trainer.gradient_clip_val) if trainer.gradient_clip_val else None


def check(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Refuses a trainer or module beside which there cannot be a plan, in one line."""
    problem = ""
    if not module.automatic_optimization:
        problem = "it needs automatic optimization: use lean.backward(batch) in a loop of your own otherwise"
    elif type(trainer.strategy) is not SingleDeviceStrategy:
        problem = f"it runs on one device, not by {type(trainer.strategy).__name__}: pass Trainer(devices=1)"
    elif trainer.precision != "32-true":
        problem = f"the plan decides about precision, not Trainer(precision={trainer.precision!r}): leave it out"
    elif any(getattr(part, "is_gradient_checkpointing", False) for part in module.modules()):
        problem = "the plan decides what is recomputed: leave out gradient_checkpointing_enable()"
    if problem:
        raise ShoestringError(f"Shoestring cannot train this, because {problem}")
