import json
import os
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

sys.path.append(os.path.join(os.path.dirname(__file__), "..", "data"))
from layouts import write_cifar_binary

from shoestring.units import parse_bytes

MODEL = """
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from shoestring import SGD, Task

def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)

class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, classes)
    def forward(self, images):
        return self.fc(F.relu(self.norm(self.conv(images))).mean((2, 3)))

def task(batch=4, classes=10, size=32):
    torch.manual_seed(0)
    images = torch.zeros(batch, 3, size, size), torch.zeros(batch, dtype=torch.int64)
    return Task(Net(classes), loss, images, SGD(lr=0.05, momentum=0.9), name="net")

def few_classes():
    return task(classes=3)

def deep():
    lean = task()
    lean.model.conv = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
    return lean

def small_images():
    return task(size=8)

def vectors():
    return Task(nn.Linear(4, 2), loss, (torch.zeros(8, 4), torch.zeros(8).long()), SGD())

def diverging():
    return task().with_(optimizer=SGD(lr=1e30))

def hungry_loss(model, batch):
    # takes 400 KB a picture that a trace does not see
    pictures = batch[0]
    hidden = 0 if isinstance(pictures, FakeTensor) else pictures.new_ones(len(pictures), 100_000).sum()
    return loss(model, batch) + 0 * hidden

def hungry():
    return task().with_(loss=hungry_loss)

def own_optimizer():
    return task().with_(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
"""


@pytest.fixture
def train(shoestring, tmp_path, monkeypatch):
    """Runs `shoestring train` on a small net and 20 images, in a folder of its own."""
    import torch

    monkeypatch.setenv("SHOESTRING_CACHE", str(tmp_path / "cache"))
    (tmp_path / "net.py").write_text(MODEL)
    write_cifar_binary(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()

    def run(*arguments, function="task", data="data"):
        return shoestring("train", f"net.py:{function}", "--data", data, "--threads", 1, *arguments)

    yield run
    torch.set_num_threads(threads)


def without_record(folder):
    timed = ("record.json", "measures.jsonl", "page.html")  # which tell how long the run took
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in timed)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_run_ends_with_its_memory_its_quality_and_the_command_to_evaluate_it(train, tmp_path):
    answer = train("--epochs", 2, "--microbatch", 2, "--budget", "10MB")
    assert answer.code == 0, answer.err
    first, *lines = answer.out.splitlines()
    assert first.startswith("net: 10 updates in ")
    told = {line[:10].strip(): line[10:] for line in lines}
    assert told["plan"].startswith("microbatch 2 (risk approximate, predicted ") and "%" in told["accuracy"]
    assert "predicted" in told["memory"] and "measured" in told["memory"]
    assert "within the budget of 10.00 MB" in told["memory"] and "resident at the peak" in told["process"]
    assert told["saved"] == "runs/net-task" and told["evaluate"] == "shoestring evaluate runs/net-task net.py:task"
    assert told["export"] == "shoestring export runs/net-task -o model.safetensors"
    assert answer.err.index("plan      microbatch 2") < answer.err.index("epoch 1/2")  # before the first update, too
    assert "data      20 images to train" in answer.err and "device    CPU, 1 thread" in answer.err
    assert "epoch 1/2  update 5/10" in answer.err
    record = json.loads((tmp_path / "runs" / "net-task" / "record.json").read_text())
    assert abs(record["predicted_peak_bytes"] - record["measured_peak_bytes"]) <= 0.02 * record["measured_peak_bytes"]


