import errno
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from shoestring.errors import DamagedSave, ShoestringError
from shoestring.measuring import measure_allocator
from shoestring.records import seal, unseal
from shoestring.runs import save as module
from shoestring.runs.save import NotSaved, Saves, load_weights
from shoestring.runs.state import ModelState


class Part:
    def __init__(self, value=0.0):
        self.tensor = torch.full((5,), value)
        self.count = value

    def state(self):
        return {"tensor": self.tensor, "count": self.count}

    def restore(self, state):
        self.tensor, self.count = state["tensor"], state["count"]


@pytest.fixture
def saves(tmp_path):
    told = []
    saves = Saves(tmp_path / "saves", told.append)
    saves.__dict__["told"] = told
    return saves


def files(saves):
    return sorted(path for path in saves.folder.rglob("*") if path.is_file())


def test_the_newest_save_is_the_one_that_is_used(saves):
    for update in (3, 20, 100):
        saves.write(update, "f", {"part": Part(update)})
    part, save = Part(), saves.newest()
    save.restore("part", part)
    assert (save.update, save.fingerprint, part.count) == (100, "f", 100.0)
    assert part.tensor.tolist() == [100.0] * 5 and saves.told == []


def test_names_sort_in_the_order_of_updates(saves):
    for update in (9, 10, 10**9):
        saves.write(update, "", {})
    assert sorted(path.name for path in saves.folder.iterdir()) == [saves.path(u).name for u in (9, 10, 10**9)]


def test_a_run_that_never_saved_has_no_newest_save(saves):
    assert saves.newest() is None and saves.updates() == []


def test_damage_to_any_byte_is_detected(saves):
    saves.write(1, "f", {"part": Part(1.0)})
    for path in files(saves):
        whole = path.read_bytes()
        for place in range(len(whole)):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << place % 8
            path.write_bytes(damaged)
            with pytest.raises(DamagedSave):
                saves.check(1)
        path.write_bytes(whole)
    saves.check(1)


@pytest.mark.parametrize("change", [lambda d: d[:-1], lambda d: d + b" ", lambda d: b"", lambda d: None])
def test_a_file_that_is_cut_grown_emptied_or_gone_is_detected(saves, change):
    saves.write(1, "f", {"part": Part(1.0)})
    for path in files(saves):
        whole = path.read_bytes()
        data = change(whole)
        path.unlink() if data is None else path.write_bytes(data)
        with pytest.raises(DamagedSave):
            saves.check(1)
        path.write_bytes(whole)


def test_a_damaged_save_is_passed_over_with_a_warning(saves):
    for update in (1, 2, 3):
        saves.write(update, "f", {"part": Part(update)})
    for update in (2, 3):
        path = saves.path(update) / "part.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert saves.newest().update == 1
    assert len(saves.told) == 1 and "update-0000000002 is damaged" in saves.told[0]
    assert "continuing from update 1" in saves.told[0]


def test_where_all_saves_are_damaged_the_exit_code_says_so(saves):
    saves.write(1, "f", {"part": Part(1.0)})
    (saves.path(1) / "manifest.json").write_text("{}")
    with pytest.raises(DamagedSave, match="no other save is undamaged") as error:
        saves.newest()
    assert error.value.exit_code == 4


def test_nothing_is_restored_of_a_save_that_is_damaged(saves):
    part = Part(7.0)
    saves.write(1, "f", {"one": part, "two": part})
    path = saves.path(1) / "two.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(DamagedSave):
        saves.newest().restore("one", part)
    assert part.count == 7.0


def test_a_damaged_save_is_replaced_when_the_run_reaches_its_update_again(saves):
    saves.write(1, "f", {"part": Part(1.0)})
    (saves.path(1) / "manifest.json").write_text("{}")
    saves.write(1, "f", {"part": Part(2.0)})
    assert saves.newest().values["part"]["count"] == 2.0
    assert [path.name for path in saves.folder.iterdir()] == ["update-0000000001"]


def test_only_the_saves_that_are_wanted_are_kept(saves):
    for update in range(1, 6):
        saves.write(update, "", {})
    saves.keep({2, 4, 5, None})
    assert saves.updates() == [2, 4, 5]


def test_an_old_save_that_cannot_be_removed_is_told_and_tried_again(tmp_path, monkeypatch):
    told: list[str] = []
    saves = Saves(tmp_path / "saves", told.append)
    for update in (1, 2):
        saves.write(update, "", {})
    with monkeypatch.context() as failing:
        failing.setattr("shoestring.runs.save.shutil.rmtree", failing_removal)
        saves.keep({2})
    assert "could not be removed (Input/output error): the newer saves are whole" in told[0]
    assert saves.newest().update == 2
    saves.keep({2})
    assert [path.name for path in saves.folder.iterdir()] == [saves.path(2).name]


