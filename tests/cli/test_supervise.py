"""`train --supervise`: a run that is killed, or finds no memory, goes on with less from its last save."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch

from shoestring.cli import supervise
from shoestring.cli.main import main

TASK = """
    import os, signal, torch
    from shoestring import SGD, Task

    def loss(model, batch):
        images, labels = batch
        if type(images) is torch.Tensor and model.training and len(images) > {most} and {when}:
            {dies}
        return torch.nn.functional.cross_entropy(model(images), labels)

    def task(batch=16):
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(4),
                                    torch.nn.Flatten(), torch.nn.Linear(256, 10))
        example = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
        return Task(model, loss, example, SGD(lr=0.1), microbatches=True)
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
NO_MEMORY = "torch.empty(2**46, dtype=torch.uint8)"  # 70 TB: the allocator says no


class Forked:
    """A process of `shoestring` as `subprocess.Popen` would start it, but with torch loaded: forked from this one."""

    def __init__(self, command):
        assert command[1:3] == ["-m", "shoestring"]
        self.child = os.fork()
        if not self.child:
            torch.set_num_threads(1)  # the threads of this process are not in a fork
            code = main(command[3:])
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def wait(self):
        return os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])


def words(tmp_path, dies, *more, most=4, when="True", batch=16):
    (tmp_path / "mine.py").write_text(textwrap.dedent(TASK.format(dies=dies, most=most, when=when)))
    return ["train", f"{tmp_path}/mine.py:task", "--batch", str(batch), "--updates", "4", "--save-every", "1",
            "--threads", "1", "--run", str(tmp_path / "run"), "--supervise", *more]  # fmt: skip


@pytest.fixture
def train(shoestring, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(supervise, "subprocess", SimpleNamespace(Popen=Forked))
    return lambda *arguments, **settings: shoestring(*words(tmp_path, *arguments, **settings))


def lines_of(tmp_path):
    log = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, log) if "loss" in line]


@pytest.mark.parametrize(
    ("dies", "told"), [(KILL, "was killed"), (NO_MEMORY, "ran out of memory")], ids=["kill", "allocator"]
)
def test_a_run_that_gets_too_little_memory_goes_on_from_its_last_save_with_the_same_batch(train, tmp_path, dies, told):
    """It dies at its third update, as if another program had taken the memory, and again until it fits."""
    marker = (
        f"os.path.exists({str(tmp_path / 'run' / 'saves')!r}) and len(os.listdir({str(tmp_path / 'run' / 'saves')!r}))"
    )
    done = train(dies, "--checkpoint", "none", when=f"{marker} > 1")
    assert done.code == 0, done.err
    assert told in done.err and "goes on from its last save with a budget of" in done.err
    assert [line["update"] for line in lines_of(tmp_path)] == [1, 2, 3, 4]
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["settings"]["techniques"]["microbatch"] <= 4 and record["settings"]["batch"] == 16
    assert "Traceback" not in done.err


def test_other_ends_are_passed_on_and_not_tried_again(train):
    done = train('raise SystemExit("a bug of the user")')
    assert done.code != 0 and "goes on" not in done.err and "starts again" not in done.err
    wrong = train(KILL, "--data", "nowhere")
    assert wrong.code == 2 and "Traceback" not in wrong.err


def test_a_run_for_which_nothing_is_small_enough_ends_with_the_reason(train):
    done = train(KILL, most=0, batch=4)
    assert done.code == 3 and "no smaller microbatch fits" in done.err.splitlines()[-1]


def test_a_signal_for_the_parent_reaches_the_run_which_saves_and_stops(tmp_path):
    sends = "os.kill(os.getppid(), signal.SIGTERM)"
    line = words(tmp_path, sends, when="os.path.exists('run/saves')")
    done = subprocess.run([sys.executable, "-m", "shoestring", *line], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 128 + signal.SIGTERM and "--resume" in done.stderr
    assert os.listdir(tmp_path / "run" / "saves")
