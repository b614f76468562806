"""A job is a task on real data; `build(plan)` makes a session of it: the lean task, its batches and its evaluation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from ..data import Augment, ImageBatches, Images, Pairs, TokenBatches, on_images, token_batches
from ..distributed import joined
from ..errors import ShoestringError
from ..models import materialise
from ..models.tuned import learning_rate_multiplier
from ..planning.plan import Plan
from ..task import Loss, Task
from ..techniques.words import in_words
from .apply import LeanTask, apply, lean_task
from .evaluate import Data, Evaluation, accuracy, evaluating, mean_loss, within
from .resumable import as_data
from .translate import bleu, translate


class Session(NamedTuple):
    """Everything that training needs; `schedule` is the task's usual one."""

    lean: LeanTask
    data: Data
    evaluation: Evaluation | None
    schedule: str


class Job(Protocol):
    """A task and its data. `settings` identify the data: a run is only resumed with the same ones."""

    @property
    def task(self) -> Task: ...

    @property
    def settings(self) -> dict[str, Any]: ...

    @property
    def options(self) -> Mapping[str, Any]:
        """What the built-in model was made with, so that it can be built again without the data."""
        ...

    def plan_in_tokens(self, plan: Plan) -> Plan:
        """A plan made for `task` -> the plan for `build`: where batches are counted in tokens, so are microbatches."""
        ...

    def build(self, plan: Plan) -> Session:
        """Applies the plan to the task, gives a model on the meta device its weights, and opens the data."""
        ...


@dataclass(frozen=True)
class CrossEntropy:
    """The loss of classifiers: mean cross entropy with labels smoothed by `label_smoothing`."""

    label_smoothing: float = 0.0

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels, label_smoothing=self.label_smoothing)


Multiplier = Callable[[Plan], float]  # of the learning rate, under a plan


def untuned(plan: Plan) -> float:
    return 1.0


def tuned(model: str) -> Multiplier:
    """The name of a built-in network -> the multiplier that the paper found best for it at a plan's sparsity."""

    def multiplier(plan: Plan) -> float:
        value = plan.nonzero
        nonzero = value.get("nonzero", 100) if isinstance(value, Mapping) else value
        return learning_rate_multiplier(model, 100 if nonzero is None else nonzero)

    return multiplier


def scaled(task: Task, factor: float) -> Task:
    """The task with its learning rate times `factor`."""
    optimizer: Any = task.optimizer
    return task if factor == 1 else task.with_(optimizer=replace(optimizer, lr=factor * optimizer.lr))


@dataclass(frozen=True)
class ImageJob:
    """Image classification; images become floats one microbatch at a time."""

    task: Task
    images: Images
    size: int
    seed: int
    augment: Augment
    schedule: str
    multiplier: Multiplier = untuned
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        counts = f"{len(self.images.train)} images to train and {len(self.images.test)} to test"
        return {"data": f"{counts}, {len(self.images.classes)} classes", "batch": self.size}

    def plan_in_tokens(self, plan: Plan) -> Plan:
        return plan  # counted in images

    def build(self, plan: Plan) -> Session:
        lean = apply(scaled(self.task, self.multiplier(plan)), plan)
        materialise(lean.model, seed=self.seed)  # a model on the meta device is built straight into its lean form
        data = ImageBatches(self.images.train, self.size, self.augment, self.seed)
        test = ImageBatches(self.images.test, min(self.size, len(self.images.test)), self.augment)
        return Session(lean, data, accuracy(lean.task, test, self.augment), self.schedule)


def image_job(
    task: Task, images: Images, seed: int, loss: Loss | None = None, schedule: str = "constant", shrink: int = 1
) -> ImageJob:
    """A task on (float images, labels) and a data set -> the same task on that data; `loss` replaces the task's.

    `shrink` averages squares of `shrink` x `shrink` pixels into one, so the model takes images that much smaller.
    """
    _check_images(task, images, shrink)
    augment = Augment(images.mean, images.std, shrink=shrink)
    size = task.batch[0].shape[0]
    batch = ImageBatches(images.train, size, augment, seed).read(0, 0)
    task = task.with_(loss=on_images(loss or task.loss, augment), batch=batch, microbatches=task.microbatches)
    return ImageJob(task, images, size, seed, augment, schedule)


def takes_images(task: Task) -> bool:
    """Whether a task's batch is float images (n, channels, height, width) and their labels (n)."""
    match task.batch:
        case (Tensor() as images, Tensor() as labels):
            return images.is_floating_point() and (images.dim(), labels.dim()) == (4, 1)
    return False


