"""`train --from FILE`: a run begins with weights that the user has."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import shoestring
from shoestring.cli.main import main


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("weights") / "wrn.safetensors"
    save_file(shoestring.builtin("wrn-10-1", batch=2).model.state_dict(), path)
    return path


def train(folder, *words):
    return main(["train", "wrn-10-1", "--batch", "10", "--updates", "1", "--lr", "1e-30", "--run", str(folder), *words])


def test_a_run_begins_with_the_weights_of_the_file_and_is_resumed_without_it(tmp_path, weights, capsys):
    file = tmp_path / "mine.safetensors"
    file.write_bytes(weights.read_bytes())
    assert train(tmp_path / "run", "--from", str(file)) == 0
    assert f"tensors are those of {file}" in capsys.readouterr().err
    (save,) = sorted((tmp_path / "run" / "saves").iterdir())[-1:]
    saved, given = load_file(save / "model.safetensors"), load_file(file)
    names = [name for name in given if name.endswith("weight")]
    assert names and all(torch.equal(saved[name], given[name]) for name in names)
    assert json.loads((tmp_path / "run" / "record.json").read_text())["settings"]["from"] == str(file)
    file.unlink()
    assert main(["train", "--resume", "--run", str(tmp_path / "run")]) == 0


def test_a_file_that_does_not_fit_is_refused_in_one_line_unless_a_part_is_wanted(tmp_path, weights, capsys):
    state = load_file(weights)
    state["heads"] = state.pop(next(name for name in state if name.endswith("bias")))
    file = tmp_path / "other.safetensors"
    save_file(state, file)
    assert train(tmp_path / "run", "--from", str(file)) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert "does not fit the model: 1 missing" in line and "1 unexpected (heads)" in line and "--partial" in line
    assert train(tmp_path / "run", "--from", str(file), "--partial") == 0
    assert "1 unexpected (heads)" in capsys.readouterr().err


def test_a_part_of_nothing_is_wrong_usage(tmp_path, capsys):
    assert train(tmp_path / "run", "--partial") == 2
    assert "--from FILE" in capsys.readouterr().err
