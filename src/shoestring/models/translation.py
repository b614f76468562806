"""The built-in translation task: the DynamicConv Transformer on random sentence pairs."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..task import Adam, Task
from ..tokens import EOS, PAD, SPECIAL_IDS
from .build import check_count, on_meta
from .dynamicconv import DynamicConvTransformer, Settings

MOST_TOKENS = 10**6
USUAL_LENGTHS = (20, 30)  # a batch holds sentences of similar length; IWSLT'14's have about 25 tokens on average
LABEL_SMOOTHING = 0.1
TRANSLATION_ADAM = Adam(lr=5e-4, betas=(0.9, 0.98), weight_decay=1e-4)

Pairs = tuple[Tensor, Tensor, Tensor]  # source, target after a leading EOS, target: ids (N, longest)


def dynamicconv_iwslt(
    generator: torch.Generator,
    tokens: int = 4000,
    length: int | None = None,
    source_vocabulary: int = Settings.source_vocabulary,
    target_vocabulary: int = Settings.target_vocabulary,
    width: int = Settings.width,
) -> Task:
    """The IWSLT'14 recipe on sentences of 20 to 30 tokens, or of `length`; `tokens` counts the targets'.

    Narrower networks have hidden layers of twice their width, as the recipe's own.
    """
    check_count("tokens", tokens, MOST_TOKENS)
    check_count("source_vocabulary", source_vocabulary, 10**7, least=SPECIAL_IDS + 1)
    check_count("target_vocabulary", target_vocabulary, 10**7, least=SPECIAL_IDS + 1)
    check_count("width", width, 65_536)
    settings = Settings(source_vocabulary, target_vocabulary, width, 2 * width)
    if length is not None:
        check_count("length", length, settings.most_positions)
    pairs = random_pairs(generator, tokens, (length, length) if length else USUAL_LENGTHS, settings)
    model = on_meta(DynamicConvTransformer, settings)
    return Task(model, translation_loss, pairs, TRANSLATION_ADAM, items=count_target_tokens, padding=PAD)


def random_pairs(generator: torch.Generator, tokens: int, lengths: tuple[int, int], settings: Settings) -> Pairs:
    """Sentence pairs of (shortest, longest) `lengths`; the last target is cut so that there are `tokens` in total."""
    shortest, longest = lengths
    drawn = torch.randint(shortest, longest + 1, (2, math.ceil(tokens / shortest)), generator=generator)
    targets = drawn[0].cumsum(0).clamp(max=tokens).diff(prepend=torch.zeros(1, dtype=torch.int64))
    targets = targets[targets > 0]
    source = random_sentences(generator, drawn[1, : len(targets)], settings.source_vocabulary)
    target = random_sentences(generator, targets, settings.target_vocabulary)
    return source, shift_right(target), target


def random_sentences(generator: torch.Generator, lengths: Tensor, vocabulary: int) -> Tensor:
    """Lengths (N,) -> ids (N, longest): words, EOS as the last of each sentence, then padding."""
    ids = torch.randint(SPECIAL_IDS, vocabulary, (len(lengths), int(lengths.max())), generator=generator)
    places = torch.arange(ids.shape[1])
    ids[places == lengths[:, None] - 1] = EOS
    return ids.masked_fill(places >= lengths[:, None], PAD)


def shift_right(target: Tensor) -> Tensor:
    """Target ids (N, T) -> the decoder's input, shifted right: EOS, then all but the last."""
    shifted = target.roll(1, dims=1)
    shifted[:, 0] = EOS
    return shifted.masked_fill(target == PAD, PAD)


def translation_loss(model: nn.Module, batch: Pairs) -> Tensor:
    """Cross entropy with smoothed labels, mean over the target tokens that are not padding."""
    source, target_in, target_out = batch
    scores = model(source, target_in)
    return F.cross_entropy(
        scores.flatten(0, 1), target_out.flatten(), ignore_index=PAD, label_smoothing=LABEL_SMOOTHING
    )


def count_target_tokens(batch: Pairs) -> int:
    """The number of target tokens of a batch that are not padding."""
    return int((batch[2] != PAD).sum())
