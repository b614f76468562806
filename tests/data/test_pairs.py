import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from shoestring.data import keep_languages, kept_languages, open_pairs, token_batches
from shoestring.data.files import Rows, read_checked, write_checked
from shoestring.data.language import sentence_pairs
from shoestring.data.vocabulary import PARTS, Vocabulary, encode
from shoestring.errors import DamagedSave, ShoestringError, how_to_install
from shoestring.models.translation import count_target_tokens, shift_right
from shoestring.tokens import EOS, PAD, UNKNOWN


@pytest.fixture(scope="module")
def little():
    return open_pairs()


def write_pairs(folder: Path, count: int = 40, **changed: str) -> Path:
    """train, valid and test in German-like and English; `changed` replaces files, as train_de="text"."""
    folder.mkdir(exist_ok=True)
    for seed, name in enumerate(("train", "valid", "test")):
        sources, targets = zip(*sentence_pairs(count, seed), strict=True)
        for language, lines in (("de", sources), ("en", targets)):
            text = changed.get(f"{name}_{language}", "\n".join(lines) + "\n")
            (folder / f"{name}.{language}").write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


# The generated language


def test_the_generated_pairs_are_the_same_for_a_seed_and_never_repeat():
    first, again = list(sentence_pairs(200, 3)), list(sentence_pairs(200, 3))
    assert first == again and len({source for source, _ in first}) == 200
    assert first != list(sentence_pairs(200, 4))


def test_the_generated_language_agrees_and_reorders():
    for source, target in sentence_pairs(300, 1):
        words = target.split()
        for article, following in pairwise(words):
            if article in ("a", "an"):
                assert (article == "an") == (following[0] in "aeiou")
        assert source.split()[-1][-1] in "oaum"  # a verb, which agrees with its subject, ends the sentence


def test_no_test_sentence_of_the_embedded_language_is_trained_on(little):
    assert (len(little.train), len(little.valid), len(little.test)) == (8000, 500, 500)
    trained = {little.train.source[row].tobytes() for row in range(8000)}
    assert not any(little.test.source[row].tobytes() in trained for row in range(500))
    assert not (little.test.source.data == UNKNOWN).any() and not (little.test.target.data == UNKNOWN).any()


# Vocabularies


def test_ids_become_the_text_again(little):
    for row in (0, 17, 499):
        assert little.target.decode(little.test.target[row]) == little.test.references.text(row)
        assert little.test.target[row][-1] == EOS


def test_frequent_pieces_come_first_and_unseen_ones_are_unknown():
    words = Vocabulary.of(Rows.of_texts(["b a b", "b c a"]))
    assert words.ids() == {"b": 4, "a": 5, "c": 6} and len(words) == 7
    ids = encode(Rows.of_texts(["a z"]), words)[0].tolist()
    assert ids == [5, UNKNOWN, EOS] and words.decode([*ids, 4]) == "a <unk>"


def test_text_that_is_split_into_parts_already_is_taken_as_it_is(tmp_path):
    folder = write_pairs(tmp_path, train_en="the ho@@ use\n" * 40)
    pairs = open_pairs(folder)
    assert pairs.target.mark == PARTS and pairs.target.ids() == {"ho@@": 4, "the": 5, "use": 6}
    assert pairs.train.references.text(0) == pairs.target.decode(pairs.train.target[0]) == "the house"


def test_byte_pairs_are_learned_once_and_give_the_text_back(tmp_path, monkeypatch):
    pytest.importorskip("sentencepiece")
    folder = write_pairs(tmp_path / "data", 200)
    pairs = open_pairs(folder, vocabulary=120, cache=tmp_path / "cache")
    for row in (0, 5, 199):
        assert pairs.target.decode(pairs.train.target[row]) == pairs.train.references.text(row)
    assert len(pairs.source) < 130 and len(pairs.target) < 130  # pieces of the other language are left out
    monkeypatch.setattr("shoestring.data.vocabulary._learn", lambda *_: pytest.fail("learned twice"))
    again = open_pairs(folder, vocabulary=120, cache=tmp_path / "cache")
    assert (again.train.target.data == pairs.train.target.data).all()


