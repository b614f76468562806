import copy
import itertools
import sys

import pytest
import torch
from torch import nn

from shoestring.data import open_pairs, token_batches
from shoestring.data.files import Rows
from shoestring.data.vocabulary import Vocabulary, encode
from shoestring.errors import ShoestringError
from shoestring.models.dynamicconv import DynamicConvTransformer, Settings
from shoestring.models.translation import translation_loss
from shoestring.tokens import BOS, EOS, PAD, SPECIAL_IDS
from shoestring.training.translate import beam_search, bleu, greedy_search, groups, next_logs, translate

WORDS = 3
LONGEST = 4


class Table(nn.Module):
    """Scores from a table of the source's first word, the place and the last id: a search can be checked."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        size = SPECIAL_IDS + WORDS
        self.scores = 2 * torch.randn(size, LONGEST + 1, size, size, generator=generator)

    def encode(self, source):
        return {"first": source[:, 0], "padding": source == PAD}

    def decode(self, target_in, memory):
        places = torch.arange(target_in.shape[1]).expand_as(target_in)
        return self.scores[memory["first"][:, None], places, target_in]


SOURCE = torch.tensor([[4, 2, 1], [5, 6, 2], [6, 2, 1]])


def log_probability(model, source, ids):
    memory, prefix = model.encode(source[None]), [EOS]
    total = 0.0
    for token in ids:
        total += next_logs(model, torch.tensor([prefix]), memory)[0, token].item()
        prefix.append(token)
    return total


def all_targets():
    """Every target that ends within LONGEST ids, or is that long and has not ended."""
    words = [3, *range(SPECIAL_IDS, SPECIAL_IDS + WORDS)]
    for length in range(LONGEST):
        yield from ([*ids, EOS] for ids in itertools.product(words, repeat=length))
    yield from (list(ids) for ids in itertools.product(words, repeat=LONGEST))


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_a_wide_beam_finds_the_best_of_all_targets(penalty):
    model = Table(1)
    found = beam_search(model, SOURCE, beams=600, length_penalty=penalty, longest=LONGEST)
    for source, ids in zip(SOURCE, found, strict=True):
        best = max(all_targets(), key=lambda t: log_probability(model, source, t) / len(t) ** penalty)
        assert ids == [token for token in best if token != EOS]


def test_a_length_penalty_favours_longer_targets():
    lengths = [
        sum(map(len, beam_search(Table(seed), SOURCE, beams=50, length_penalty=penalty, longest=LONGEST)))
        for penalty in (0.0, 2.0)
        for seed in range(3)
    ]
    assert sum(lengths[:3]) < sum(lengths[3:])


def test_greedy_search_takes_the_likeliest_id_each_time():
    model = Table(2)
    for source, ids in zip(SOURCE, greedy_search(model, SOURCE, longest=LONGEST), strict=True):
        prefix = [EOS]
        while len(prefix) <= LONGEST:
            token = next_logs(model, torch.tensor([prefix]), model.encode(source[None]))[0].argmax().item()
            if token == EOS:
                break
            prefix.append(token)
        assert ids == prefix[1:]


def test_sentences_are_searched_together_as_they_are_alone():
    model = Table(3)
    alone = [beam_search(model, source[None], beams=3, longest=LONGEST)[0] for source in SOURCE]
    assert beam_search(model, SOURCE, beams=3, longest=LONGEST) == alone


def test_padding_and_the_begin_are_never_found():
    found = beam_search(Table(4), SOURCE, beams=200, length_penalty=5.0, longest=LONGEST)
    assert not {PAD, BOS} & set(itertools.chain(*found)) and all(len(ids) <= LONGEST for ids in found)


def test_no_gradient_is_kept_by_a_search():
    model = DynamicConvTransformer(Settings(20, 20, 16, 16, 2, (3,), (3,))).eval()
    assert len(beam_search(model, SOURCE, beams=2, longest=3)) == 3
    assert all(p.grad is None for p in model.parameters())


def test_translations_come_in_the_order_of_the_sentences_and_within_their_tokens():
    texts = ["a b c a b c", "a", "b a", "c c c"]
    rows = Rows.of_texts(texts)
    words = Vocabulary.of(rows)

    class Copy(nn.Module):
        largest = 0

        def encode(self, source):
            return source

        def decode(self, target_in, memory):
            Copy.largest = max(Copy.largest, target_in.numel())
            wide = nn.functional.pad(memory, (0, max(0, target_in.shape[1] - memory.shape[1])), value=EOS)
            ids = wide[:, : target_in.shape[1]].masked_fill(wide[:, : target_in.shape[1]] == PAD, EOS)
            return 10.0 * nn.functional.one_hot(ids, len(words))

    assert translate(Copy(), encode(rows, words), words, beams=2, tokens=60) == texts
    assert Copy.largest <= 60


def test_groups_hold_every_sentence_once_and_at_least_one():
    lengths = encode(Rows.of_texts(["a " * n for n in (5, 1, 9, 30, 2)]), Vocabulary.of(Rows.of_texts(["a"]))).lengths()
    assert [rows.tolist() for rows in groups(lengths, beams=1, tokens=30)] == [[1, 4], [0], [2], [3]]


def test_bleu_is_100_for_the_references_themselves():
    pytest.importorskip("sacrebleu")
    references = ["the old dog sees a cat near the house .", "many birds sing ."]
    assert bleu(references, references) == pytest.approx(100)
    assert 0 < bleu(["the old dog sees a bird near the house .", "many birds sang ."], references) < 80


def test_bleu_says_what_is_missing(monkeypatch):
    pytest.importorskip("sacrebleu")
    with pytest.raises(ShoestringError, match="1 translations have 2 references"):
        bleu(["a"], ["a", "b"])
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(ShoestringError, match=r"pip install '.*\[nlp\]'"):
        bleu(["a"], ["a"])


@pytest.mark.slow
def test_the_little_language_is_learned_by_a_small_transformer():
    torch.manual_seed(0)
    pairs = open_pairs()
    sizes = Settings(len(pairs.source), len(pairs.target), 128, 256, 4, (3, 7, 15), (3, 7, 15), dropout=0.1)
    model = DynamicConvTransformer(sizes)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98))
    batches = token_batches(pairs.train, 1000, seed=0)
    for epoch in range(5):
        for number in range(len(batches)):
            translation_loss(model, batches.read(epoch, number)[0]).backward()
            optimizer.step()
            optimizer.zero_grad()
    found = translate(model.eval(), pairs.test.source, pairs.target, beams=1)
    assert bleu(found, list(pairs.test.references.texts())) > 80


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_search_with_a_past_finds_what_it_finds_without(beams, dtype):
    torch.manual_seed(0)
    model = DynamicConvTransformer(Settings(30, 30, 16, 16, 2, (3, 7), (3, 7))).eval()
    model.decoder.scores.weight.data *= 8  # so that no two scores are nearly the same
    source = torch.randint(SPECIAL_IDS, 30, (5, 9))

    class Whole:  # the same model, without a past
        encode, decode = model.encode, model.decode

    lean = copy.deepcopy(model).to(dtype)
    slow = beam_search(Whole, source, beams)
    agree = [a == b for a, b in zip(beam_search(lean, source, beams), slow, strict=True)]
    assert all(agree) if dtype is torch.float32 else sum(agree) >= 4
    assert len({len(ids) for ids in slow}) > 1 or len(slow[0]) > 5
