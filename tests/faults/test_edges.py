"""Types at every edge: what is wrong is named in one line, before memory is taken, and nothing is unexpected."""

import json
import os
import struct
import tracemalloc

import damaged_files as files
import odd_lines as lines
import pytest
import torch

from shoestring.errors import DamagedSave, ShoestringError
from shoestring.runs.save import Saves, check
from shoestring.runs.tensorfile import TensorFile

# What `main` answers to names that no file has, or that name something else.
PLACES = {
    "x" * 300: "'xxxxxxxxxxxxxxxxxxxx'... is no name of a file: it has 300 bytes",
    "x" * 5000 + ".py:task": "5,008 bytes",
    "a\0b.py:task": "has a NUL in it",
    "..:x": "'..' is no module: write MODEL as file.py:function or package.module:function",
    "a..b:x": "'a..b' is no module",
    "builtins:exit": "'builtins:exit' raised SystemExit: None (to end the program)",
    "mine.py:leaves": "raised SystemExit: enough (line 20 of mine.py)",
    "mine.py:leaves_in_loss": "raised SystemExit: 3 (line 23 of mine.py)",
    "mine.py:no_parameters": "the model has no parameter that requires a gradient: there is nothing to train",
    "pipe.py:task": "is not a regular file",
    "folder.py:task": "cannot be read: Is a directory",
    "\udcff\udcfe.py:task": "there is no file",
}


@pytest.mark.parametrize("place", PLACES, ids=lambda place: repr(place)[:20])
@pytest.mark.parametrize("command", ["profile", "plan"])
def test_a_model_that_cannot_be_is_refused_in_one_line(place, command, tmp_path):
    with lines.desk(tmp_path):
        code, said = lines.answer([command, place])
    progress, last = said.splitlines()[:-1], said.splitlines()[-1]
    assert code == 2 and PLACES[place] in last and lines.wrong(code, said) == ""
    assert all("planning" in line for line in progress)


@pytest.mark.parametrize("words", [
    ["--optimizer", "8bit"], ["--activations", "offload"], ["--budget", "7MB"], ["--devices", "2"],
])  # fmt: skip
def test_what_the_papers_rules_do_not_know_is_refused_by_its_name(words, tmp_path):
    with lines.desk(tmp_path):
        code, said = lines.answer(["profile", "wrn-10-0.1", "--rules", "paper", *words])
    assert code == 2 and f"the paper's rules know no {' '.join(words)}" in said


def test_command_lines_made_at_random_answer_or_are_refused_in_one_line(tmp_path):
    codes, bad = lines.check(60, 0, tmp_path)
    assert not bad, bad[:3]
    assert codes[2] > 20 and sum(codes.values()) == 60


def test_what_a_supervised_run_says_is_heard(tmp_path):
    with lines.desk(tmp_path):
        code, said = lines.answer(["train", "mine.py", "--supervise", "--updates", "1", "--run", "run"])
    assert code == 2 and "'mine.py' names no function" in said and lines.wrong(code, said) == ""


@pytest.mark.parametrize("family", files.FAMILIES)
def test_files_damaged_at_random_are_read_or_refused_in_one_line(family, tmp_path):
    found, bad = files.check_family(family, 150, 0, tmp_path)
    assert not bad, bad[:3]
    assert found["read"] > 5 and (found["refused"] > 50 or family in ("results", "settings"))


# -- files of weights ----------------------------------------------------------------------------------------------
def weights(path, places, values=60, length=None):
    text = places if isinstance(places, bytes) else json.dumps(places).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text)
    with path.open("r+b") as file:
        file.truncate(8 + len(text) + values)
    return path