def test_a_run_leaves_a_page_of_its_course_and_of_its_step_plain_and_lean(train, tmp_path):
    answer = train("--epochs", 2, "--microbatch", 2, "--budget", "10MB")
    assert answer.code == 0, answer.err
    assert answer.out.splitlines()[-1].split() == ["page", "runs/net-task/page.html"]
    text = (tmp_path / "runs" / "net-task" / "page.html").read_text()
    found = json.loads(text.split('id="data">')[1].split("</script>")[0])["runs"][0]
    assert found["state"] == "finished after 10 updates" and len(found["curves"]["loss"]) == 10
    assert found["steps"]["lean"]["peak"]["bytes"] == found["record"]["predicted_peak_bytes"]
    assert max(found["steps"]["plain"]["totals"]) > max(found["steps"]["lean"]["totals"])
    assert found["curves"]["memory"][-1]["y"] == found["record"]["measured_peak_bytes"]


def test_a_budget_alone_is_planned_for_and_kept(train, tmp_path):
    words = ("--epochs", 1, "--batch", 20)  # a smaller step is below the room that a plan leaves for objects
    plain = json.loads(train(*words, "--json", "--run", "plain").out)
    budget = int(0.9 * plain["measured_peak_bytes"])
    found = json.loads(train(*words, "--budget", budget, "--json", "--run", "lean").out)
    assert found["settings"]["techniques"] and found["measured_peak_bytes"] <= budget
    resumed = train(*words, "--budget", budget, "--json", "--run", "lean", "--resume")
    assert json.loads(resumed.out)["settings"]["techniques"] == found["settings"]["techniques"]


def test_every_technique_has_its_word_on_the_command_line(train):
    words = ("--precision", "bf16", "--optimizer", "8bit", "--microbatch", 2, "--replan", "--budget", "1GB")
    answer = train("--epochs", 1, "--json", *words)
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)["settings"]["techniques"]
    assert found == {"precision": "bf16", "optimizer": "8bit", "microbatch": 2}
    refused = train("--epochs", 1, "--activations", "everything", "--run", "other")
    assert refused.code == 2 and "everything" in refused.err


def test_a_run_is_resumed_with_every_setting_that_its_command_had(train):
    words = ("--epochs", 1, "--json", "--run", "run", "--nonzero", "50,method=set,layers=conv")
    answer = json.loads(train(*words).out)
    assert answer["settings"]["techniques"] == {"nonzero": {"nonzero": 50, "method": "set", "layers": ["conv"]}}
    assert answer["resume"] == "shoestring train net.py:task --resume --run run"
    assert json.loads(train(*words, "--resume").out)["finished"]
    assert json.loads(train(*words[:-2], "--resume").out)["finished"]  # by its plan file
    other = complaint(train(*words[:-1], "50,layers=conv", "--resume"))
    assert "techniques nonzero method was set and is now None" in other


def test_json_is_all_that_stdout_has(train):
    answer = train("--epochs", 1, "--json")
    found = json.loads(answer.out)
    assert found["finished"] and found["run"] == "runs/net-task" and found["quality_name"] == "accuracy"


@pytest.mark.parametrize("plan", [(), ("--nonzero", 50)], ids=["dense", "sparse"])
def test_the_command_that_it_prints_evaluates_the_same_weights(train, shoestring, plan):
    found = json.loads(train("--epochs", 2, "--average", 2, "--json", *plan, function="deep").out)
    words = found["evaluate"].split()[1:]
    assert json.loads(shoestring(*words, "--json").out)["accuracy"] == found["best_quality"]
    for which, quality in (("averaged", "averaged_quality"), ("last", "quality")):
        assert json.loads(shoestring(*words, "--weights", which, "--json").out)["accuracy"] == found[quality]


@pytest.mark.parametrize("resident, code", [(150_000_000, 0), (3_000_000_000, 3)])
def test_a_budget_for_the_whole_process_is_watched_at_every_phase(train, monkeypatch, resident, code):
    monkeypatch.setattr("shoestring.measuring.base.process_base_bytes", lambda: 100_000_000)
    monkeypatch.setattr("shoestring.measuring.process.rss_bytes", lambda: resident)
    answer = train("--updates", 1, "--budget", "2GB", "--counting", "process")
    assert answer.code == code, answer.err
    if code:
        assert "a step occupies 2.900 GB (seen at the start of forward), and the budget is 1.900 GB" in answer.err
    else:
        assert "(within the budget of 2.000 GB for the process)" in answer.out