def failing_removal(path, ignore_errors=False):
    raise OSError(errno.EIO, "Input/output error")


def test_what_a_killed_process_left_is_no_save_and_is_swept_away(saves):
    saves.write(1, "", {})
    for name in (".writing-update-0000000002", ".removing-update-0000000000", ".replaced-update-0000000001"):
        (saves.folder / name).mkdir()
        (saves.folder / name / "part.safetensors").write_text("half")
    assert saves.updates() == [1] and saves.newest().update == 1
    saves.write(3, "", {})
    assert sorted(path.name for path in saves.folder.iterdir()) == [saves.path(1).name, saves.path(3).name]


@pytest.mark.parametrize("record", [{"a": [1, 2.5, None], "b": {"c": "ü"}}, {}])
def test_a_sealed_record_opens_only_as_it_was_sealed(record):
    assert unseal(seal(record)) == record
    for other in (json.dumps(record).encode(), seal(record) + b"\n", b"[]", b"{}", b"1"):
        with pytest.raises(ValueError):
            unseal(other)


def resealed(saves, change):
    """A save whose manifest somebody changed and sealed again."""
    saves.write(1, "f", {"part": Part(1.0)})
    path = saves.path(1) / "manifest.json"
    record = unseal(path.read_bytes())
    change(record)
    path.write_bytes(seal(record))
    return saves.path(1)


MANIFESTS = {
    **{f"key {key!r} is missing": lambda r, key=key: r.pop(key) for key in ("version", "update", "fingerprint")},
    "key 'values' is missing": lambda r: r.pop("values"),
    "key 'files' is missing": lambda r: r.pop("files"),
    "key 'version' is str": lambda r: r.update(version="1"),
    "key 'update' is float": lambda r: r.update(update=1.0),
    "key 'update' is bool": lambda r: r.update(update=True),
    "key 'fingerprint' is NoneType": lambda r: r.update(fingerprint=None),
    "key 'values' is list": lambda r: r.update(values=[]),
    "key 'files' is list": lambda r: r.update(files=[]),
    "'../../secret', which is not the name of a group": lambda r: r["values"].update({"../../secret": 1}),
    "'../../secret.safetensors', which is not the file": lambda r: r["files"].update({"../../secret.safetensors": {}}),
    "'/etc/passwd', which is not the file": lambda r: r["files"].update({"/etc/passwd": {}}),
    "'other.safetensors', which is not the file": lambda r: r["files"].update({"other.safetensors": {}}),
    "key 'files.part.safetensors.bytes' is missing": lambda r: r["files"]["part.safetensors"].pop("bytes"),
    "key 'files.part.safetensors.bytes' is str": lambda r: r["files"]["part.safetensors"].update(bytes="1"),
    "key 'files.part.safetensors.sha256' is int": lambda r: r["files"]["part.safetensors"].update(sha256=1),
    "key 'files.part.safetensors.bytes' is in a list": lambda r: r["files"].update({"part.safetensors": [1]}),
    "key 'values.part.tensor' names a tensor that": lambda r: r["values"]["part"].update(tensor={"$tensor": "b"}),
    "key 'values.part.count' names a tensor that": lambda r: r["values"]["part"].update(count={"$tensor": ["tensor"]}),
    "key 'values.part' names a tensor that": lambda r: r["files"].clear() or r["values"].update(part={"$tensor": "a"}),
    "key 'values.part.tensor.strides' does not": lambda r: r["values"]["part"]["tensor"].update(strides=[10**12]),
    "key 'values.part.tensor.strides'": lambda r: r["values"]["part"]["tensor"].update(strides="1"),
    "key 'values.part.tensor.device' is int": lambda r: r["values"]["part"]["tensor"].update(device=3),
    "key 'values.part.a.$tuple' is int": lambda r: r["values"]["part"].update(a={"$tuple": 3}),
    "key 'values.part.a.$items' is not a list": lambda r: r["values"]["part"].update(a={"$items": [[[1], 2]]}),
    "deep": lambda r: r["values"].update(part=json.loads("[" * 300 + "]" * 300)),
}


