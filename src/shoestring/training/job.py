"""A task on real data: `under(plan)` gives the lean task, the batches to train on, and the evaluation."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from ..data import Augment, ImageBatches, Images, Pairs, TokenBatches, on_images, token_batches
from ..errors import ShoestringError
from ..models import materialise
from ..planning.plan import Plan
from ..task import Loss, Task
from .apply import LeanTask, apply, lean_task
from .evaluate import Data, Evaluation, accuracy, evaluating, mean_loss, within
from .translate import bleu, translate


class Lesson(NamedTuple):
    """All that training takes; `schedule` is the usual one of the task."""

    lean: LeanTask
    data: Data
    evaluation: Evaluation
    schedule: str


class Work(Protocol):
    """`settings` tell the data, for a run is resumed with the same only."""

    @property
    def task(self) -> Task: ...

    @property
    def settings(self) -> dict[str, Any]: ...

    def adapted(self, plan: Plan) -> Plan:
        """A plan that was made for the task -> the same in the units that `under` takes."""
        ...

    def under(self, plan: Plan) -> Lesson: ...


@dataclass(frozen=True)
class CrossEntropy:
    """The loss of classifiers: mean cross entropy with labels smoothed by `label_smoothing`."""

    label_smoothing: float = 0.0

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels, label_smoothing=self.label_smoothing)


@dataclass(frozen=True)
class ImageWork:
    """Classification of images, which reach the model as floats a microbatch at a time."""

    task: Task
    images: Images
    size: int
    seed: int
    augment: Augment
    schedule: str

    @property
    def settings(self) -> dict[str, Any]:
        counts = f"{len(self.images.train)} images to train and {len(self.images.test)} to test"
        return {"data": f"{counts}, {len(self.images.classes)} classes", "batch": self.size}

    def adapted(self, plan: Plan) -> Plan:
        return plan

    def under(self, plan: Plan) -> Lesson:
        lean = apply(self.task, plan)
        materialise(lean.model, seed=self.seed)  # a model on the meta device is built straight into its lean form
        data = ImageBatches(self.images.train, self.size, self.augment, self.seed)
        test = ImageBatches(self.images.test, min(self.size, len(self.images.test)), self.augment)
        return Lesson(lean, data, accuracy(lean.task, test, self.augment), self.schedule)


def image_work(
    task: Task, images: Images, seed: int, loss: Loss | None = None, schedule: str = "constant", shrink: int = 1
) -> ImageWork:
    """A task on (float images, labels), and images -> the same task on those; `loss` replaces the task's.

    `shrink` averages squares of so many pixels to one: the model takes images that are so many times smaller.
    """
    _check_images(task, images, shrink)
    augment = Augment(images.mean, images.std, shrink=shrink)
    size = task.batch[0].shape[0]
    batch = ImageBatches(images.train, size, augment, seed).read(0, 0)
    task = task.with_(loss=on_images(loss or task.loss, augment), batch=batch, microbatches=task.microbatches)
    return ImageWork(task, images, size, seed, augment, schedule)


def takes_images(task: Task) -> bool:
    """Whether a task's batch is float images (n, channels, height, width) and their labels (n)."""
    match task.batch:
        case (Tensor() as images, Tensor() as labels):
            return images.is_floating_point() and (images.dim(), labels.dim()) == (4, 1)
    return False


def _check_images(task: Task, images: Images, shrink: int = 1) -> None:
    """Refuses images of another shape than the task's, and classes that the model has no scores for."""
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
class PairWork:
    """Translation, in batches of `tokens`; a plan's microbatch counts tokens too, and splits no sentence."""

    task: Task
    pairs: Pairs
    tokens: int
    seed: int
    longest: int
    quality: str = "loss"  # or bleu

    @property
    def settings(self) -> dict[str, Any]:
        counts = f"{len(self.pairs.train)} pairs to train and {len(self.pairs.valid)} to validate"
        return {"data": f"{counts}, {' to '.join(self.pairs.languages)}", "tokens": self.tokens}

    def adapted(self, plan: Plan) -> Plan:
        """Sentences of the example batch -> the tokens that so many are padded to; any sentence fits into it."""
        if plan.microbatch is None:
            return plan
        source, _, target = self.task.batch
        tokens = plan.microbatch * max(source.shape[1], target.shape[1])
        splits = (self.pairs.train, self.pairs.valid)
        sentences = [int(side.lengths().max()) for split in splits for side in (split.source, split.target)]
        return plan.with_(microbatch=max(tokens, min(max(sentences), self.longest)))

    def under(self, plan: Plan) -> Lesson:
        data = token_batches(self.pairs.train, self.tokens, plan.microbatch, self.seed, self.longest)
        task = lean_task(self.task.with_(batch=largest(data), split=iter), plan.with_(microbatch=None))
        materialise(task.model, seed=self.seed)
        lean = LeanTask(task.with_(settings=task.settings | {"microbatch": data.microbatch}), plan)
        if self.quality == "bleu":
            return Lesson(lean, data, self._bleu(lean.task, data.microbatch), "inverse-sqrt")
        valid = token_batches(self.pairs.valid, self.tokens, plan.microbatch, longest=self.longest)
        return Lesson(lean, data, mean_loss(lean.task, valid), "inverse-sqrt")

    def _bleu(self, task: Task, tokens: int) -> Evaluation:
        """BLEU of greedy translations of the validation sentences, as many at a time as fit a microbatch."""
        valid, task = self.pairs.valid, task.with_(batch=None)

        def measure(model: nn.Module) -> float:
            with within(task, model):
                texts = translate(model, valid.source, self.pairs.target, beams=1, tokens=tokens)  # type: ignore[arg-type]
            return bleu(texts, list(valid.references.texts()))

        return Evaluation("BLEU", measure)


def pair_work(task: Task, pairs: Pairs, tokens: int, seed: int, longest: int, quality: str = "loss") -> PairWork:
    """A translation task -> the same task on these pairs, with the largest of their batches as its example."""
    (batch,) = largest(token_batches(pairs.train, tokens, None, seed, longest))
    return PairWork(task.with_(batch=batch), pairs, tokens, seed, longest, quality)


def largest(data: TokenBatches) -> list[Any]:
    """The batch with the largest microbatch, padding counted: what fits for it fits for all."""
    batches = (data.read(0, number) for number in range(len(data)))
    return max(batches, key=lambda pieces: max(map(ids_in, pieces)))


def ids_in(piece: tuple[Tensor, Tensor, Tensor]) -> int:
    source, _, target = piece
    return source.numel() + target.numel()