def place(shape, start, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


HEADERS = {
    "overlap": {"a": place([3], 0, 12), "b": place([3], 8, 20)},
    "the same bytes": {"a": place([3], 0, 12), "b": place([3], 0, 12)},
    "a gap": {"a": place([3], 0, 12), "b": place([3], 16, 28)},
    "bytes of no tensor": {"a": place([3], 0, 12)},
    "4 TB": {"a": place([10**12], 0, 4 * 10**12)},
    "4 TB that are called 60 bytes": {"a": place([10**12], 0, 60)},
    "no elements of 2^120 bytes": {"a": place([0, 2**60, 2**60], 0, 0), "b": place([15], 0, 60)},
    "10,000 dimensions": {"a": place([1] * 10_000, 0, 4), "b": place([14], 4, 60)},
    "words that are no words": {"__metadata__": {"a": [1]}, "a": place([15], 0, 60)},
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_cannot_be_is_refused_before_memory_is_taken(name, tmp_path):
    path = weights(tmp_path / "a.safetensors", HEADERS[name])
    assert refused_within(path, 2**20)


@pytest.mark.parametrize("text", [b"[" * 10**6, b'{"a":' * 10**5, b"[0," * 10**6, b'"' + b"x" * 10**6])
def test_a_header_that_is_nested_deep_or_never_ends_is_refused(text, tmp_path):
    assert refused_within(weights(tmp_path / "a.safetensors", text), 64 * 2**20)


def test_a_header_of_48_mb_is_not_read(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", 48 * 2**20))
    with path.open("r+b") as file:
        file.truncate(64 * 2**20)
    assert refused_within(path, 2**20)


def refused_within(path, most_bytes):
    """Whether a file is refused as damaged while Python takes no more than that."""
    tracemalloc.start()
    try:
        with pytest.raises(DamagedSave) as told:
            TensorFile(path)
        return tracemalloc.get_traced_memory()[1] <= most_bytes and "\n" not in str(told.value)
    finally:
        tracemalloc.stop()


def test_a_save_whose_file_has_grown_by_terabytes_is_refused_at_once(tmp_path):
    path = Saves(tmp_path).write(1, "f", {"part": files._Part()}) / "part.safetensors"
    with path.open("r+b") as file:
        file.truncate(2**42)
    with pytest.raises(DamagedSave, match=r"has 4,398,046,511,104 bytes"):
        check(path.parent)


@pytest.mark.parametrize("name", ["manifest.json", "part.safetensors"])
@pytest.mark.parametrize("kind", ["link", "pipe", "device", "folder"])
def test_what_is_no_file_of_the_saves_own_is_refused(name, kind, tmp_path):
    path = Saves(tmp_path / "saves").write(1, "f", {"part": files._Part()}) / name
    path.rename(tmp_path / "outside")
    if kind == "link":
        path.symlink_to(tmp_path / "outside")
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(DamagedSave, match=r"is a link|is not a regular file"):
        check(path.parent)


def test_weights_may_be_reached_through_a_link(tmp_path):
    """As in the cache of Hugging Face."""
    torch.nn.Linear(2, 1)
    path = weights(tmp_path / "blob", {"a": place([15], 0, 60)})
    (tmp_path / "a.safetensors").symlink_to(path)
    assert list(TensorFile(tmp_path / "a.safetensors").entries) == ["a"]


@pytest.mark.parametrize("name", ["plan.json", "record.json"])
def test_a_pipe_or_a_device_in_place_of_a_file_is_not_waited_for(name, tmp_path):
    with lines.desk(tmp_path):
        os.mkdir("run")
        os.mkfifo(f"run/{name}")
        for words in (["train", "--resume", "--run", "run"], ["evaluate", "run"], ["report", "run", "-o", "out.html"]):
            code, said = lines.answer(words)
            assert lines.wrong(code, said) == "", (words, code, said)
        for plan in ("pipe", "/dev/zero"):
            code, said = lines.answer(
                ["train", "mine.py:task", "--data", "mine.py:batches", "--updates", "1", "--plan", plan]
            )
            assert code == 2 and "not a regular file" in said


def test_one_error_of_ours_is_one_line():
    with pytest.raises(AssertionError):
        files.require_one_line(ShoestringError("two\nlines"))