def _check_images(task: Task, images: Images, shrink: int = 1) -> None:
    """Refuses images whose shape is not the task's, and more classes than the model has scores for."""
    channels, height, width = task.batch[0].shape[1:]
    wanted = channels, height * shrink, width * shrink
    if wanted != images.shape:
        raise ShoestringError(
            f"the data has images of {images.shape} (channels, height, width) and the model takes {wanted}: "
            "choose data, or a model, of the same shape"
        )
    parameter = next(task.model.parameters())
    with evaluating(task.model):
        scores = task.model(task.batch[0][:1].to(parameter.device))  # on the meta device: shapes only
    if scores.shape[-1] < len(images.classes):
        raise ShoestringError(
            f"the data has {len(images.classes)} classes and the model scores {scores.shape[-1]}: give it more"
        )


@dataclass(frozen=True)
class PairJob:
    """Translation in batches of `tokens`; a plan's microbatch counts tokens too, and no sentence is split."""

    task: Task
    pairs: Pairs
    tokens: int
    seed: int
    longest: int
    quality: str = "loss"  # or bleu
    multiplier: Multiplier = untuned
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        counts = f"{len(self.pairs.train)} pairs to train and {len(self.pairs.valid)} to validate"
        return {"data": f"{counts}, {' to '.join(self.pairs.languages)}", "tokens": self.tokens}

    def plan_in_tokens(self, plan: Plan) -> Plan:
        """Sentences of the example batch -> the tokens they are padded to, and at least the longest sentence."""
        size = _plain_size(plan)
        if size is None:
            return plan
        source, _, target = self.task.batch
        tokens = size * max(source.shape[1], target.shape[1])
        splits = (self.pairs.train, self.pairs.valid)
        sentences = [int(side.lengths().max()) for split in splits for side in (split.source, split.target)]
        return plan.with_(microbatch=max(tokens, min(max(sentences), self.longest)))

    def build(self, plan: Plan) -> Session:
        size = _plain_size(plan)
        data = token_batches(self.pairs.train, self.tokens, size, self.seed, self.longest)
        devices = joined().size
        task = scaled(self.task, self.multiplier(plan)).with_(batch=largest(data, devices), split=iter, devices=devices)
        task = lean_task(task, plan.with_(microbatch=None))
        materialise(task.model, seed=self.seed)
        settings = task.settings if size is None else task.settings | {"microbatch": size}
        lean = LeanTask(task.with_(settings=settings), plan)
        if self.quality == "bleu":
            return Session(lean, data, self._bleu(lean.task, data.microbatch), "inverse-sqrt")
        valid = token_batches(self.pairs.valid, self.tokens, size, longest=self.longest)
        return Session(lean, data, mean_loss(lean.task, valid), "inverse-sqrt")

    def _bleu(self, task: Task, tokens: int) -> Evaluation:
        """BLEU of greedy translations of the validation sentences, a microbatch of tokens at a time."""
        valid, task = self.pairs.valid, task.with_(batch=None)

        def measure(model: nn.Module) -> float:
            with within(task, model):
                texts = translate(model, valid.source, self.pairs.target, beams=1, tokens=tokens)  # type: ignore[arg-type]
            return bleu(texts, list(valid.references.texts()))

        return Evaluation("BLEU", measure)


def _plain_size(plan: Plan) -> int | None:
    """The tokens of a microbatch: batches of sentences are cut when they are read, so a plan can say nothing more."""
    if isinstance(plan.microbatch, Mapping):
        raise ShoestringError(f"translation takes a microbatch in tokens alone, not {in_words(plan.microbatch)!r}")
    return plan.microbatch


def pair_job(task: Task, pairs: Pairs, tokens: int, seed: int, longest: int, quality: str = "loss") -> PairJob:
    """A translation task -> the same task on these pairs; its example batch is the largest of theirs."""
    (batch,) = largest(token_batches(pairs.train, tokens, None, seed, longest))
    return PairJob(task.with_(batch=batch), pairs, tokens, seed, longest, quality)


def largest(data: TokenBatches, devices: int = 1) -> list[Any]:
    """The batch, or the share of any of several devices, with the largest microbatch, padding included: a plan that
    fits it fits every batch."""
    parts = [data.shared(device, devices) for device in range(devices)]
    batches = (part.read(0, number) for number in range(len(data)) for part in parts)
    return max(batches, key=lambda pieces: max(map(ids_in, pieces), default=0))


def ids_in(piece: tuple[Tensor, Tensor, Tensor]) -> int:
    source, _, target = piece
    return source.numel() + target.numel()


@dataclass(frozen=True)
class OwnJob:
    """A user's task on batches of theirs: anything that `train` takes; by its loss on `judged` it is evaluated."""

    task: Task
    batches: Any
    judged: Any
    place: str
    seed: int
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        return {"data": f"the batches of {self.place}"}

    def plan_in_tokens(self, plan: Plan) -> Plan:
        return plan

    def build(self, plan: Plan) -> Session:
        lean = apply(self.task, plan)
        materialise(lean.model, seed=self.seed)
        judged = None if self.judged is None else mean_loss(lean.task, as_data(self.judged, self.seed))
        return Session(lean, self.batches, judged, "constant")
