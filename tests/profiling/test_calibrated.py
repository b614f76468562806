"""`shoestring.profile` counts the scratch inside PyTorch's operators, as the command line does."""

import json

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import shoestring
from metering import measured
from shoestring import SGD, Task, _is_on_cpu
from shoestring.cli.main import main

FILE = """
import torch
from torch import nn
from shoestring import SGD, Task

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.up = nn.Conv2d(16, 16, 7, padding=3, groups=16), nn.LayerNorm(16), nn.Linear(16, 64)
        self.down, self.out = nn.Linear(64, 16), nn.LSTM(16, 32, batch_first=True)
    def forward(self, x):
        h = self.norm(self.conv(x).permute(0, 2, 3, 1))
        return self.out(self.down(nn.functional.gelu(self.up(h))).flatten(1, 2))[0]

def task():
    torch.manual_seed(0)
    return Task(Block(), lambda model, batch: model(batch).square().mean(), torch.randn(8, 16, 12, 12), SGD(lr=0.1))
"""


@pytest.fixture
def scratchy(tmp_path, monkeypatch):
    """A task whose operators need much inside themselves, as a file and as an object."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "mine.py").write_text(FILE)
    names: dict = {}
    exec(FILE, names)
    return f"{tmp_path / 'mine.py'}:task", names["task"]()


def test_python_and_the_command_line_tell_the_same_number(scratchy, capsys):
    path, task = scratchy
    assert main(["profile", path, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert shoestring.profile(task).to_json()["bytes"] == told["bytes"]


def test_the_default_is_what_a_run_takes(scratchy):
    _, task = scratchy
    assert shoestring.profile(task).peak_bytes == pytest.approx(measured(task).peak_bytes, rel=0.02)
    assert shoestring.profile(task, calibrate=False).peak_bytes < 0.95 * measured(task).peak_bytes


def test_a_calibrated_profile_has_nothing_unseen_and_an_uncalibrated_one_says_what_it_leaves_out(scratchy):
    _, task = scratchy
    assert "not seen" not in str(shoestring.profile(task))
    left_out = shoestring.profile(task, calibrate=False)
    assert "not calibrated, not counted" in str(left_out)
    assert left_out.to_json()["bytes"]["workspace"] is None


def test_a_table_of_ones_own_is_taken_and_nothing_is_measured(scratchy, tmp_path):
    _, task = scratchy
    calls = shoestring.profile(task, calibrate=False).signatures
    table = dict.fromkeys(map(str, calls), 1_000_000)
    assert shoestring.profile(task, workspace=table).workspace_peak_bytes == 1_000_000
    assert not (tmp_path / "cache").exists()


def test_only_what_runs_on_the_cpu_is_calibrated_there():
    def task(device: str) -> Task:
        with FakeTensorMode():
            weight = nn.Parameter(torch.zeros(4, device=device))
        return Task(nn.ParameterList([weight]), loss=print, batch=None, optimizer=SGD())

    assert _is_on_cpu(task("cpu")) and _is_on_cpu(task("meta"))
    assert not _is_on_cpu(task("cuda:0"))