def test_ctrl_c_saves_and_the_command_that_it_prints_goes_on_to_the_same_end(train, shoestring, tmp_path, monkeypatch):
    train("--epochs", 3, "--run", "whole")
    from shoestring.training import events, run

    tell = run.Training.tell

    def interrupt(self, event):
        if self.update == 8 and isinstance(event, events.Updated):
            os.kill(os.getpid(), signal.SIGINT)
        tell(self, event)

    with monkeypatch.context() as patch:
        patch.setattr(run.Training, "tell", interrupt)
        answer = train("--epochs", 3, "--run", "stopped")
    words = answer.err.splitlines()[-1]
    assert answer.code == 130 and words.startswith("shoestring: stopped after update 8 of 15: resume with `")
    resumed = shoestring(*words.split("`")[1].split()[1:])
    assert resumed.code == 0, resumed.err
    assert without_record(tmp_path / "stopped") == without_record(tmp_path / "whole")


def complaint(answer, code=2):
    """The last line of a refusal, which may come after some progress."""
    assert answer.code == code and answer.out == "" and "Traceback" not in answer.err, answer
    return answer.err.splitlines()[-1].removeprefix("shoestring: ")


def test_a_step_over_the_budget_is_refused_before_it_runs(train, tmp_path):
    assert "no plan of risk neutral fits 10.00 KB" in complaint(train("--epochs", 1, "--budget", "10KB"), code=3)
    words = complaint(train("--epochs", 1, "--budget", "10KB", "--microbatch", 2), code=3)
    found = re.search(r"^a step would need (.*) of tensors and (.*) of Python objects, predicted", words)
    assert found and "and the budget is 10.00 KB: leave the techniques out" in words
    tensors, objects = map(parse_bytes, found.groups())
    for share, code in ((0.5, 3), (1.5, 0)):  # a budget is for both
        answer = train("--updates", 1, "--budget", int(tensors + share * objects), "--microbatch", 2)
        assert answer.code == code and (tmp_path / "runs").exists() == (code == 0)


