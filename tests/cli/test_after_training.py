"""Life after training: each command needs the run folder alone, wherever that is."""

import json
import os
import re
import shutil
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import shoestring as library
from shoestring.data import keep_languages, open_images, open_pairs

sys.path.append(os.path.join(os.path.dirname(__file__), "..", "data"))
from layouts import write_cifar_binary

MODEL = """
import torch
from torch import nn
from shoestring import SGD, Task

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.middle, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 10)
        self.again = self.middle  # a module under two names
        self.register_buffer("ones", torch.ones(3), persistent=False)

    def forward(self, images):
        return self.last(self.again(self.middle(self.conv(images))).mean((2, 3)))

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def task(batch=4):
    torch.manual_seed(0)
    return Task(Net(), loss, (torch.zeros(batch, 3, 32, 32), torch.zeros(batch).long()), SGD(lr=0.05))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOESTRING_CACHE", str(tmp_path / "cache"))
    (tmp_path / "net.py").write_text(MODEL)
    write_cifar_binary(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)


def trained(shoestring, *words, model="net.py:task"):
    answer = shoestring("train", model, "--data", "data", "--threads", 1, "--json", *words)
    assert answer.code == 0, answer.err
    return json.loads(answer.out)


@pytest.mark.parametrize("plan", [(), ("--precision", "fp16"), ("--nonzero", 50, "--precision", "bf16")], ids=str)
def test_an_exported_run_is_the_plain_models_state_dict(shoestring, folder, plan, monkeypatch):
    trained(shoestring, "--epochs", 1, "--run", "run", *plan)
    monkeypatch.syspath_prepend(str(folder))
    import net

    answer = shoestring("export", "run", "-o", "model.safetensors", "--json")
    assert answer.code == 0, answer.err
    found = load_file("model.safetensors")
    plain = net.Net()
    assert json.loads(answer.out)["tensors"] == len(found) == len(plain.state_dict())
    plain.load_state_dict(found)
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    shoestring("export", "run", "-o", "stored.safetensors", "--dtype", "stored")
    kinds = {tensor.dtype for tensor in load_file("stored.safetensors").values()}
    assert kinds == ({torch.float16} if "fp16" in plan else {torch.bfloat16} if plan else {torch.float32})
    loaded = library.load("run", net.Net())
    assert not loaded.training
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])
    quality = json.loads(shoestring("evaluate", "run", "net.py:task", "--json").out)["accuracy"]
    images = open_images("data", channels=3)
    pixels, labels = images.test.read(np.arange(len(images.test)))
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (images.mean, images.std))
    with torch.no_grad():
        guesses = loaded((pixels / 255 - mean) / std).argmax(1)
    assert quality == pytest.approx(100 * float((guesses == labels).float().mean()), abs=0 if not plan else 10)


def test_a_built_in_model_is_loaded_evaluated_and_resumed_from_its_folder_alone(shoestring, folder):
    how = ("--updates", 2, "--batch", 10, "--schedule", "constant", "--run", "run")
    first = trained(shoestring, *how, model="wrn-10-1")
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    shutil.move("run", elsewhere / "run")
    os.chdir(elsewhere)
    found = json.loads(shoestring("evaluate", "run", "--json").out)
    assert (found["accuracy"], found["update"]) == (first["best_quality"], 2)
    assert library.load("run")(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
    again = shoestring("train", "--resume", "--run", "run")
    assert again.code == 0 and "finished already" in again.out
    longer = shoestring("train", "--resume", "--run", "run", "--updates", 3, "--json")
    assert longer.code == 0, longer.err
    assert json.loads(longer.out)["updates"] == 3
    assert json.loads((elsewhere / "run" / "record.json").read_text())["command"]["updates"] == 3


def test_a_longer_run_is_refused_where_something_is_stretched_over_its_length(shoestring, folder):
    trained(shoestring, "--epochs", 1, "--run", "steps", "--schedule", "paper")
    trained(shoestring, "--epochs", 1, "--run", "sparse", "--nonzero", 50)
    for run, what in (("steps", "the schedule of the learning rate"), ("sparse", "rewiring")):
        answer = shoestring("train", "net.py:task", "--resume", "--run", run, "--epochs", 2)
        assert answer.code == 2 and "5 updates and 10 are asked for" in answer.err and what in answer.err, answer.err
    trained(shoestring, "--epochs", 2, "--run", "plain")
    shorter = shoestring("train", "net.py:task", "--resume", "--run", "plain", "--epochs", 1)
    assert shorter.code == 2 and "10 updates are done already, and 5 are asked for" in shorter.err


def test_other_data_of_the_same_count_is_noticed(shoestring, folder):
    trained(shoestring, "--epochs", 1, "--run", "run", "--schedule", "constant")
    other = folder / "data" / "data_batch_2.bin"
    pixels = bytearray(other.read_bytes())
    pixels[1:3000] = bytes(2999)
    other.write_bytes(bytes(pixels))
    answer = shoestring("train", "net.py:task", "--resume", "--run", "run", "--epochs", 2)
    assert answer.code == 2 and "its data have changed" in answer.err


def test_code_that_a_run_names_is_not_run_unless_it_is_named_again(shoestring, folder):
    trained(shoestring, "--epochs", 1, "--run", "run")
    (folder / "net.py").write_text("raise SystemExit('run!')")
    for words in (("evaluate", "run"), ("train", "--resume", "--run", "run")):
        answer = shoestring(*words)
        assert answer.code == 2 and "your own code" in answer.err and "net.py:task" in answer.err


@pytest.mark.parametrize("words", [
    ("evaluate", "nowhere"), ("export", "nowhere", "-o", "m.safetensors"), ("translate", "nowhere", "a"),
])  # fmt: skip
def test_a_folder_without_a_run_is_refused(shoestring, folder, words):
    assert "nowhere does not exist: name the folder" in shoestring(*words).complaint
    (folder / "nowhere").touch()
    assert "nowhere is no folder: name the folder" in shoestring(*words).complaint


def test_a_run_translates_with_the_vocabulary_in_its_folder(shoestring, folder):
    pairs = open_pairs()
    options = {
        "source_vocabulary": len(pairs.source),
        "target_vocabulary": len(pairs.target),
        "width": 16,
        "tokens": 60,
    }
    task = library.builtin("dynamicconv-iwslt", **options)
    library.train(task, [task.batch], updates=1, run="run", command={"model": task.name, "options": options})
    keep_languages(folder / "run" / "vocabulary", pairs.known)
    words = ("translate", "run", "pope tibofear ga", "ripoenl", "--beams", 1)
    found = json.loads(shoestring(*words, "--json").out)
    assert [row["source"] for row in found] == ["pope tibofear ga", "ripoenl"]
    assert shoestring(*words).out.splitlines() == [row["translation"] for row in found]
    for sentence, why in (("", "is empty"), (" ", "is empty"), ("\udcff", "is not UTF-8")):
        assert f"sentence 2 {why}" in shoestring("translate", "run", "ga", sentence).complaint
    kept = folder / "run" / "vocabulary" / "target.txt"
    kept.write_text(kept.read_text().replace("dog", "god"))
    assert shoestring(*words).code == 4


def test_a_batch_larger_than_the_data_is_refused_with_both_numbers(shoestring, folder):
    answer = shoestring("train", "wrn-10-1", "--data", "data", "--batch", 100_000, "--epochs", 1)
    assert answer.code == 2 and "batches of 100,000 cannot be made from 20 images" in answer.err


def test_models_lists_what_is_built_in(shoestring):
    rows = json.loads(shoestring("models", "--json").out)
    assert {"wrn-28-2", "dynamicconv-iwslt"} <= {row["name"] for row in rows}
    assert all(f"{row['name']} " in shoestring("models").out for row in rows)


def flip(path):
    found = bytearray(path.read_bytes())
    found[len(found) // 2] ^= 1
    path.write_bytes(bytes(found))


def test_a_damaged_plan_is_told_and_its_techniques_are_those_of_the_record(shoestring, folder):
    trained(shoestring, "--epochs", 1, "--run", "run", "--precision", "fp16", "--schedule", "constant")
    first = shoestring("evaluate", "run", "net.py:task").out
    flip(folder / "run" / "plan.json")
    for words in (("evaluate", "run", "net.py:task"), ("train", "net.py:task", "--resume", "--run", "run")):
        answer = shoestring(*words)
        assert answer.code == 0 and "plan.json" in answer.err and "taken from run/record.json" in answer.err
    assert shoestring("evaluate", "run", "net.py:task").out == first
    answer = shoestring("report", "run", "-o", "page.html")
    assert answer.code == 0 and "run: its plan cannot be read" not in answer.err  # the resumed run wrote it again
    (folder / "run" / "plan.json").unlink()
    assert shoestring("evaluate", "run", "net.py:task").out == first


def test_damaged_weights_are_named_with_others_to_take(shoestring, folder):
    how = ("--epochs", 2, "--save-every", 9, "--average", 2)
    found = trained(shoestring, *how, "--run", "run")
    flip(folder / "run" / "averaged.safetensors")
    answer = shoestring("evaluate", "run", "net.py:task", "--weights", "averaged")
    assert answer.code == 4 and "--weights best or last" in answer.err
    flip(folder / "run" / "saves" / f"update-{found['best_update']:010}" / "model.safetensors")
    for words in (("evaluate", "run", "net.py:task"), ("export", "run", "-o", "m.safetensors")):
        answer = shoestring(*words)
        assert answer.code == 4 and "continuing" not in answer.err and "--weights last" in answer.err
        assert shoestring(*words, "--weights", "last").code == 0


def test_a_finished_run_whose_last_save_is_damaged_is_trained_on_and_not_called_finished_already(shoestring, folder):
    trained(shoestring, "--epochs", 2, "--save-every", 3, "--run", "run")
    flip(max((folder / "run" / "saves").iterdir()) / "model.safetensors")
    before = json.loads((folder / "run" / "record.json").read_text())
    again = shoestring("train", "net.py:task", "--resume", "--run", "run")
    assert again.code == 0 and "continuing from update" in again.err and "finished already" not in again.out
    after = json.loads((folder / "run" / "record.json").read_text())
    assert after["seconds"] > before["seconds"] and after["updates"] == before["updates"]
    assert "finished already" in shoestring("train", "net.py:task", "--resume", "--run", "run").out
    shutil.rmtree(folder / "run" / "saves")
    answer = shoestring("evaluate", "run", "net.py:task")
    assert answer.code == 4 and "--resume --start-over" in answer.err


def test_report_says_what_is_damaged(shoestring, folder):
    trained(shoestring, "--epochs", 1, "--run", "run", "--precision", "fp16")
    for name in ("log.jsonl", "plan.json", "step.json", "record.json"):
        flip(folder / "run" / name)
        answer = shoestring("report", "run", "-o", "page.html")
        assert answer.code == 0 and (name if name != "plan.json" else "its plan cannot be read") in answer.err


@pytest.mark.parametrize("command", [
    {"model": 5}, {"model": ["wrn-10-1"]}, {"batch": "x"}, {"batch": 10**12}, {"epochs": -1}, {"lr": "nan"}, {"lr": {}},
    {"schedule": "none"}, {"tensorboard": "yes"}, {"data": "a\0b"}, {"func": "os.system"}, {"seed": 1.5},
], ids=str)  # fmt: skip
def test_a_recorded_command_is_taken_as_a_command_line_is(shoestring, folder, command):
    task = library.builtin("wrn-10-0.1", batch=2)
    known = {"model": "wrn-10-0.1", "data": "data", "batch": 2, "epochs": 1, "options": {"batch": 1}}
    library.train(task, [task.batch], updates=1, run="run", command=known | command)
    for words in (("evaluate", "run"), ("train", "--resume", "--run", "run")):
        answer = shoestring(*words)
        (name,) = command
        assert answer.code == 4 and f"its command has {name} " in answer.complaint


@pytest.mark.parametrize("options, words", [
    ([1], "the options of its model are '[1]'"), ({"classes": 10**6, "batch": 1}, "are not of this model"),
])  # fmt: skip
def test_a_recorded_model_is_refused_before_memory_is_taken(folder, options, words):
    task = library.builtin("wrn-10-0.1", batch=2)
    library.train(task, [task.batch], updates=1, run="run", command={"model": task.name, "options": options})
    with pytest.raises(library.ShoestringError, match=re.escape(words)):
        library.load("run")


def test_a_run_resumed_in_another_budget_has_it_in_its_plan_and_says_so_once(shoestring, folder):
    how = ("--run", "run", "--precision", "fp16", "--schedule", "constant")
    trained(shoestring, "--epochs", 1, "--budget", "5MB", *how)
    answer = shoestring("train", "net.py:task", "--resume", "--run", "run", "--epochs", 2, "--budget", "6MB")
    assert answer.code == 0 and "of 5.000 MB" not in answer.out and answer.out.count("of 6.000 MB") == 2
    assert json.loads((folder / "run" / "plan.json").read_text())["budget_bytes"] == 6_000_000
