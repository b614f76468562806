"""`shoestring translate RUN`: translates sentences with a trained run; its folder holds the vocabulary."""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from ..errors import ShoestringError
from .options import add_threads, command, print_json, say, whole_number
from .recorded import add_run, opened

EXAMPLES = (
    "runs/dynamicconv-iwslt 'ein kleiner hund schläft .'",
    "runs/dynamicconv-iwslt --beams 1 < sentences.de > sentences.en",
)


def add(subparsers: Any) -> None:
    purpose = "translate sentences with a trained run"
    parser = command(subparsers, "translate", run, purpose, EXAMPLES)
    add_run(parser)
    parser.add_argument(
        "sentences", nargs="*", metavar="SENTENCE", help="prepared as the training text was; none: stdin"
    )
    parser.add_argument("--beams", type=whole_number(1, 100), default=5, metavar="N", help="of the search (default: 5)")
    add_threads(parser)


def run(args: argparse.Namespace) -> int:
    import torch

    from ..data import kept_languages
    from ..data.pairs import in_pieces
    from ..data.vocabulary import encode
    from ..training.load import load
    from ..training.translate import translate

    folder = opened(args.run_folder)
    languages = kept_languages(folder.languages_path)
    if languages is None:
        raise ShoestringError(
            f"{folder.path} is no run of a translation, for it holds no vocabulary: `shoestring evaluate` judges it"
        )
    if args.threads:
        torch.set_num_threads(args.threads)
    texts = [_checked(text, number) for number, text in enumerate(args.sentences or _lines(), 1)]
    model: Any = load(folder.path, weights=args.weights, warn=say)
    sentences = encode(in_pieces(texts, languages.split), languages.source)
    with torch.no_grad():
        found = translate(model, sentences, languages.target, beams=args.beams)
    if args.json:
        print_json([{"source": text, "translation": words} for text, words in zip(texts, found, strict=True)])
    else:
        print("\n".join(found))
    return 0


def _lines() -> Iterator[str]:
    """The sentences of stdin, one per line."""
    if sys.stdin.isatty():
        print("shoestring: one sentence per line, then Ctrl-D", file=sys.stderr)
    try:
        yield from sys.stdin
    except UnicodeDecodeError:
        raise ShoestringError("the sentences are not UTF-8: convert them first, as with iconv") from None


def _checked(text: str, number: int) -> str:
    """A sentence without the blanks around it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ShoestringError(f"sentence {number:,} is not UTF-8: convert it first, as with iconv") from None
    if not text.strip():
        raise ShoestringError(f"sentence {number:,} is empty: give one sentence per line")
    return text.strip()