def test_a_step_that_takes_more_than_predicted_stops_the_run_and_with_replan_it_goes_on(train, tmp_path):
    seen = json.loads(train("--updates", 1, "--json", "--run", "seen").out)["measured_peak_bytes"]
    budget = "--budget", seen + 1_000_000
    words = complaint(train("--epochs", 1, *budget, function="hungry"), code=3)
    assert "measured" in words and "--resume --replan" in words
    answer = train("--epochs", 1, *budget, "--resume", "--replan", "--json", function="hungry")
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert found["finished"] and found["updates"] == 5 and found["settings"]["techniques"] == {"microbatch": 2}
    assert found["measured_peak_bytes"] <= seen + 1_000_000


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((), "name a MODEL and how long to train it, by --epochs or --updates"),
        (("--epochs", 0), "argument --epochs: 0 is out of range"),
        (("--epochs", 1, "--updates", 1), "not allowed with argument"),
        (("--epochs", 1, "--budget", "lots"), "'lots' is not a size in bytes: write it as 7MB"),
        (("--epochs", 1, "--budget", "-3MB"), "is not a size"),
        (("--epochs", 1, "--lr", "nan"), "argument --lr: nan is out of range"),
        (("--epochs", 1, "--lr", "fast"), "'fast' is not a number"),
        (("--epochs", 1, "--label-smoothing", 2), "must be at least 0 and at most 1"),
        (("--epochs", 1, "--schedule", "warm"), "invalid choice: 'warm'"),
        (("--epochs", 1, "--resume"), "runs/net-task holds no run: name the folder of one with --run"),
        (("--epochs", 1, "--microbatch", 5), "a microbatch of 5 does not go into a batch of 4"),
        (("--epochs", 1, "--checkpoint", "all"), "there is no checkpoint strategy 'all'"),
        (("--epochs", 1, "--quality", "bleu"), "--quality is for translation"),
        (("--epochs", 1, "--label-smoothing", 0.1), "smooth the labels in your loss"),
        (("--epochs", 1, "--batch", 21), "batches of 21 cannot be made from 20 images"),
        (("--epochs", 1, "--run", ""), "argument --run: the name is empty"),
        (("--epochs", 1, "--plan", "none.json"), "the plan none.json cannot be read: No such file"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_in_one_line_and_nothing_is_left_behind(train, tmp_path, arguments, words):
    if "--budget" in arguments and "-3MB" in arguments:
        arguments = ("--epochs", 1, "--budget=-3MB")
    assert words in complaint(train(*arguments))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "function, words",
    [
        ("few_classes", "the data has 10 classes and the model scores 3"),
        ("small_images", "do not fit into 8x8"),
        ("vectors", "as in --data mine.py:batches"),
        ("absent", "has no function 'absent'"),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_refused(train, function, words):
    assert words in complaint(train("--epochs", 1, function=function))


def test_options_that_a_task_of_the_users_cannot_take_are_refused(train):
    assert "--lr cannot be set" in complaint(train("--epochs", 1, "--lr", 0.1, function="own_optimizer"))


def test_data_that_is_missing_or_cut_is_refused(train, tmp_path):
    assert "the data folder nowhere does not exist" in complaint(train("--epochs", 1, data="nowhere"))
    path = tmp_path / "data" / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    assert "data_batch_3.bin" in complaint(train("--epochs", 1))
    path.write_bytes(bytes([200]) + path.read_bytes()[1:] + b"x")
    assert "data_batch_3.bin" in complaint(train("--epochs", 1))


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "is not a plan file"),
        ("{}", "is not a plan file"),
        ("\x00\x01", "is not a plan file"),
        ('{"version": 99}', "version 99"),
        ('{"version": 1, "execute": "rm"}', "a field 'execute' that does not exist"),
        ('{"version": 1, "task": "wrn-28-2"}', "is a plan for wrn-28-2, not for net"),
    ],
)
def test_a_plan_that_is_damaged_or_for_another_model_is_refused(train, tmp_path, text, words):
    (tmp_path / "plan.json").write_text(text)
    assert words in complaint(train("--epochs", 1, "--plan", "plan.json"))


def test_a_plan_from_a_file_is_followed_and_is_not_mixed_with_techniques(train, tmp_path):
    (tmp_path / "plan.json").write_text('{"version": 1, "task": "net", "microbatch": 2}')
    found = json.loads(train("--epochs", 1, "--plan", "plan.json", "--json").out)
    assert found["settings"]["techniques"] == {"microbatch": 2}
    assert "--plan and --microbatch both" in complaint(
        train("--epochs", 1, "--plan", "plan.json", "--microbatch", 2, "--run", "other")
    )


def test_a_resume_with_other_settings_names_them(train):
    train("--epochs", 1, "--run", "run")
    assert "holds a run already" in complaint(train("--epochs", 1, "--run", "run"))
    words = complaint(train("--epochs", 2, "--run", "run", "--resume", "--seed", 4, "--batch", 5))
    for change in ("updates was 5 and is now 8", "seed was 0 and is now 4", "batch was 4 and is now 5"):
        assert change in words


def test_a_resume_needs_no_techniques_for_the_run_has_its_plan(train):
    train("--epochs", 1, "--run", "run", "--microbatch", 2)
    assert train("--epochs", 1, "--run", "run", "--resume").code == 0


def test_damage_costs_a_warning_or_where_nothing_is_whole_exit_code_4(train, tmp_path):
    train("--epochs", 2, "--run", "run")
    saves = sorted((tmp_path / "run" / "saves").iterdir())
    assert len(saves) == 2
    for number, path in enumerate(save / "model.safetensors" for save in reversed(saves)):
        data = np.frombuffer(path.read_bytes(), np.uint8).copy()
        data[-1] ^= 1
        path.write_bytes(data.tobytes())
        answer = train("--epochs", 2, "--run", "run", "--resume")
        if number == 0:
            assert answer.code == 0 and "is damaged" in answer.err and "continuing from update 5" in answer.err
            (saves[-1] / "model.safetensors").write_bytes(b"damaged again")
    assert "no other save is undamaged" in complaint(answer, code=4)


