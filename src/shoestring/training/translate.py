"""Translation by search: `beam_search` on ids, `translate` from sentences to texts, and their BLEU."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..data.files import Rows
from ..data.token_batches import padded
from ..data.vocabulary import Vocabulary
from ..errors import ShoestringError, how_to_install
from ..tokens import BOS, EOS, PAD
from .evaluate import tell_progress


class Translator(Protocol):
    """A model that can be searched: it has these two methods and is in evaluation mode.

    A search is much quicker if it also has `past()`, which makes an object of its own with a method `take(rows)`, and
    `decode(last, memory, past)` takes the last ids (n, 1) alone and keeps there what it needs of those before.
    """

    def encode(self, source: Tensor) -> Any:
        """Source ids (n, S) -> the memory, any structure of tensors whose first dimension is n."""
        ...

    def decode(self, target_in: Tensor, memory: Any) -> Tensor:
        """Target ids (n, T), EOS first, and the memory -> scores (n, T, vocabulary) of what follows."""
        ...


def longest_target(source_length: int) -> int:
    """The number of ids after which a search gives up: 1.2 per source id, and 10 more."""
    return int(1.2 * source_length) + 10


def greedy_search(model: Translator, source: Tensor, longest: int | None = None) -> list[list[int]]:
    """Source ids (n, S) -> for each sentence the greedily likeliest ids, up to EOS."""
    return beam_search(model, source, beams=1, longest=longest)


@dataclass(frozen=True)
class Beams:
    """The best targets so far of n sentences: ids (n, beams, T), and three tensors (n, beams)."""

    ids: Tensor
    logs: Tensor  # log-probability
    lengths: Tensor
    ended: Tensor
    rows: Tensor | None = None  # (n * beams): from which row before each was extended


@torch.no_grad()
def beam_search(
    model: Translator, source: Tensor, beams: int = 5, length_penalty: float = 1.0, longest: int | None = None
) -> list[list[int]]:
    """Source ids (n, S) -> for each sentence the best target ids found, up to EOS.

    The best has the greatest log-probability / length ** length_penalty. At each step the `beams` best
    candidates are kept, among them those that have ended, whose score no longer changes.
    """
    memory = pytree.tree_map_only(Tensor, lambda t: t.repeat_interleave(beams, 0), model.encode(source))
    found, past = start(source, beams), model.past() if hasattr(model, "past") else None
    for _ in range(longest or longest_target(source.shape[1])):
        found = extend(found, next_logs(model, found.ids.flatten(0, 1), memory, past), length_penalty)
        if found.ended.all():
            break
        if past is not None and beams > 1:
            past.take(found.rows)
    best = (found.logs / found.lengths**length_penalty).argmax(1)
    return [until_end(row) for row in found.ids[torch.arange(len(source)), best, 1:].tolist()]


def start(source: Tensor, beams: int) -> Beams:
    """The beams before the first id: all of a sentence are alike, so only its first is possible."""
    logs = torch.full((len(source), beams), -torch.inf, device=source.device)
    logs[:, 0] = 0
    ids = source.new_full((len(source), beams, 1), EOS)
    return Beams(ids, logs, torch.zeros_like(logs), torch.zeros_like(logs, dtype=torch.bool))


def extend(found: Beams, following: Tensor, length_penalty: float) -> Beams:
    """Beams and the log-probabilities (n * beams, vocabulary) of the next id -> the best of them extended."""
    count, beams = found.logs.shape
    vocabulary = following.shape[1]
    following = following.masked_fill(found.ended.view(-1, 1), -torch.inf).view(count, beams, vocabulary)
    following[..., PAD].masked_fill_(found.ended, 0)  # a finished beam continues with padding, at no cost
    logs = (found.logs[..., None] + following).flatten(1)
    lengths = found.lengths + ~found.ended
    ranks = logs / lengths.repeat_interleave(vocabulary, 1) ** length_penalty
    chosen = ranks.topk(beams, dim=1).indices
    beam, token = chosen // vocabulary, chosen % vocabulary
    rows = beam + beams * torch.arange(count, device=beam.device)[:, None]
    ids = found.ids.gather(1, beam[..., None].expand(-1, -1, found.ids.shape[2]))
    return Beams(
        ids=torch.cat([ids, token[..., None]], dim=2),
        logs=logs.gather(1, chosen),
        lengths=lengths.gather(1, beam),
        ended=found.ended.gather(1, beam) | (token == EOS),
        rows=rows.flatten(),
    )


def next_logs(model: Any, target_in: Tensor, memory: Any, past: Any = None) -> Tensor:
    """Targets so far (n, T) -> log-probabilities (n, vocabulary) of the id that follows each."""
    scores = model.decode(target_in, memory) if past is None else model.decode(target_in[:, -1:], memory, past)
    logs = scores[:, -1].float().log_softmax(1)
    logs[:, [PAD, BOS]] = -torch.inf
    return logs


def until_end(ids: list[int]) -> list[int]:
    """Ids -> those before the first EOS."""
    return ids[: ids.index(EOS)] if EOS in ids else ids


def translate(
    model: Translator,
    sentences: Rows,
    vocabulary: Vocabulary,
    beams: int = 5,
    length_penalty: float = 1.0,
    tokens: int = 4000,
    device: torch.device | str = "cpu",
) -> list[str]:
    """Source sentences as ids -> their translations, in the same order.

    Sentences are searched in groups whose beams stay within `tokens` of target (at least one sentence), which bounds
    the memory of a search as a microbatch bounds that of training.
    """
    texts, done = [""] * len(sentences), 0
    for rows in groups(sentences.lengths(), beams, tokens):
        found = beam_search(model, padded(sentences, rows).to(device), beams, length_penalty)
        for row, ids in zip(rows, found, strict=True):
            texts[row] = vocabulary.decode(ids)
        tell_progress(done := done + len(rows), len(texts))
    return texts


def groups(lengths: np.ndarray, beams: int, tokens: int) -> Iterator[np.ndarray]:
    """Source lengths -> rows to be searched together, from short to long."""
    order = np.argsort(lengths, kind="stable")
    start = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or (end + 1 - start) * beams * longest_target(int(lengths[order[end]])) > tokens:
            yield order[start:end]
            start = end


def bleu(translations: list[str], references: list[str]) -> float:
    """Translations and references, both prepared (tokenised) text -> corpus BLEU by sacrebleu, 0 to 100."""
    try:
        import sacrebleu
    except ImportError:
        raise ShoestringError(f"BLEU needs sacrebleu, which is not installed: {how_to_install('nlp')}") from None
    if len(translations) != len(references) or not references:
        raise ShoestringError(
            f"{len(translations):,} translations have {len(references):,} references: give one to each"
        )
    # The text is tokenised already, which sacrebleu would warn about.
    return sacrebleu.corpus_bleu(translations, [references], tokenize="none", force=True).score
