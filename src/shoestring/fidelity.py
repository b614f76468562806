"""Fidelity: how near the weight gradients of compressed activations are to exact ones, per layer and codec.

`probe` trains a task plainly and, every few steps, makes the gradients of the same batch once more under each codec:
the same weights, the same random numbers, and buffers (the running statistics of batch norm) that move once. The
training itself is not changed by a bit.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, NamedTuple

from .errors import NoEffect, ShoestringError
from .step import Stepper
from .task import Task
from .techniques.activations.codecs import codec_of
from .techniques.activations.gradients import Overlap, gradients, total, untouched, weights_of
from .techniques.activations.rehearsals import Saved, saved
from .techniques.registry import apply_settings

Tell = Callable[[int, int], None]  # steps done, steps in all


@dataclass(frozen=True)
class LayerFidelity:
    """Of one layer's weight gradient under a codec, averaged over the probed steps: its cosine with the exact one, its
    norm over the exact one's; and the bytes of the layer's saved input, exact and as it is stored."""

    module: str
    codec: str
    cosine: float
    norm_ratio: float
    exact_bytes: int
    stored_bytes: int


@dataclass(frozen=True)
class WholeFidelity:
    """The same of all gradients together, with the bytes of all that is saved and the predicted peak of a step."""

    codec: str
    cosine: float
    exact_bytes: int
    stored_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Probe:
    """One probed step: the number of updates before it, its loss, and the whole gradient's cosine per codec."""

    step: int
    loss: float
    cosines: dict[str, float]


@dataclass(frozen=True)
class Fidelity:
    """What a probe found; `without_effect` are codecs that compress nothing in this model, with the reason."""

    task: str
    steps: int
    layers: tuple[LayerFidelity, ...]
    whole: tuple[WholeFidelity, ...]
    probes: tuple[Probe, ...]
    without_effect: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Codec(NamedTuple):
    """A codec on trial: its word, the task under it, and what the task saves then."""

    word: str
    task: Task
    saved: Saved


def endless(data: Any) -> Iterator[Any]:
    """The batches of a data set, epoch after epoch."""
    return (data.read(epoch, number) for epoch in itertools.count() for number in range(len(data)))


def check_words(words: Sequence[str]) -> None:
    """Refuses words that are no codecs to compress with."""
    for word in words:
        codec = codec_of(word)
        if codec is None or codec.pack is None:
            raise ShoestringError(
                f"there is no codec {word!r} that compresses: use poolK, int8, int4, int2 or poolK+intB"
            )


def probe(
    task: Task,
    batches: Iterable[Any],
    steps: int,
    words: Sequence[str],
    every: int = 1,
    *,
    peak: Callable[[Task], int],
    tell: Tell = lambda done, total: None,
) -> Fidelity:
    """A task, its batches, one per update, and words for codecs -> their fidelity in every `every`-th of the steps.

    `peak` predicts the peak of a task's step in bytes.
    """
    check_words(words)
    if steps < 1 or every < 1:
        raise ShoestringError(f"{steps} steps, every {every}th of them probed, show nothing: give at least 1 of both")
    codecs, without_effect = _on_trial(task, words)
    exact_bytes, stepper, seen = saved(task).bytes, Stepper(task), list[_Seen]()
    for step, batch in zip(range(steps), batches, strict=False):
        overlaps = _overlaps(task, codecs, batch) if step % every == 0 else None
        loss = float(stepper.step(batch))
        if overlaps is not None:
            seen.append(_Seen(step, loss, overlaps))
        tell(step + 1, steps)
    return Fidelity(
        task=task.name or type(task.model).__name__,
        steps=stepper.updates,
        layers=tuple(_layers(codecs, seen)),
        whole=tuple(
            WholeFidelity(c.word, fmean(one.cosine(c.word) for one in seen), exact_bytes, c.saved.bytes, peak(c.task))
            for c in codecs
        ),
        probes=tuple(Probe(one.step, one.loss, {c.word: one.cosine(c.word) for c in codecs}) for one in seen),
        without_effect=without_effect,
    )


class _Seen(NamedTuple):
    """One probed step: the overlaps of its gradients by codec and parameter."""

    step: int
    loss: float
    overlaps: dict[str, dict[str, Overlap]]

    def cosine(self, word: str) -> float:
        return total(self.overlaps[word].values()).cosine


def _on_trial(task: Task, words: Sequence[str]) -> tuple[list[Codec], dict[str, str]]:
    """The codecs that compress something in this model, and the reasons why others do not."""
    codecs, without_effect = list[Codec](), dict[str, str]()
    for word in dict.fromkeys(words):
        try:
            lean = apply_settings(task, {"activations": word})
        except NoEffect as error:
            without_effect[word] = str(error)
        else:
            codecs.append(Codec(word, lean, saved(lean)))
    if not codecs:
        raise NoEffect(next(iter(without_effect.values()), "no codec is named"))
    return codecs, without_effect


# -- gradients --------------------------------------------------------------------------------------------------
def _overlaps(task: Task, codecs: Sequence[Codec], batch: Any) -> dict[str, dict[str, Overlap]]:
    """The overlap of each parameter's exact gradient with each codec's; nothing of the model is changed."""
    with untouched(task.model):
        exact = gradients(task, batch)
    found = {}
    for codec in codecs:
        with untouched(task.model):
            lossy = gradients(codec.task, batch)
        found[codec.word] = {name: Overlap.of(exact[name], lossy[name]) for name in exact}
    return found


def _layers(codecs: Sequence[Codec], seen: Sequence[_Seen]) -> Iterator[LayerFidelity]:
    """A row per codec and layer whose input some codec compresses; another codec may store it as it is."""
    names = seen[0].overlaps[codecs[0].word]
    for module in dict.fromkeys(kept.module for codec in codecs for kept in codec.saved.compressed):
        inputs = {codec.word: [k for k in codec.saved.compressed if k.module == module] for codec in codecs}
        given = {kept.weight for found in inputs.values() for kept in found}
        weights = weights_of(module, given, names) & set(names)
        if not weights:
            continue  # the input of a region, or of a layer whose output nobody reads
        exact_bytes = max(sum(kept.exact_bytes for kept in found) for found in inputs.values())
        for word, found in inputs.items():
            sums = [total(one.overlaps[word][name] for name in weights) for one in seen]
            stored_bytes = exact_bytes - sum(kept.exact_bytes - kept.stored_bytes for kept in found)
            cosine, norm_ratio = fmean(one.cosine for one in sums), fmean(one.norm_ratio for one in sums)
            yield LayerFidelity(module, word, cosine, norm_ratio, exact_bytes, stored_bytes)