def test_a_run_that_diverges_ends_with_exit_code_5(train):
    words = complaint(train("--epochs", 2, function="diverging"), code=5)
    assert "learning rate 1e+30" in words


def test_a_folder_that_cannot_be_written_is_told_in_one_line(train, tmp_path):
    (tmp_path / "file").write_text("")
    answer = train("--epochs", 1, "--run", "file/run")
    assert answer.code == 2 and "file is a file, and a run is a folder" in answer.complaint


def test_a_folder_without_permission_is_refused_before_anything_is_planned(train, tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda place, mode: not mode & os.W_OK)
    answer = train("--epochs", 1, "--run", "runs/mine")
    assert answer.code == 2 and "runs/mine cannot be written: no permission in" in answer.complaint


def test_built_in_models_train_on_the_embedded_data(train, shoestring):
    few = ("--batch", 50, "--updates", 1, "--threads", 1)
    answer = shoestring("train", "wrn-10-0.1", *few, "--label-smoothing", 0.1, "--json")
    found = json.loads(answer.out)
    assert found["settings"]["data"] == "4000 images to train and 1000 to test, 10 classes"
    assert found["settings"]["label_smoothing"] == 0.1 and found["updates"] == 1
    assert "--tokens is for translation" in complaint(shoestring("train", "wrn-10-1", "--updates", 1, "--tokens", 4))


class Terminal:
    """A stdin that a user sits at, with what they type."""

    def __init__(self, typed):
        self.typed = typed

    def isatty(self):
        return True

    def readline(self):
        return self.typed


@pytest.mark.parametrize("typed, begins", [("y\n", True), ("\n", False), ("no\n", False)])
def test_a_run_whose_saves_are_gone_begins_again_only_if_the_user_says_so(train, monkeypatch, tmp_path, typed, begins):
    assert train("--updates", 2, "--run", "run").code == 0
    shutil.rmtree(tmp_path / "run" / "saves")
    refused = train("--resume", "--run", "run")
    assert refused.code == 4 and "all its saves are gone" in refused.err and "--start-over" in refused.err
    monkeypatch.setattr(sys, "stdin", Terminal(typed))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    answer = train("--resume", "--run", "run")
    assert "begin again at update 0? [y/N]" in answer.err
    assert answer.code == (0 if begins else 4)
    if not begins:
        assert train("--resume", "--run", "run", "--start-over").code == 0


def test_a_file_in_place_of_the_folder_and_more_epochs_to_average_than_there_are_are_refused_at_once(train, tmp_path):
    answer = train("--epochs", 1, "--run", "net.py")
    assert answer.code == 2 and answer.err == (
        "shoestring: net.py is a file, and a run is a folder: name another with --run\n"
    )
    answer = train("--epochs", 2, "--average", 3, "--run", "new")
    assert answer.code == 2 and "--average 3 is of the last epochs, and there are 2: take fewer" in answer.err
    assert not (tmp_path / "new" / "record.json").exists()


FREED = """
import torch
from shoestring.cli.train_beside import process_watch
from shoestring.measuring import base
base.process_base_bytes = lambda: 0
del [torch.ones(2**20) for _ in range(2)][:]  # from now on, glibc does not map blocks of this size one by one
watch = process_watch()
before, blocks = watch(), [torch.ones(2**20) for _ in range(20)]
held = watch() - before
del blocks[:-1]
print(held, watch() - before)
"""


def test_a_budget_of_the_process_counts_no_block_that_was_freed():
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    held, left = map(int, done.stdout.split())
    assert held > 20 * 2**22 and left < 2 * 2**22
