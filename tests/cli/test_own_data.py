"""A user's task on a user's batches, from the command line."""

import contextlib
import json
import shlex
from pathlib import Path

import pytest

from shoestring.rates import NOMINAL

MINE = """
def task(batch=8):
    torch.manual_seed(0)
    return make(model=nn.Linear(4, 2), batch=torch.zeros(batch, 4))

def batches(batch=8):
    return [torch.ones(batch, 4) * number for number in range(1, 4)]

def generated():
    def make_batches():
        for number in range(3):
            yield torch.ones(8, 4) * number
    return make_batches

def validation():
    return [torch.ones(2, 4)]

def nothing():
    return []

def number():
    return 7
"""


@pytest.fixture
def train(shoestring, user, tmp_path, monkeypatch):
    place = user(MINE).split(":")[0]
    monkeypatch.chdir(tmp_path)

    def run(data, *words):
        return shoestring("train", f"{place}:task", "--data", f"{place}:{data}", "--threads", 1, *words)

    run.place = place
    return run


def test_a_task_trains_on_batches_of_the_users_own_and_is_judged_by_their_loss(train, shoestring):
    how = ("--epochs", 2, "--valid", f"{train.place}:validation", "--run", "run", "--json")
    answer = train("batches", *how)
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert found["updates"] == 6 and found["quality_name"] == "loss" and found["best_quality"] > 0
    assert json.loads(train("batches", *how, "--resume").out)["updates"] == 6
    words = ("evaluate", "run", f"{train.place}:task", "--data", f"{train.place}:batches")
    again = shoestring(*words, "--valid", f"{train.place}:validation", "--json")
    assert json.loads(again.out)["loss"] == pytest.approx(found["best_quality"])
    for name in ("evaluate", "resume"):  # as they are printed, to be pasted
        answer = shoestring(*shlex.split(found[name])[1:])
        assert answer.code == 0, answer.err
        assert "valid loss " in answer.out or answer.out.startswith("loss ")


def test_a_plan_for_a_task_of_the_users_own_is_taken_by_train_and_a_run_goes_on_from_any_folder(
    train, shoestring, monkeypatch
):
    monkeypatch.setattr("shoestring.measuring.rates.device_rates", lambda: NOMINAL)  # measuring them takes seconds
    file, folder = Path(train.place), Path(train.place).parent
    answer = shoestring("plan", f"{train.place}:task", "--budget", "200%", "--output", "plan.json")
    assert answer.code == 0, answer.err
    how = ("--plan", "plan.json", "--run", Path.cwd() / "run")
    answer = train("batches", *how, "--epochs", 1, "--valid", f"{train.place}:validation")
    assert answer.code == 0, answer.err
    with contextlib.chdir(folder):  # the same file, by a shorter name
        named = (f"{file.name}:task", "--data", f"{file.name}:batches", "--valid", f"{file.name}:validation")
        answer = shoestring("train", *named, "--resume", "--run", how[-1], "--epochs", 2, "--json")
    assert answer.code == 0 and json.loads(answer.out)["updates"] == 6, answer.err


def test_what_must_be_named_again_is_told_in_one_command_that_works(train, shoestring):
    assert train("batches", "--epochs", 1, "--valid", f"{train.place}:validation", "--run", "run").code == 0
    for words in (("evaluate", "run"), ("train", "--resume", "--run", "run")):
        told = shoestring(*words).complaint
        assert shoestring(*shlex.split(told.split("`")[1])[1:]).code == 0, told
    assert shoestring("evaluate", "run", f"{train.place}:task", "--valid", f"{train.place}:validation").code == 0


def test_without_batches_to_evaluate_on_no_command_is_told_for_it(train):
    assert "evaluate" not in train("batches", "--epochs", 1, "--run", "run").out


def test_sizes_are_given_to_the_functions_that_take_them_and_batches_may_be_made_by_a_generator(train):
    answer = train("batches", "--batch", 5, "--updates", 2, "--json", "--run", "sized")
    found = json.loads(answer.out)
    (told,) = (line for line in answer.err.splitlines() if line.startswith("data "))
    assert told.endswith(f"the batches of {Path(train.place).name}:batches")
    assert found["updates"] == 2 and found["quality"] is None
    assert json.loads(train("generated", "--updates", 4, "--json", "--run", "made").out)["updates"] == 4


@pytest.mark.parametrize("data, how, words", [
    ("generated", ("--epochs", 1), "has no length"),
    ("nothing", ("--epochs", 1), "holds no batch"),
    ("number", ("--epochs", 1), "cannot be iterated"),
    ("absent", ("--epochs", 1), "has no function 'absent'"),
])  # fmt: skip
def test_batches_that_cannot_be_trained_on_are_refused_in_one_line(train, data, how, words):
    answer = train(data, *how)
    assert answer.code == 2 and words in answer.err.splitlines()[-1] and "Traceback" not in answer.err


def test_a_built_in_model_takes_no_function_for_its_folder_and_a_folder_is_no_function(train, shoestring):
    how = "--updates", 1, "--run", "run"
    words = "train", "wrn-10-1", "--data", f"{train.place}:batches"
    assert "names a function, and wrn-10-1 reads a folder" in shoestring(*words, *how).complaint
    words = "train", "wrn-10-1", "--valid", f"{train.place}:batches"
    assert "--valid is for your own tasks" in shoestring(*words, *how).complaint
    assert "'folder' names no function" in train("batches", "--valid", "folder", *how).complaint
