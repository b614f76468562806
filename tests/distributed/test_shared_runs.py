"""A run of several processes: one folder, and the same run whenever it is stopped."""

import json
import os
import signal

import pytest
import torch
from kills import remains
from processes import raised, rank, run_in
from small import Noise, right_answers, task

from shoestring import Adam, Plan, apply, train
from shoestring.runs.log import Log
from shoestring.techniques import sparsity
from shoestring.training.events import Updated
from shoestring.training.processes import share_of

HOW = {"evaluation": right_answers(), "save_every": 2}


def lean(plan):
    if plan == "sparse":
        sparse = sparsity.apply(task(), sparsity.Settings(50, frequency_multiplier=100))
        return apply(sparse, Plan(precision="fp16", microbatch=2))
    return apply(task(Adam()), Plan(microbatch=2, checkpoint="residual-1"))


class Stopped(Exception):
    pass


class Stopping(Noise):
    """Data that ends the run at an update, in one process or in all."""

    def __init__(self, update, ranks=(0, 1)):
        super().__init__()
        self.update, self.ranks = update, ranks

    def read(self, epoch, number):
        if epoch * len(self) + number >= self.update and rank() in self.ranks:
            raise Stopped
        return super().read(epoch, number)


def runs(folder):
    """In each of two processes: whole runs, runs that are stopped and resumed, and runs that are refused."""
    seen = {}
    for plan in ("sparse", "dense"):
        record = train(lean(plan), Noise(), run=f"{folder}/{plan}", epochs=3, **HOW)
        seen[plan] = record.quality, record.best_update
        stopped = f"{folder}/{plan}-stopped"
        raised(lambda: train(lean(plan), Stopping(7), run=stopped, epochs=3, **HOW))  # noqa: B023
        train(lean(plan), Noise(), run=stopped, epochs=3, resume=True, **HOW)

    class Other(Noise):
        def read(self, epoch, number):
            images, labels = super().read(epoch, number)
            return images + rank(), labels

    seen["other data"] = raised(lambda: train(lean("dense"), Other(), epochs=1))
    seen["other seeds"] = raised(lambda: train(lean("dense"), Noise(), epochs=1, seed=rank()))
    seen["other recipes"] = raised(
        lambda: train(lean("dense"), Noise(), run=f"{folder}/recipes", epochs=1, settings={"note": rank()})
    )
    seen["a small batch"] = raised(lambda: train(lean("dense"), Noise(size=1), epochs=1))
    seen["taken"] = raised(lambda: train(lean("dense"), Noise(), run=f"{folder}/dense", epochs=3))
    seen["replan"] = raised(lambda: train(lean("dense"), Noise(), epochs=1, replan=True))

    def signalled(event):
        if isinstance(event, Updated) and event.update == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    seen["signal"] = raised(
        lambda: train(lean("dense"), Noise(), run=f"{folder}/signal", epochs=3, listeners=[signalled], **HOW)
    )
    return seen


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    torch.set_num_threads(1)
    train(lean("sparse"), Noise(), run=folder / "alone", epochs=1)  # so that late imports are done before the forks
    return folder, run_in(2, runs, str(folder))


@pytest.mark.parametrize("plan", ["sparse", "dense"])
def test_a_run_that_is_stopped_and_resumed_leaves_the_same_bytes(two, plan):
    folder, (zero, one) = two
    whole, stopped = remains(folder / plan), remains(folder / f"{plan}-stopped")
    assert whole.keys() == stopped.keys() and not [name for name in whole if whole[name] != stopped[name]]
    assert zero[plan] == one[plan]
    assert len((folder / plan / "log.jsonl").read_text().splitlines()) == 15 + 3
    assert not [path for path in (folder / plan).iterdir() if "rank" in path.name], "one folder, one of each file"


def test_each_process_saves_its_own_generators(two):
    save = two[0] / "dense" / "saves" / "update-0000000015"
    values = json.loads((save / "manifest.json").read_text())["values"]
    assert {"random", "random_of_process_1", "model", "run"} <= values.keys()
    assert (save / "random.safetensors").read_bytes() != (save / "random_of_process_1.safetensors").read_bytes()
    assert values["run"]["processes"] == 2


def test_what_differs_between_processes_is_named_by_all(two):
    _, (zero, one) = two
    for name, words in {
        "other data": "the data of process 1 is not that of process 0",
        "other seeds": "the seed of process 1",
        "other recipes": "the recipe of process 1",
        "a small batch": "a batch of 1 examples cannot be shared by 2 processes",
        "replan": "a run of 2 processes is not replanned",
    }.items():
        assert zero[name] == one[name] and words in zero[name][1], name
    assert "holds a run" in zero["taken"][1] and one["taken"][1] == f"{zero['taken'][1]} (process 0)"


def test_a_signal_to_one_process_stops_all_after_a_save(two):
    folder, (zero, one) = two
    assert zero["signal"] == one["signal"] and zero["signal"][0] == "Interrupted"
    assert "stopped after update 3" in zero["signal"][1]
    assert (folder / "signal" / "saves" / "update-0000000003").exists()


def test_a_run_goes_on_in_another_number_of_processes_and_says_so(tmp_path, recwarn):
    def first_part():
        raised(lambda: train(lean("dense"), Stopping(6), run=str(tmp_path / "run"), epochs=3, **HOW))

    run_in(2, first_part)
    train(lean("dense"), Noise(), run=tmp_path / "run", epochs=3, resume=True, **HOW)
    assert any("in 1 process instead of 2" in str(warning.message) for warning in recwarn)
    lines = [line.content for line in Log(tmp_path / "run" / "log.jsonl").read()]
    assert [line for line in lines if "processes" in line] == [{"update": 6, "processes": 1, "before": 2}]
    assert max(line["update"] for line in lines) == 15


def test_shares_are_the_whole_batch_in_parts_that_differ_by_one_at_most():
    numbers = {"x": torch.arange(22).view(11, 2), "names": [str(n) for n in range(11)], "mask": torch.ones(1, 2)}
    small = task().with_(batch=numbers)
    for size in (1, 2, 3, 4, 11, 13):
        parts = [share_of(small, numbers, process, size) for process in range(size)]
        assert torch.equal(torch.cat([part["x"] for part in parts]), numbers["x"])
        assert [name for part in parts for name in part["names"]] == numbers["names"]
        lengths = [len(part["x"]) for part in parts]
        assert max(lengths) - min(lengths) <= 1 and lengths[0] == max(lengths)
        assert all(part["mask"] is numbers["mask"] for part in parts)
