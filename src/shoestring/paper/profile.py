"""The paper's profile: a model and the settings of the four techniques -> bytes and FLOPs of a step."""

from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from typing import Any, NamedTuple

from ..errors import ShoestringError
from ..ledger import Category, Ledger
from ..models import builtin
from ..models.build import check_count
from ..models.tasks import find
from ..profiling.profile import Profile
from ..task import Task
from . import storage
from .graph import Graph
from .strategies import schedule
from .sweep import count_flops, write_activations, write_weights
from .trace import trace

SENTENCE = 250  # tokens: the paper's microbatch is its longest sentence
MOST_ITEMS = 10**9


@dataclass(frozen=True)
class PaperProfile(Profile):
    """A `Profile` by the paper's rules: its peak is the sum of model, optimizer and activations (Table 3)."""

    def _bytes(self, *categories: Category) -> int:
        return sum(self.bytes_by_category[category] for category in categories)

    @property
    def model_bytes(self) -> int:
        return self._bytes(Category.MODEL)

    @property
    def optimizer_bytes(self) -> int:
        """Gradients and the optimizer's state."""
        return self._bytes(Category.GRADIENT, Category.OPTIMIZER)

    @property
    def forward_bytes(self) -> int:
        """Activations of the forward pass, the batch among them."""
        return self._bytes(Category.INPUT, Category.ACTIVATION)

    @property
    def backward_bytes(self) -> int:
        """Gradients with respect to activations."""
        return self._bytes(Category.ACTIVATION_GRADIENT)

    @property
    def activation_bytes(self) -> int:
        return self.forward_bytes + self.backward_bytes

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"rules": "paper"}


def paper_profile(
    model: str | Task,
    batch: int | None = None,
    tokens: int | None = None,
    nonzero: float = 100,
    precision: str = "fp32",
    microbatch: int | None = None,
    checkpoint: str = "none",
    **shape: int,
) -> PaperProfile:
    """A built-in model's name or a task, and the techniques' settings -> its profile by the paper's rules.

    `nonzero` is the percentage of weights that sparse layers hold; `microbatch` counts images or tokens, as
    `batch` and `tokens` do; `shape` is that of a built-in model if it is not its own, such as `width=128`.

    >>> paper_profile("wrn-28-2", batch=100).peak_bytes
    404802488
    """
    check(nonzero, precision)
    sizes = sized(model, batch, tokens, microbatch)
    task, graph = traced(model, sizes.microbatch, **shape)
    plan = schedule(graph, checkpoint)
    ledger = Ledger()
    write_weights(ledger, task, graph, nonzero, precision)
    peak = write_activations(ledger, graph, plan, sizes.microbatch, storage.BITS[precision])
    return PaperProfile(
        task=task.name or type(task.model).__name__,
        settings={
            sizes.word: sizes.items,
            "nonzero": nonzero,
            "precision": precision,
            "microbatch": sizes.microbatch,
            "checkpoint": checkpoint,
        },
        ledger=ledger,
        peak=peak,
        flops=count_flops(graph, plan, sizes.items),
        unseen=[],
        signatures=[],
    )


def check(nonzero: float, precision: str) -> None:
    """Raises if the rules do not know the settings."""
    if precision not in storage.BITS:
        raise ShoestringError(f"the paper's rules have no precision {precision!r}: use fp32 or fp16")
    if not isinstance(nonzero, int | float) or not 0 < nonzero <= 100:
        raise ShoestringError(f"nonzero {nonzero} is out of range: give a percentage above 0 and up to 100")


class Sizes(NamedTuple):
    """How many items a step and a microbatch have, and the word for them."""

    word: str
    items: int
    microbatch: int


def sized(model: str | Task, batch: int | None, tokens: int | None, microbatch: int | None) -> Sizes:
    """A model and the requested sizes -> the sizes of the step; by default those of the model's own batch."""
    asked = {word: count for word, count in (("batch", batch), ("tokens", tokens)) if count is not None}
    for word, count in asked.items():
        check_count(word, count, MOST_ITEMS)
    task = model if isinstance(model, Task) else builtin(model, device="meta", **dict.fromkeys(asked, 2))
    word, items = next(iter(asked.items()), (word_for(model), task.count(task.batch)))
    microbatch = items if microbatch is None else microbatch
    if not isinstance(microbatch, int) or not 1 <= microbatch <= items:
        raise ShoestringError(f"microbatch {microbatch} is out of range: give 1 to {items:,} (all {word})")
    return Sizes(word, items, microbatch)


def word_for(model: str | Task) -> str:
    """The word that a batch of the model is measured in."""
    by_tokens = isinstance(model, str) and "tokens" in signature(find(model)).parameters
    return "tokens" if by_tokens else "batch"


def traced(model: str | Task, microbatch: int, **shape: int) -> tuple[Task, Graph]:
    """A model -> its task and graph.

    The batch may be another one: counts are in proportion to the items, and depend on nothing else but the
    length of sentences.
    """
    if isinstance(model, Task):
        if shape:
            raise ShoestringError(f"{', '.join(shape)} is for built-in models: a task has the shape that it has")
        return model, trace(model)
    return traced_builtin(model, min(SENTENCE, microbatch) if word_for(model) == "tokens" else None, **shape)


@lru_cache(maxsize=16)
def traced_builtin(name: str, length: int | None, **shape: int) -> tuple[Task, Graph]:
    options = {} if length is None else {"tokens": length, "length": length}
    task = builtin(name, device="meta", **options, **shape)
    return task, trace(task)
