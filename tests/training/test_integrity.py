"""Nothing that a run folder holds changes unseen: every file has a checksum, and every save says what it is of."""

import json
import os
import random
import shutil
import signal

import pytest
import torch
from small import Noise, right_answers, task

from shoestring import Plan, ShoestringError, load_weights
from shoestring.errors import DamagedSave
from shoestring.records import read_sealed, seal
from shoestring.reporting.page import run_data, write_steps
from shoestring.reporting.page.steps import steps_of
from shoestring.runs.export import averaged_file, export
from shoestring.runs.folder import RunFolder
from shoestring.runs.log import Log
from shoestring.runs.record import read_record
from shoestring.runs.start import open_weights
from shoestring.training.interrupts import Interrupted
from shoestring.training.loop import train

HOW = {"epochs": 3, "average": 2, "evaluation": right_answers()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(task(), Noise(), run=folder, **HOW)
    write_steps(folder, {})
    export(folder, folder.parent / "model.safetensors")
    return folder


@pytest.fixture
def run(finished, tmp_path):
    shutil.copytree(finished.parent, tmp_path / "copy")
    return tmp_path / "copy" / "run"


def flips(path, count, seed=0):
    """Damages a file in one bit after the other, and mends it again."""
    whole, dice = path.read_bytes(), random.Random(seed)
    for _ in range(count):
        place, bit = dice.randrange(len(whole)), dice.randrange(8)
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
        yield place
    path.write_bytes(whole)


def refused(read):
    try:
        read()
    except (ShoestringError, ValueError) as error:
        return "\n" not in str(error)
    return False


def told_of_record(path):
    told = []
    return refused(lambda: read_record(path, told.append)) or bool(told)


def test_each_flipped_bit_of_a_record_a_plan_or_the_steps_is_seen(run):
    readers = {
        "record.json": told_of_record,
        "plan.json": lambda path: refused(lambda: Plan.from_json(path.read_text())),
        "step.json": lambda path: bool(steps_of(path.parent, None, None)[1]),
    }
    for name, seen in readers.items():
        assert not seen(run / name)
        for place in flips(run / name, 300):
            assert seen(run / name), f"byte {place} of {name}"


def test_each_flipped_bit_of_weights_that_no_save_holds_is_seen(run):
    for path in (run / "averaged.safetensors", run.parent / "model.safetensors"):
        assert not refused(lambda path=path: open_weights(path))
        for place in flips(path, 300):
            assert refused(lambda path=path: open_weights(path)), f"byte {place} of {path.name}"


def test_every_way_to_averaged_weights_compares_them_with_their_checksum(run):
    path = run / "averaged.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    ways = {
        "evaluate": lambda: averaged_file(RunFolder(run)),
        "export": lambda: export(run, run.parent / "other.safetensors", "averaged"),
        "load_weights": lambda: load_weights(task().model, path),
        "--from": lambda: open_weights(path),
    }
    for read in ways.values():
        with pytest.raises(DamagedSave, match="is not that of its checksum"):
            read()
    assert not (run.parent / "other.safetensors").exists()


def test_each_flipped_bit_of_a_log_is_seen_and_its_line_named(run):
    for name in ("log.jsonl", "measures.jsonl"):
        log = Log(run / name)
        assert log.damage() == ""
        lines = log.path.read_bytes()
        for place in flips(log.path, 300):
            line = lines[:place].count(b"\n") + 1
            assert f"line {line:,}" in log.damage() or f"line {line + 1:,}" in log.damage(), f"byte {place} of {name}"


@pytest.mark.parametrize("change", [
    lambda lines: lines[:3] + lines[4:],
    lambda lines: lines[1:],
    lambda lines: [lines[1], lines[0], *lines[2:]],
    lambda lines: [*lines[:4], lines[2], *lines[4:]],
])  # fmt: skip
def test_a_log_whose_lines_were_removed_moved_or_repeated_is_damaged(run, change):
    path = run / "log.jsonl"
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    assert "is damaged: line" in Log(path).damage()


def test_half_a_line_at_the_end_of_a_log_is_no_damage(run):
    path = run / "log.jsonl"
    whole = path.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    for left in range(1, last + 1):
        path.write_bytes(whole[:-left])
        assert Log(path).damage() == "" and len(list(Log(path).read())) == len(whole.splitlines()) - 1


def test_a_damaged_log_is_told_when_the_run_goes_on_and_when_it_is_shown(tmp_path):
    with pytest.raises(Interrupted):
        train(task(), Noise(), run=tmp_path, listeners=[Stop(8)], **HOW)
    for name in ("log.jsonl", "measures.jsonl"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes().replace(b'"update": 3', b'"update": 2', 1))
    assert any("log.jsonl is damaged: line 3" in note for note in run_data(tmp_path)["notes"])
    with pytest.warns(UserWarning) as told:
        train(task(), Noise(), run=tmp_path, resume=True, **HOW)
    words = [str(one.message) for one in told]
    for name in ("log.jsonl", "measures.jsonl"):
        assert any(f"{name} is damaged: line 3 is not as it was written; training does not" in text for text in words)


def test_a_page_tells_of_a_log_that_lost_whole_lines(run):
    path = run / "log.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:4]))
    assert any("its log ends at update 4, and 15 were done" in note for note in run_data(run)["notes"])