@pytest.mark.parametrize("told", MANIFESTS)
def test_a_sealed_manifest_that_says_something_else_is_refused_by_the_name_of_its_key(saves, told, tmp_path):
    (tmp_path / "secret.safetensors").write_bytes(b"x")
    path = resealed(saves, MANIFESTS[told])
    with pytest.raises(DamagedSave, match=re.escape(told)) as error:
        module.check(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(DamagedSave, match="no other save is undamaged"):
        saves.newest()


def test_a_state_that_a_save_does_not_have_is_named(saves):
    saves.write(1, "f", {"part": Part(1.0)})
    with pytest.raises(DamagedSave, match=r"has no key 'values\.other'"):
        saves.newest().restore("other", Part())


@pytest.mark.parametrize("name", ["manifest.json", "part.safetensors"])
def test_a_pipe_in_a_save_is_refused_and_not_waited_for(saves, name):
    saves.write(1, "f", {"part": Part(1.0)})
    path = saves.path(1) / name
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DamagedSave, match="is not a regular file"):
        module.check(saves.path(1))


def test_a_save_of_another_version_is_not_called_damaged(saves, monkeypatch):
    monkeypatch.setattr(module, "VERSION", 2)
    saves.write(1, "", {})
    monkeypatch.undo()
    with pytest.raises(ShoestringError, match="version 2, this Shoestring reads 1") as error:
        saves.newest()
    assert not isinstance(error.value, DamagedSave)


def test_everything_is_on_the_disk_before_the_save_gets_its_name(saves, monkeypatch):
    """Files, then the hidden folder, then the rename, then the folder that holds the name."""
    calls = []
    sync, rename = os.fsync, type(saves.folder).rename

    def note_sync(handle):
        calls.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        sync(handle)

    def note_rename(path, target):
        calls.append(f"rename to {target.name}")
        return rename(path, target)

    monkeypatch.setattr(module.os, "fsync", note_sync)
    monkeypatch.setattr(type(saves.folder), "rename", note_rename)
    saves.write(1, "", {"part": Part()})
    hidden, final = ".writing-update-0000000001", "update-0000000001"
    assert calls == ["part.safetensors", "manifest.json", hidden, f"rename to {final}", "saves"]


FULL = """
import resource, sys, torch
from pathlib import Path
from shoestring.runs.save import NotSaved, Saves

class Part:
    def state(self):
        return {"tensor": torch.zeros(size)}

saves = Saves(Path(sys.argv[1]))
size = 1000
saves.write(1, "f", {"part": Part()})
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
size = 100_000
try:
    saves.write(2, "f", {"part": Part()})
except NotSaved as error:
    print(error)
print(saves.newest().update, [path.name for path in saves.folder.iterdir()])
"""


def test_when_no_more_can_be_written_the_last_good_save_survives(tmp_path):
    """A real refusal of the system in the middle of a file: it may not grow beyond 100 KB."""
    done = subprocess.run([sys.executable, "-c", FULL, tmp_path / "saves"], capture_output=True, text=True)
    words, state = done.stdout.splitlines()
    assert "update 2 could not be saved" in words and "File too large" in words
    assert "the save of update 1 is complete: make room and resume" in words
    assert state == "1 ['update-0000000001']"


def test_a_full_disk_is_said_in_one_line(saves, monkeypatch):
    saves.write(1, "f", {"part": Part()})

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, "write_tensors", full)
    with pytest.raises(NotSaved, match=r"No space left on device \(.* free\); the save of update 1 is complete"):
        saves.write(2, "f", {"part": Part()})
    assert saves.updates() == [1] and len(list(saves.folder.iterdir())) == 1


def test_saving_a_model_allocates_nothing_of_its_size(saves):
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    used = measure_allocator(lambda: saves.write(1, "", {"model": ModelState(model)}))
    restored = measure_allocator(lambda: saves.newest().restore("model", ModelState(model), in_place=True))
    assert used.peak_bytes == 0 and restored.peak_bytes == 0


def test_weights_are_read_from_a_save_or_a_file_into_a_model(saves):
    one, two, three = (nn.Linear(3, 2) for _ in range(3))
    path = saves.write(1, "", {"model": ModelState(one)})
    load_weights(two, path)
    load_weights(three, path / "model.safetensors")
    assert torch.equal(two.weight, one.weight) and torch.equal(three.weight, one.weight)
    with pytest.raises(ShoestringError, match=r"weight is torch.float32 of shape \(2, 5\).*shape \(2, 3\)"):
        load_weights(nn.Linear(5, 2), path)
    with pytest.raises(ShoestringError, match=r"0.weight is .*and the file has nothing"):
        load_weights(nn.Sequential(nn.Linear(3, 2)), path)


def test_nothing_that_reads_a_run_unpickles_but_weights_only():
    folder = os.path.dirname(module.__file__)
    for name in os.listdir(folder):
        if name.endswith(".py"):
            with open(os.path.join(folder, name)) as file:
                text = file.read()
            assert "torch.save(" not in text and "import pickle" not in text, name
            assert all("weights_only=True" in line for line in text.splitlines() if "torch.load(" in line), name
