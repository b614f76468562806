"""Hugging Face's Trainer inside a budget: `LeanTrainer(model, args, ..., budget="4GB")`, all else as with `Trainer`.

    class MyTrainer(LeanMixin, Seq2SeqTrainer): ...   # for a trainer of your own

The plan is made from the first batch, which is looked at before training begins. It decides how a batch's forward and
backward pass run, and what the optimizer keeps; the Trainer's own loop, schedule, groups, clipping, gradient
accumulation, evaluation, callbacks and checkpoints stay as they are. The page is docs/integrations/huggingface.md.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..distributed import speak_as_one
from ..errors import ShoestringError, how_to_install
from ..planning.plan import Plan
from ..randomness import unmoved
from ..records import file_bytes
from ..runs.folder import replace_file
from ..runs.state import has_extra_state
from ..task import Task
from ..techniques.microbatch import verdict
from .guest import Guest, GuestOptimizer, move_scheduler

try:
    from transformers import Trainer, TrainerCallback, TrainingArguments
except ImportError as error:
    raise ImportError(f"a LeanTrainer needs transformers and accelerate: {how_to_install('integrations')}") from error

PLAN_NAME = "shoestring_plan.json"  # in each checkpoint, so that a resumed run goes on under the same plan
logger = logging.getLogger(__name__)

# Arguments of a Trainer beside which there cannot be a plan: the reason, and what to do.
INSTEAD = {
    "gradient_checkpointing": "the plan decides what is recomputed: leave it out",
    "fp16": "the plan decides about precision: leave it out, and allow risk='neutral' (the default), or plan fp16",
    "bf16": "the plan decides about precision: leave it out, and allow risk='neutral' (the default), or plan bf16",
    "deepspeed": "DeepSpeed has an engine and an optimizer of its own: leave one of the two out",
    "fsdp": "the Trainer's FSDP shards the model that the plan works on: leave one of the two out",
    "torch_compile": "a plan works inside PyTorch's operations, which a compiled model hides: leave it out",
}


_Host: Any = object  # a Trainer, in every class that has the mixin


class LeanMixin(_Host):
    """Makes a Trainer train within `budget` (such as "4GB"); `risk` is the most that techniques may change the result.

    A `plan` is used as it is. `guest.lean` is the lean task once training has begun, and `guest.metrics()` its memory,
    which is logged beside the loss as mem/peak_bytes, mem/budget_bytes and mem/predicted_bytes.
    """

    optimizer: Any

    def __init__(
        self,
        *args: Any,
        budget: str | int | None = None,
        risk: str = "neutral",
        plan: Plan | None = None,
        **kwargs: Any,
    ) -> None:
        speak_as_one()
        if budget is None and plan is None:
            raise ShoestringError('a LeanTrainer needs budget="4GB", or a plan')
        for found in (*args, *kwargs.values()):
            if isinstance(found, TrainingArguments):
                check_arguments(found)
        self.budget, self.risk, self.plan = budget, risk, plan
        self.guest: Guest | None = None
        self._loss = TrainersLoss(self)
        self._resumed_from: Path | None = None
        super().__init__(*args, **kwargs)
        if getattr(self.model, "is_gradient_checkpointing", False):
            raise refusal("gradient_checkpointing")
        if self.args.world_size > 1 or self.args.n_gpu > 1:
            raise ShoestringError(
                f"a LeanTrainer runs in one process on one device, and there are "
                f"{max(self.args.world_size, self.args.n_gpu)}: start it without torchrun, or use shoestring.train"
            )
        self.add_callback(PlanCallback(self))

    # -- the plan -----------------------------------------------------------------------------------------------
    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer that the arguments ask for, with its groups, in the form that the plan gives it."""
        if self.guest is None or self.guest.lean.model is not self.model:
            super().create_optimizer(*args, **kwargs)
            theirs = self.optimizer
            self.guest = self._begin(theirs)
            self.optimizer = GuestOptimizer(self.guest)
            if self.lr_scheduler is not None:  # given to the constructor, and made for their optimizer
                move_scheduler(self.lr_scheduler, theirs, self.optimizer)
        return self.optimizer

    def _begin(self, optimizer: Any) -> Guest:
        plan = self.plan or self._plan_of_checkpoint()
        task = self._task(self._first_batch(), optimizer)
        steps = self.args.gradient_accumulation_steps
        # All batches of an update are held, and Accelerate's loader has the next one in hand.
        how: dict[str, Any] = {"accumulation": steps, "fetched": steps, "warn": logger.warning}
        guest = Guest(task, self.budget, risk=self.risk, plan=plan, **how)
        assert guest.lean.model is self.model, "a real model is changed in place"
        if self._resumed_from is not None and any(map(has_extra_state, self.model.modules())):
            super()._load_from_checkpoint(str(self._resumed_from))  # into sparse layers, which know their positions
        return guest

    def _task(self, batch: dict[str, Any], optimizer: Any) -> Task:
        """The Trainer's loss of a batch as a task; the loss is asked whether it is a sum or a mean over the items."""
        self._loss.num_items = as_number(self._get_num_items_in_batch([batch], self.args.device))
        clip = self.args.max_grad_norm or None
        task = Task(self.model, self._loss, batch, optimizer, clip=clip, name=type(self.model).__name__)
        if self._loss.num_items is None:
            return task
        summed = task.with_(reduction="sum")  # over the items, divided by their number in all batches of the update
        return task if verdict(summed).adds_up is False else summed.with_(microbatches=verdict(summed).adds_up)

    def _first_batch(self) -> dict[str, Any]:
        with unmoved():
            loader = self.get_train_dataloader()
            batch = next(iter(loader), None)
            getattr(loader, "end", lambda: None)()  # Accelerate's: it is not the loader of the loop
        if not isinstance(batch, Mapping):
            found = "no batch" if batch is None else f"a batch that is a {type(batch).__name__}"
            raise ShoestringError(
                f"the training data gives {found}: a Trainer's batches are dicts of the model's inputs"
            )
        return dict(self._prepare_inputs(batch))

    # -- a step -------------------------------------------------------------------------------------------------
    def training_step(self, model: nn.Module, inputs: Mapping[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward of a batch, in the way of the plan."""
        assert self.guest is not None, "the optimizer was made before"
        model.train()
        self._loss.num_items = as_number(args[0] if args else kwargs.get("num_items_in_batch"))
        return self.guest.backward(dict(self._prepare_inputs(inputs)), self._weight())

    def _weight(self) -> float:
        """1 where the loss is divided by the items of all batches of an update already, as in Trainer.training_step."""
        said = getattr(self, "loss_is_scaled_for_ga", None)
        accepts = self.model_accepts_loss_kwargs and self._loss.num_items is not None
        if said or (said is None and (accepts or self.compute_loss_func is not None)):
            return 1.0
        return 1 / getattr(self, "current_gradient_accumulation_steps", self.args.gradient_accumulation_steps)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return self._norm_of_gradients()

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self._norm_of_gradients() if grad_norm is None else grad_norm

    def _norm_of_gradients(self) -> float | None:
        """The norm that is logged; the update clips, because the task does. None where gradients were used up."""
        assert self.guest is not None
        stepper = self.guest.lean.stepper
        return None if stepper.in_backward else stepper.clip(float("inf"))

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the Trainer logs; beside a training loss, the memory of a step."""
        if self.guest is not None and "loss" in logs:
            logs |= self.guest.metrics()
        super().log(logs, *args, **kwargs)

    # -- checkpoints --------------------------------------------------------------------------------------------
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._resumed_from = Path(resume_from_checkpoint)
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _plan_of_checkpoint(self) -> Plan | None:
        path = self._resumed_from / PLAN_NAME if self._resumed_from is not None else None
        if path is None:
            return None
        if not path.exists():
            logger.warning(f"{path.parent} was not written by a LeanTrainer: the rest of the run is planned anew")
            return None
        try:
            return Plan.from_json(file_bytes(path).decode())
        except (OSError, ValueError, ShoestringError) as error:
            raise ShoestringError(f"{path}: {error}") from error


class LeanTrainer(LeanMixin, Trainer):
    """`transformers.Trainer` within a budget: `LeanTrainer(model, args, ..., budget="4GB")`."""


class PlanCallback(TrainerCallback):
    """Says the plan when training begins, and puts it into each checkpoint."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logger.info(self.trainer.guest.describe())

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if folder.is_dir():
            replace_file(folder / PLAN_NAME, self.trainer.guest.lean.plan.to_json())


class TrainersLoss:
    """`trainer.compute_loss` as a task's loss; `num_items` is that of all batches of an update, if it is known."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.num_items: int | None = None

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        # a copy, because compute_loss may take the labels out of it
        return self.trainer.compute_loss(model, dict(batch), num_items_in_batch=self.num_items)


def as_number(count: Any) -> int | None:
    """Items as the Trainer counts them, often in a tensor -> a number, which fits a trace too."""
    return None if count is None else int(count)


def check_arguments(args: TrainingArguments) -> None:
    """Refuses arguments beside which there cannot be a plan."""
    for name in INSTEAD:
        if getattr(args, name, None):
            raise refusal(name)


def refusal(name: str) -> ShoestringError:
    return ShoestringError(f"{name} and a LeanTrainer cannot be used together, because {INSTEAD[name]}")