class Stop:
    """Interrupts a run at an update."""

    def __init__(self, update):
        self.update = update

    def __call__(self, event):
        if getattr(event, "update", 0) == self.update and type(event).__name__ == "Updated":
            os.kill(os.getpid(), signal.SIGTERM)


# -- saves that are not what their place says ----------------------------------------------------------------------
def test_a_save_under_another_updates_name_is_not_used(run):
    saves = RunFolder(run).saves
    first, last = saves.updates()[0], saves.updates()[-1]
    saves.path(last).rename(run / "aside")
    saves.path(first).rename(saves.path(last))
    with pytest.raises(
        DamagedSave, match=f"is the save of update {first}, so it was renamed: call it update-0+{first}"
    ):
        saves.check(last)
    (run / "aside").rename(saves.path(first))
    with pytest.raises(DamagedSave, match="was renamed"):
        saves.check(first)


def test_a_run_goes_on_from_the_newest_save_that_is_its_own(tmp_path):
    """The newest save is replaced by that of another run: the one before it is used, and the end is the same."""
    whole, lean = task(), task()
    train(whole, Noise(), run=tmp_path / "whole", **HOW)
    for name, seed in (("run", 0), ("other", 1)):
        with pytest.raises(Interrupted):
            train(task(), Noise(), run=tmp_path / name, listeners=[Stop(12)], seed=seed, save_every=4, **HOW)
    save = RunFolder(tmp_path / "run").saves.path(12)
    shutil.rmtree(save)
    shutil.copytree(RunFolder(tmp_path / "other").saves.path(12), save)
    with pytest.warns(UserWarning, match="is of another run .* continuing from update 10"):
        train(lean, Noise(), run=tmp_path / "run", resume=True, save_every=4, **HOW)
    for one, other in zip(whole.model.parameters(), lean.model.parameters(), strict=True):
        assert torch.equal(one, other)
    shutil.rmtree(save.parent)
    shutil.copytree(tmp_path / "other" / "saves", save.parent)
    for weights in ("best", "last"):
        with pytest.raises(DamagedSave, match="is of another run"):
            export(tmp_path / "run", tmp_path / "model.safetensors", weights)


def test_equal_runs_have_equal_ids_and_others_have_others(tmp_path):
    def id_of(name, made=None, **how):
        return train(made or task(), Noise(), run=tmp_path / name, **{"epochs": 1} | how).run_id

    weights = task()
    with torch.no_grad():
        weights.model.head.bias[0] += 1e-7
    ids = [id_of("a"), id_of("b", weights), id_of("c", seed=3), id_of("d", epochs=2)]
    assert len(set(ids)) == 4 and id_of("again") == ids[0]


# -- saves that are gone -------------------------------------------------------------------------------------------
def test_a_run_whose_saves_were_deleted_does_not_begin_anew_unasked(tmp_path):
    whole, again = task(), task()
    train(whole, Noise(), run=tmp_path / "whole", **HOW)
    with pytest.raises(Interrupted):
        train(task(), Noise(), run=tmp_path / "run", listeners=[Stop(8)], **HOW)
    shutil.rmtree(tmp_path / "run" / "saves")
    with pytest.raises(DamagedSave, match=r"has done 8 updates, and all its saves are gone.*--start-over"):
        train(task(), Noise(), run=tmp_path / "run", resume=True, **HOW)
    train(again, Noise(), run=tmp_path / "run", resume=True, start_over=True, **HOW)
    for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert (tmp_path / "run" / "log.jsonl").read_bytes() == (tmp_path / "whole" / "log.jsonl").read_bytes()


def test_a_save_that_is_gone_is_told_where_an_earlier_one_is_left(tmp_path):
    with pytest.raises(Interrupted):
        train(task(), Noise(), run=tmp_path, listeners=[Stop(8)], **HOW)
    shutil.rmtree(RunFolder(tmp_path).saves.path(8))
    with pytest.warns(UserWarning, match="has done 8 updates, and the save of update 8 is gone: the run goes on"):
        assert train(task(), Noise(), run=tmp_path, resume=True, **HOW).finished


# -- folders of earlier versions -----------------------------------------------------------------------------------
def as_it_was_before(run):
    """A run folder without checksums and ids, as version 0.1 wrote it."""
    record = read_sealed((run / "record.json").read_bytes())[0]
    del record["run_id"]
    (run / "record.json").write_text(json.dumps(record, indent=2))
    (run / "plan.json").write_text(json.dumps(read_sealed((run / "plan.json").read_bytes())[0], indent=2))
    for name in ("log.jsonl", "measures.jsonl"):
        lines = [line.content for line in Log(run / name).read()]
        (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    for path in (run / "saves").rglob("manifest.json"):
        manifest = read_sealed(path.read_bytes())[0]
        del manifest["run"]
        manifest["values"]["run"]["log_bytes"] = (run / "log.jsonl").stat().st_size
        path.write_bytes(seal(manifest))


def test_a_run_of_an_earlier_version_goes_on_with_a_note(tmp_path):
    with pytest.raises(Interrupted):
        train(task(), Noise(), run=tmp_path, listeners=[Stop(8)], **HOW)
    as_it_was_before(tmp_path)
    with pytest.warns(UserWarning, match="record.json has no checksum, as an earlier version wrote it") as told:
        assert train(task(), Noise(), run=tmp_path, resume=True, **HOW).finished
    assert len(told) == 1 and Log(tmp_path / "log.jsonl").damage() == ""
    assert read_sealed((tmp_path / "record.json").read_bytes())[1]
