"""`open_pairs(folder)`: sentence pairs in the layout of the prepared IWSLT'14, or of a generated language."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ..cache import made_cache_folder
from ..errors import ShoestringError
from .files import Rows, need_file
from .language import sentence_pairs
from .vocabulary import PARTS, PIECES, WORDS, Languages, Split, Vocabulary, byte_pairs, encode

SPLITS = ("train", "valid", "test")
EMBEDDED_COUNTS = (8000, 500, 500)


@dataclass(frozen=True)
class PairSplit:
    """Sentences and their translations as ids that end with EOS; `references` are the translations' texts."""

    name: str
    source: Rows
    target: Rows
    references: Rows

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True)
class Pairs:
    """Three splits, and their languages."""

    train: PairSplit
    valid: PairSplit
    test: PairSplit
    known: Languages

    @property
    def source(self) -> Vocabulary:
        return self.known.source

    @property
    def target(self) -> Vocabulary:
        return self.known.target

    @property
    def languages(self) -> tuple[str, str]:
        return self.known.names


@dataclass(frozen=True)
class Lines:
    """A text file, read line by line each time it is iterated."""

    path: Path

    def __iter__(self) -> Iterator[str]:
        with need_file(self.path).open("rb") as file:
            for number, line in enumerate(file, 1):
                yield self._text(line, number)

    def _text(self, line: bytes, number: int) -> str:
        try:
            text = line.decode("utf-8").strip()
        except UnicodeDecodeError:
            raise ShoestringError(f"{self.path}, line {number:,}: not UTF-8; convert the file") from None
        if not text:
            raise ShoestringError(
                f"{self.path}, line {number:,}: an empty sentence; remove the line from both languages"
            )
        return text


Texts = dict[tuple[str, str], Iterable[str]]  # the lines of each split in each language


def open_pairs(
    folder: str | Path | None = None,
    *,
    languages: tuple[str, str] | None = None,
    vocabulary: int | None = 10_000,
    cache: Path | None = None,
    known: Languages | None = None,
) -> Pairs:
    """A folder with train, valid and test in two languages (train.de, train.en) -> its pairs; None: embedded.

    `languages` are source and target; by default they are taken from a folder name such as iwslt14.de-en, else in
    alphabetical order. Text that is already split into subwords ("ho@@ use") is used as it is; other text is split by
    a joint byte-pair encoding of `vocabulary` pieces, which is cached in `cache`, or into words if that is None.
    With `known` languages, those of a run, their pieces and ids are used.
    """
    if folder is None:
        return _embedded()
    where = Path(folder)
    if not where.is_dir():
        raise ShoestringError(f"the data folder {where} does not exist: check the path")
    languages = languages or (known.names if known else _languages(where))
    lines = {(name, language): Lines(where / f"{name}.{language}") for name in SPLITS for language in languages}
    for name in SPLITS:
        _check_counts(*(lines[name, language] for language in languages))
    source, target = (lines["train", language] for language in languages)
    if known is not None:
        return _encoded({**lines}, _pieces({**lines}, known.split), known)
    return _pairs({**lines}, languages, *_splitter(source, target, vocabulary, cache))


def _languages(folder: Path) -> tuple[str, str]:
    found = sorted(path.suffix[1:] for path in folder.glob("train.*") if path.is_file())
    named = re.search(r"([a-z]{2,3})-([a-z]{2,3})$", folder.resolve().name)
    if named and {named[1], named[2]} <= set(found):
        return named[1], named[2]
    if len(found) != 2:
        cure = "name the folder after the two, as in NAME.de-en" if found[2:] else "complete the folder"
        raise ShoestringError(
            f"{folder} has {len(found)} files train.LANGUAGE, and a pair needs 2, such as train.de and train.en: "
            f"{cure}, or choose another"
        )
    return found[0], found[1]


def _check_counts(source: Lines, target: Lines) -> None:
    counts = [sum(1 for _ in lines) for lines in (source, target)]
    if counts[0] != counts[1]:
        raise ShoestringError(
            f"{source.path} has {counts[0]:,} lines and {target.path} {counts[1]:,}: line n of one must "
            "translate line n of the other; prepare them again"
        )


def _splitter(source: Lines, target: Lines, vocabulary: int | None, cache: Path | None) -> tuple[Split, str]:
    """The training text -> how its lines are split into pieces, and how these are marked."""
    if any("@@ " in line for lines in (source, target) for line in islice(lines, 1000)):
        return str.split, PARTS
    if vocabulary is None:
        return str.split, WORDS
    return byte_pairs((source.path, target.path), vocabulary, cache or made_cache_folder()), PIECES


def _embedded() -> Pairs:
    languages, made = ("little", "english"), sentence_pairs(sum(EMBEDDED_COUNTS))
    texts: Texts = {}
    for name, count in zip(SPLITS, EMBEDDED_COUNTS, strict=True):
        sides = zip(*islice(made, count), strict=True)
        texts |= {(name, language): side for language, side in zip(languages, sides, strict=True)}
    return _pairs(texts, languages, str.split, WORDS)


def _pairs(texts: Texts, languages: tuple[str, str], split: Split, mark: str) -> Pairs:
    pieces = _pieces(texts, split)
    source, target = (Vocabulary.of(pieces["train", language], mark) for language in languages)
    return _encoded(texts, pieces, Languages(source, target, languages, split))


Pieces = dict[tuple[str, str], Rows]  # the pieces of each line, with spaces between them


def _pieces(texts: Texts, split: Split) -> Pieces:
    return {place: in_pieces(lines, split) for place, lines in texts.items()}


def in_pieces(lines: Iterable[str], split: Split) -> Rows:
    """Lines of text -> rows of their pieces, with spaces between them."""
    return Rows.of_texts(" ".join(split(line)) for line in lines)


def _encoded(texts: Texts, pieces: Pieces, known: Languages) -> Pairs:
    """Texts, their pieces and their languages -> the pairs as ids."""

    def encoded(name: str) -> PairSplit:
        sources, targets = (pieces[name, language] for language in known.names)
        references = texts[name, known.names[1]]
        whole = (line.replace("@@ ", "") if known.target.mark == PARTS else line for line in references)
        return PairSplit(name, encode(sources, known.source), encode(targets, known.target), Rows.of_texts(whole))

    train, valid, test = (encoded(name) for name in SPLITS)
    return Pairs(train, valid, test, known)
