"""Text -> pieces -> ids and back. Pieces are words, or the parts of a joint byte-pair encoding."""

import hashlib
import io
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import ShoestringError, how_to_install
from ..tokens import EOS, SPECIAL_IDS, UNKNOWN
from .files import Rows, read_checked, write_checked

Split = Callable[[str], list[str]]  # a line -> its pieces
# The mark by which pieces are joined: none, the end of a part of a word, or the start of a word.
WORDS, PARTS, PIECES = "", "@@", "\N{LOWER ONE EIGHTH BLOCK}"


@dataclass(frozen=True)
class Vocabulary:
    """The pieces of one language, the most frequent first; their ids begin after the special ones.

    The pieces are in a mapped file: a vocabulary takes no memory while a network trains.
    """

    pieces: Rows
    mark: str = WORDS

    @classmethod
    def of(cls, lines: Rows, mark: str = WORDS) -> "Vocabulary":
        """Lines of pieces with spaces between them -> their vocabulary."""
        counts = Counter(piece for line in lines.texts() for piece in line.split())
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        return cls(Rows.of_texts(piece for piece, _ in ranked), mark)

    def __len__(self) -> int:
        return SPECIAL_IDS + len(self.pieces)

    def ids(self) -> dict[str, int]:
        """Each piece -> its id."""
        return {piece: SPECIAL_IDS + rank for rank, piece in enumerate(self.pieces.texts())}

    def decode(self, ids: Iterable[int]) -> str:
        """Ids up to the first EOS -> the text."""
        pieces = []
        for token in map(int, ids):
            if token == EOS:
                break
            if token >= SPECIAL_IDS:
                pieces.append(self.pieces.text(token - SPECIAL_IDS))
            elif token == UNKNOWN:
                pieces.append("<unk>")
        return join(pieces, self.mark)


def join(pieces: list[str], mark: str) -> str:
    """Pieces -> the text that they are pieces of.

    >>> join(["the", "ho@@", "use"], PARTS)
    'the house'
    """
    if mark == PIECES:
        return "".join(pieces).replace(PIECES, " ").strip()
    text = " ".join(pieces)
    return text.replace("@@ ", "") if mark == PARTS else text


def encode(lines: Rows, vocabulary: Vocabulary) -> Rows:
    """Lines of pieces with spaces between them -> rows of ids, each with EOS at its end."""
    ids = vocabulary.ids()
    kind = np.uint16 if len(vocabulary) < 2**16 else np.int32
    return Rows.spilled(
        np.array([*(ids.get(piece, UNKNOWN) for piece in line.split()), EOS], kind) for line in lines.texts()
    )


class Languages(NamedTuple):
    """Two languages of a translation: their vocabularies and names, and how their lines are split into pieces."""

    source: Vocabulary
    target: Vocabulary
    names: tuple[str, str]
    split: Split


@dataclass(frozen=True)
class BytePairs:
    """How a byte-pair encoding splits a line; `model` is sentencepiece's, as bytes."""

    model: bytes = field(repr=False)

    def __call__(self, line: str) -> list[str]:
        return self._processor.encode(line, out_type=str)

    @cached_property
    def _processor(self) -> Any:
        return _sentencepiece().SentencePieceProcessor(model_proto=self.model)


def _sentencepiece() -> Any:
    try:
        import sentencepiece
    except ImportError:
        raise ShoestringError(
            f"byte-pair encoding needs sentencepiece, which is not installed: {how_to_install('nlp')}, "
            "or split the text into subwords yourself (ho@@ use)"
        ) from None
    return sentencepiece


def byte_pairs(texts: tuple[Path, ...], size: int, cache: Path) -> BytePairs:
    """Text files -> how their joint byte-pair encoding of `size` pieces splits a line; it is cached."""
    _sentencepiece()
    digest = hashlib.sha256(f"bpe {size}".encode())
    for path in texts:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    cached = cache / f"bpe-{size}-{digest.hexdigest()[:24]}.model"
    model = read_checked(cached)
    if model is None:
        model = _learn(texts, size)
        write_checked(cached, model)
    return BytePairs(model)


def _learn(texts: tuple[Path, ...], size: int) -> bytes:
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line.rstrip("\n") for path in texts for line in path.open(encoding="utf-8")),
            model_writer=model,
            model_type="bpe",
            vocab_size=size,
            character_coverage=1.0,
            normalization_rule_name="identity",  # the text is already prepared, and must come back unchanged
            bos_id=-1,
            eos_id=-1,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].rsplit("] ", 1)[-1]
        most = re.search(r"value <= (\d+)", reason)
        why = f"the text has too few: use --vocabulary {most[1]} or less" if most else reason
        raise ShoestringError(
            f"no byte-pair encoding of {size:,} pieces can be learned from {texts[0]}: {why}"
        ) from error
    return model.getvalue()
