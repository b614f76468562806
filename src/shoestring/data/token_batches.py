"""Batches of sentence pairs by tokens: sentences of similar length together, none split, in a seeded order."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..errors import ShoestringError
from ..tokens import EOS, PAD
from .draws import mix, shuffled
from .files import Rows, spill
from .pairs import PairSplit

Batch = tuple[Tensor, Tensor, Tensor]  # source, target after a leading EOS, target: ids (n, longest)


@dataclass(frozen=True)
class TokenBatches:
    """The batches of an epoch: `read(epoch, number)` -> microbatches, each source, target_in, target_out.

    The batches are the same in each epoch and come in a new order, given by (seed, epoch); without a seed they come
    from the shortest to the longest. Their rows are in mapped files.
    """

    pairs: PairSplit
    microbatch: int
    seed: int | None
    order: np.ndarray  # the pairs from short to long
    ends: np.ndarray  # the number of pairs up to the end of each batch
    process: int = 0  # of `processes` that share each batch: every so many of its pairs
    processes: int = 1

    def __len__(self) -> int:
        return len(self.ends)

    def fingerprint(self) -> str:
        """What the sentences are, all of them: a resumed run compares it."""
        digest = hashlib.sha256()
        for side in (self.pairs.source, self.pairs.target):
            digest.update(side.ends.tobytes() + side.data.tobytes())
        return digest.hexdigest()[:16]

    def rows(self, epoch: int, number: int) -> np.ndarray:
        """The pairs of a batch, from short to long."""
        if not 0 <= number < len(self):
            raise ShoestringError(f"batch {number} of an epoch of {len(self)} batches: count from 0")
        if self.seed is not None:
            number = int(shuffled(np.array([number]), len(self), self.seed, epoch)[0])
        return self.order[self.ends[number - 1] if number else 0 : self.ends[number]][self.process :: self.processes]

    def shared(self, process: int, processes: int) -> "TokenBatches":
        """The part of one of several processes: in each batch, pairs from short to long."""
        return replace(self, process=process, processes=processes)

    def read(self, epoch: int, number: int) -> list[Batch]:
        """Batch `number` of an epoch, both counted from 0, in microbatches."""
        rows = self.rows(epoch, number)
        longest = [max(len(self.pairs.source[row]), len(self.pairs.target[row])) for row in rows]
        ends = list(fill(longest, self.microbatch)) if longest else []
        return [pad_pairs(self.pairs, rows[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def token_batches(
    pairs: PairSplit,
    tokens: int = 4000,
    microbatch: int | None = None,
    seed: int | None = None,
    longest: int | None = None,
) -> TokenBatches:
    """Pairs -> batches of at most `tokens`, in microbatches of at most `microbatch` (default: all in one).

    Tokens are counted with padding: the number of sentences times the longest sentence of either language,
    EOS included. Pairs with a sentence of over `longest` tokens are left out. The size of the microbatches
    does not change which pairs are in a batch.
    """
    most = min(tokens, microbatch or tokens)
    lengths = np.maximum(pairs.source.lengths(), pairs.target.lengths())
    kept = np.arange(len(lengths)) if longest is None else np.flatnonzero(lengths <= longest)
    if not len(kept):
        raise ShoestringError(f"no pair of {pairs.name} has at most {longest} tokens: choose other data")
    worst = kept[lengths[kept].argmax()]
    if lengths[worst] > most:
        raise ShoestringError(
            f"sentence {worst + 1:,} of {pairs.name} has {lengths[worst]:,} tokens and does not fit into "
            f"{most:,}: raise --{'microbatch' if microbatch else 'tokens'}, or take the sentence out of the data"
        )
    ties = mix(seed or 0, kept)  # sentences of one length are not batched in the order of the file
    sides = pairs.target.lengths()[kept], pairs.source.lengths()[kept]
    order = kept[np.lexsort((ties, *sides, lengths[kept]))]
    ends = np.fromiter(fill(lengths[order].tolist(), tokens), np.int64)
    order, ends = (spill([array.tobytes()]).view(np.int64) for array in (order, ends))
    return TokenBatches(pairs, most, seed, order, ends)


def fill(longest: list[int], most: int) -> Iterator[int]:
    """Lengths from short to long -> where groups end that hold at most `most` tokens, padded to the longest.

    >>> list(fill([2, 2, 3, 5], 6))
    [2, 3, 4]
    """
    start = 0
    for place, length in enumerate(longest):
        if (place + 1 - start) * length > most:
            yield place
            start = place
    yield len(longest)


def pad_pairs(pairs: PairSplit, rows: np.ndarray) -> Batch:
    """Rows of the pairs -> source, target that the decoder reads (EOS, then all but the last), target."""
    source, target = padded(pairs.source, rows), padded(pairs.target, rows)
    target_in = target.roll(1, dims=1)
    target_in[:, 0] = EOS
    return source, target_in.masked_fill_(target == PAD, PAD), target


def padded(sentences: Rows, rows: np.ndarray) -> Tensor:
    """Some rows -> int64 ids (n, longest), PAD after each sentence."""
    chosen = [sentences[row] for row in rows]
    ids = torch.full((len(chosen), max(map(len, chosen))), PAD)
    for place, sentence in zip(ids.numpy(), chosen, strict=True):
        place[: len(sentence)] = sentence
    return ids