def test_a_damaged_cache_is_learned_again(tmp_path):
    pytest.importorskip("sentencepiece")
    folder = write_pairs(tmp_path / "data", 200)
    first = open_pairs(folder, vocabulary=120, cache=tmp_path / "cache")
    (model,) = (tmp_path / "cache").iterdir()
    whole = bytearray(model.read_bytes())
    whole[len(whole) // 2] ^= 1
    model.write_bytes(whole)
    again = open_pairs(folder, vocabulary=120, cache=tmp_path / "cache")
    assert (again.train.target.data == first.train.target.data).all() and model.read_bytes() != whole


def test_what_is_kept_in_a_cache_is_whole_or_nothing(tmp_path):
    write_checked(tmp_path / "file", b"content")
    assert read_checked(tmp_path / "file") == b"content" and len(list(tmp_path.iterdir())) == 1
    (tmp_path / "file").write_bytes((tmp_path / "file").read_bytes()[:-1])
    assert read_checked(tmp_path / "file") is None and read_checked(tmp_path / "nothing") is None


def test_source_and_target_follow_the_folder_name(tmp_path):
    write_pairs(tmp_path / "set.en-de")
    assert open_pairs(tmp_path / "set.en-de", vocabulary=None).languages == ("en", "de")
    write_pairs(tmp_path / "set")
    assert open_pairs(tmp_path / "set", vocabulary=None).languages == ("de", "en")
    assert open_pairs(tmp_path / "set", vocabulary=None, languages=("en", "de")).languages == ("en", "de")


# Batches


def test_a_batch_is_what_the_transformer_takes(little):
    ((source, target_in, target_out),) = token_batches(little.train, 500, seed=1).read(0, 3)
    assert source.dtype == torch.int64 and len(source) == len(target_out) > 1
    assert torch.equal(target_in, shift_right(target_out))
    for ids in (source, target_out):
        ends = (ids == EOS).int().argmax(1)
        assert ((ids == EOS).sum(1) == 1).all()
        assert (((ids == PAD).int().argmax(1) == ends + 1) | (ends == ids.shape[1] - 1)).all()


def test_an_epoch_serves_each_pair_once_in_batches_of_bounded_size(little):
    batches = token_batches(little.train, 1000, seed=1)
    rows = [batches.rows(2, number) for number in range(len(batches))]
    assert sorted(np.concatenate(rows)) == list(range(8000))
    pieces = [piece for number in range(0, len(batches), 9) for piece in batches.read(2, number)]
    assert all(max(source.numel(), out.numel()) <= 1000 for source, _, out in pieces)
    padding = sum((out == PAD).sum() for _, _, out in pieces) / sum(out.numel() for _, _, out in pieces)
    assert padding < 0.15  # like lengths are together


def test_microbatches_hold_the_same_pairs_as_their_batch(little):
    whole, split = (token_batches(little.train, 1000, size, seed=1) for size in (None, 100))
    (batch,), pieces = whole.read(4, 7), split.read(4, 7)
    assert len(pieces) > 5 and all(max(p[0].numel(), p[2].numel()) <= 100 for p in pieces)
    assert count_target_tokens(batch) == sum(map(count_target_tokens, pieces))
    assert [row[row != PAD].tolist() for row in batch[0]] == [
        row[row != PAD].tolist() for piece in pieces for row in piece[0]
    ]


def test_batches_come_in_another_order_each_epoch_and_can_be_read_again(little):
    batches = token_batches(little.train, 1000, seed=1)
    firsts = [[batches.rows(epoch, number)[0] for number in range(len(batches))] for epoch in (0, 1, 0)]
    assert firsts[0] == firsts[2] != firsts[1] and sorted(firsts[0]) == sorted(firsts[1])
    again = token_batches(open_pairs().train, 1000, seed=1).read(3, 5)
    assert all(torch.equal(a, b) for a, b in zip(batches.read(3, 5)[0], again[0], strict=True))


def test_batches_without_a_seed_come_from_short_to_long(little):
    batches = token_batches(little.valid, 1000)
    widths = [max(piece[0].shape[1], piece[2].shape[1]) for n in range(len(batches)) for piece in batches.read(0, n)]
    assert widths == sorted(widths)


def test_a_sentence_that_does_not_fit_is_named(little):
    with pytest.raises(ShoestringError, match=r"sentence [\d,]+ of train has \d+ tokens and does not fit into 20"):
        token_batches(little.train, 1000, microbatch=20)
    kept = token_batches(little.train, 1000, microbatch=20, longest=20)
    assert all(max(p[0].shape[1], p[2].shape[1]) <= 20 for p in kept.read(0, len(kept) - 1))
    with pytest.raises(ShoestringError, match="at most 1 tokens"):
        token_batches(little.train, longest=1)


# What is refused


def refusal(folder, **options) -> str:
    with pytest.raises(ShoestringError) as caught:
        open_pairs(folder, **{"vocabulary": None} | options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_folder_or_file_is_named(tmp_path):
    assert "does not exist" in refusal(tmp_path / "nowhere")
    assert "0 files train.LANGUAGE" in (words := refusal(tmp_path)) and "complete the folder" in words
    write_pairs(tmp_path)
    (tmp_path / "valid.en").unlink()
    assert "valid.en is missing" in refusal(tmp_path)
    (tmp_path / "train.fr").write_text("un\n")
    assert "3 files train.LANGUAGE" in refusal(tmp_path)
    assert "train.nl is missing" in refusal(tmp_path, languages=("de", "nl"))


def test_files_whose_lines_do_not_pair_up_are_refused(tmp_path):
    message = refusal(write_pairs(tmp_path, valid_en="one\ntwo\n"))
    assert "valid.de has 40 lines and" in message and "valid.en 2" in message


def test_an_empty_sentence_is_named_with_its_line(tmp_path):
    assert "test.de, line 2: an empty sentence" in refusal(write_pairs(tmp_path, test_de="a\n \nb\n"))


def test_text_that_is_not_utf8_is_named_with_its_line(tmp_path):
    assert "test.en, line 2: not UTF-8" in refusal(write_pairs(tmp_path, test_en=b"a\n\xff\n"))


def test_more_pieces_than_the_text_has_are_refused(tmp_path):
    pytest.importorskip("sentencepiece")
    message = refusal(write_pairs(tmp_path / "data"), vocabulary=10_000, cache=tmp_path / "cache")
    assert "no byte-pair encoding of 10,000 pieces" in message


def test_byte_pairs_without_sentencepiece_say_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    assert how_to_install("nlp") in refusal(write_pairs(tmp_path), vocabulary=100)


@pytest.mark.parametrize("size", [100, None])
def test_languages_that_are_kept_encode_as_before_without_the_cache_and_damage_is_noticed(tmp_path, size):
    pytest.importorskip("sentencepiece")
    folder = write_pairs(tmp_path / "data")
    pairs = open_pairs(folder, vocabulary=size, cache=tmp_path / "cache")
    keep_languages(tmp_path / "kept", pairs.known)
    known = kept_languages(tmp_path / "kept")
    again = open_pairs(folder, cache=tmp_path / "nowhere", known=known)
    assert known.names == pairs.languages and not (tmp_path / "nowhere").exists()
    for one, other in ((pairs.train, again.train), (pairs.test, again.test)):
        assert one.source.data.tolist() == other.source.data.tolist()
        assert one.target.data.tolist() == other.target.data.tolist()
    assert known.target.decode(pairs.train.target[0]) == pairs.target.decode(pairs.train.target[0])
    assert kept_languages(tmp_path) is None
    for path in (tmp_path / "kept").iterdir():
        data = path.read_bytes()
        path.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
        with pytest.raises(DamagedSave, match="is damaged"):
            kept_languages(tmp_path / "kept")
        path.write_bytes(data)


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_share_each_batch_and_leave_out_no_pair(little, processes):
    whole = token_batches(little.train, 300, 100, seed=1)
    parts = [whole.shared(process, processes) for process in range(processes)]
    for number in range(len(whole)):
        rows = [part.rows(0, number) for part in parts]
        assert sorted(np.concatenate(rows)) == sorted(whole.rows(0, number))
        for part, own in zip(parts, rows, strict=True):
            assert sum(len(piece[0]) for piece in part.read(0, number)) == len(own)
