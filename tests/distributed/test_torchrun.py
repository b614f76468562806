"""`torchrun -m shoestring train`: one process speaks for all, and all end with the same code."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from layouts import write_cifar_binary
from processes import run_in
from test_killed_processes import ended
from torch import nn

from shoestring import SGD, Plan, ShoestringError, Task, apply
from shoestring.cli.main import main
from shoestring.distributed import joined, speak_as_one

MODEL = """
import os, torch
from torch import nn
from torch.nn import functional as F
from shoestring import SGD, Task

def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)

def task(batch=4, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10))
    images = torch.zeros(batch, 3, 32, 32), torch.zeros(batch, dtype=torch.int64)
    return Task(model, loss, images, SGD(lr=0.05, momentum=0.9), name="net")

def own(batch):
    return task(batch, seed=int(os.environ["RANK"]))

def failing(batch):
    if os.environ["RANK"] == "1":
        raise OSError("the disk of this machine is gone")
    return task(batch)
"""


def prepared(folder, monkeypatch):
    (folder / "mine.py").write_text(MODEL)
    write_cifar_binary(folder / "cifar", 12)
    monkeypatch.chdir(folder)
    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def late_imports(tmp_path_factory):
    """What a run imports late is imported here, before the forks."""
    with pytest.MonkeyPatch.context() as patches:
        prepared(tmp_path_factory.mktemp("alone"), patches)
        patches.setenv("XDG_CACHE_HOME", os.getcwd())
        assert main(f"{TRAIN} --json".split()) == 0


@pytest.fixture
def place(tmp_path, monkeypatch):
    prepared(tmp_path, monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SHOESTRING_TRACEBACK", raising=False)
    return tmp_path


def in_processes(size, *commands, restart=0):
    """Commands (one for all, or one for each) as torchrun would start them -> (exit code, stdout, stderr) of each."""
    return started(size, lambda rank: main(commands[min(rank, len(commands) - 1)].split()), restart)


def started(size, act, restart=0):
    """Processes as torchrun would start them, whose exit code is act(rank) -> (code, stdout, stderr) of each."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        known = {"WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1]}
        free.close()
        children = []
        for rank in range(size):
            child = os.fork()
            if not child:
                known |= {"RANK": rank, "LOCAL_RANK": rank, "TORCHELASTIC_RESTART_COUNT": restart}
                os.environ.update({name: str(value) for name, value in known.items()})
                sys.stdout, sys.stderr = ((Path(folder) / f"{stream}{rank}").open("w") for stream in ("out", "err"))
                code = act(rank)
                sys.stdout.flush(), sys.stderr.flush()
                os._exit(code)
            children.append(child)
        codes = ended(children)
        texts = [[(Path(folder) / f"{stream}{rank}").read_text() for stream in ("out", "err")] for rank in range(size)]
    return [(code, *text) for code, text in zip(codes, texts, strict=True)]


def complaint(answers, code):
    """The one line of one process, where all ended with that code."""
    assert [answer[0] for answer in answers] == [code] * len(answers), answers
    lines = [line for answer in answers for line in answer[2].splitlines() if line.startswith("shoestring: ")]
    (line,) = [line for line in lines if "calibrating" not in line]
    return line


TRAIN = "train mine.py:task --data cifar --batch 6 --updates 4 --save-every 1 --microbatch 2 --run run"


def test_one_folder_one_voice_and_the_command_to_resume(place):
    zero, one = in_processes(2, TRAIN)
    assert zero[0] == one[0] == 0
    assert "net: 4 updates" in zero[1] and one[1] == "" and "shoestring" not in one[2]
    record = json.loads((place / "run" / "record.json").read_text())
    # Reduction goes on beside the backward pass: which of its few scalars is freed first is a matter of timing.
    assert record["finished"]
    assert record["measured_peak_bytes"] == pytest.approx(record["predicted_peak_bytes"], rel=0.001)
    assert "holds a run already" in complaint(in_processes(2, TRAIN), 2)
    before = (place / "run" / "log.jsonl").read_bytes()
    again = in_processes(2, TRAIN, restart=1)
    assert [answer[0] for answer in again] == [0, 0], "torchrun started it again, so the run is resumed"
    assert (place / "run" / "log.jsonl").read_bytes() == before


def test_a_model_in_shards_with_synchronised_batch_norm_is_trained_resumed_and_evaluated_alone(place):
    sharded = f"{TRAIN} --shard fsdp --sync-batch-norm --optimizer 8bit"
    zero, one = in_processes(2, sharded)
    assert zero[0] == one[0] == 0, zero[2]
    record = json.loads((place / "run" / "record.json").read_text())
    assert record["settings"]["techniques"]["shard"] == "fsdp" and record["command"]["sync_batch_norm"]
    assert 0.99 < record["measured_peak_bytes"] / record["predicted_peak_bytes"] < 1.05
    assert [answer[0] for answer in in_processes(2, sharded, restart=1)] == [0, 0]
    assert main(["evaluate", "run", "mine.py:task"]) == 0
    assert main(["export", "run", "-o", "whole.safetensors"]) == 0 and (place / "whole.safetensors").exists()


SIZES = pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])


@SIZES
def test_bad_input_is_one_line_and_one_code(place, size):
    train = TRAIN.replace("--batch 6", f"--batch {3 * size}")
    small = train.replace(f"--batch {3 * size}", "--batch 1").replace(" --microbatch 2", "")
    assert f"a batch of 1 examples cannot be shared by {size} processes" in complaint(in_processes(size, small), 2)
    other = train.replace(f"--batch {3 * size}", f"--batch {2 * size}")
    assert "process 1" in complaint(in_processes(size, train, other), 2)
    assert "the weights of process 1" in complaint(in_processes(size, train.replace(":task", ":own")), 2)
    words = complaint(in_processes(size, train.replace(":task", ":failing")), 2)
    assert "the disk of this machine is gone" in words and "(process 1)" in words
    assert f"takes one process, not {size}" in complaint(in_processes(size, "evaluate run"), 2)
    refused = train.replace("--microbatch 2", "--nonzero 50,layers=3 --shard fsdp")
    assert "nonzero cannot be sharded" in complaint(in_processes(size, refused), 2)
    plans = [train, train.replace("--microbatch 2", "--microbatch 1")]
    assert "of process 1 is not that of process 0" in complaint(in_processes(size, *plans), 2)
    assert not (place / "run" / "record.json").exists()


def script(differs):
    """A script of a user, in which the processes differ in something; ended as Python ends one."""

    def act(rank):
        torch.manual_seed(rank if differs == "seed" else 0)
        wide = 32 + rank * (differs == "model")
        net = nn.Sequential(nn.Linear(8, wide), nn.ReLU(), nn.Linear(wide, 4))
        batch = torch.ones(4, 8), torch.zeros(4, dtype=torch.int64)
        task = Task(net, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), batch, SGD(lr=0.1))
        try:
            lean = apply(task, Plan(microbatch=1 + (rank > 0) * (differs == "plan")))
            lean.step(batch)
        except Exception:
            sys.excepthook(*sys.exc_info())
            return 1
        return 0

    return act


@SIZES
@pytest.mark.parametrize(
    ("differs", "words"), [("plan", "the plan of process 1"), ("model", "the model of"), ("seed", "the weights of")]
)
def test_a_script_of_a_user_that_is_refused_says_so_in_one_line_of_one_process(place, differs, words, size):
    before = sys.excepthook
    assert words in complaint(started(size, script(differs)), 1)
    assert sys.excepthook is before, "the hook is that of the processes"


ALONE = """
import os, sys, torch
from torch import nn
from torch.nn import functional as F
from shoestring import SGD, Plan, ShoestringError, Task, apply

def main(rank, failing):
    torch.manual_seed(0)
    batch = torch.ones(4, 8), torch.zeros(4, dtype=torch.int64)
    task = Task(nn.Linear(8, 4), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), batch, SGD(lr=0.1))
    lean = apply(task, Plan(microbatch=2))
    for number in range(3):
        if rank == failing and number == 1:
            raise ShoestringError("the disk of this machine is gone")
        lean.step(batch)

if __name__ == "__main__":
    main(int(os.environ["RANK"]), int(sys.argv[1]))
"""


def failing_alone(failing):
    """A script in which one process raises between two steps, while the others are in one."""
    script = {"__name__": "script"}
    exec(ALONE, script)

    def act(rank):
        try:
            script["main"](rank, failing)
        except Exception:
            sys.excepthook(*sys.exc_info())
            return 1
        return 0

    return act


@pytest.mark.parametrize(("size", "failing"), [(2, 1), (4, 1), (4, 3)])
def test_an_error_of_one_process_alone_is_told_by_the_first_before_any_ends(place, size, failing):
    answers = started(size, failing_alone(failing))
    words = f"the disk of this machine is gone (process {failing})"
    assert words in complaint(answers, 1) and words in answers[0][2]


@pytest.mark.slow
@pytest.mark.parametrize("failing", range(4))
def test_under_torchrun_an_error_of_one_process_alone_ends_all_four_with_its_code(place, failing):
    (place / "script.py").write_text(ALONE)
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--master-port", f"2942{failing}"]
    told = subprocess.run([*start, "script.py", str(failing)], capture_output=True, timeout=300, text=True).stderr
    assert [line.split()[2] for line in told.splitlines() if "exitcode  :" in line] == ["1"] * 4
    assert [line.startswith("shoestring: the disk") for line in told.splitlines()].count(True) == 1


def test_a_script_keeps_its_own_hook_and_tracebacks_of_other_errors(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", print)
    speak_as_one()
    assert sys.excepthook is print
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    speak_as_one()
    sys.excepthook(ValueError, ValueError("of theirs"), None)
    assert "ValueError: of theirs" in capsys.readouterr().err
    sys.excepthook(ShoestringError, ShoestringError("of ours"), None)
    assert capsys.readouterr().err == "shoestring: of ours\n"


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT is not set"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 of WORLD_SIZE=2"),
        ({"RANK": "first", "WORLD_SIZE": "2"}, "RANK=first"),
    ],
)
def test_processes_that_cannot_meet_are_told_to_use_torchrun(environment, words, monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ShoestringError, match=f"{words}.*torchrun"):
        joined()


def test_one_process_of_torchrun_is_alone(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert joined().size == 1


@pytest.mark.slow
def test_torchrun_restarts_a_killed_process_and_the_run_ends_with_the_same_bits(place):
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2"]
    command = [*start, "--master-port", "29411", "-m", "--", "shoestring", *TRAIN.split()]
    killing = (
        "import os\n_replace = os.replace\ndef dying(*a):\n"
        "    if os.environ.get('TORCHELASTIC_RESTART_COUNT') == '0' and 'update-0000000002' in str(a):\n"
        "        os.kill(os.getpid(), 9)\n    return _replace(*a)\nos.rename = os.replace = dying\n"
    )
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    (place / "run").rename(place / "whole")
    (place / "mine.py").write_text(killing + MODEL)
    told = subprocess.run(command, check=True, capture_output=True, timeout=120, text=True).stderr
    assert "exitcode: -9" in told
    for name in ("log.jsonl", "saves/update-0000000004/model.safetensors", "saves/update-0000000004/manifest.json"):
        assert (place / "run" / name).read_bytes() == (place / "whole" / name).read_bytes()


def the_example():
    spec = spec_from_file_location("several", Path(__file__).parents[2] / "examples" / "several_processes.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    if torch.distributed.is_initialized():
        module.rank, module.size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return module.main(updates=10)


def test_the_example_trains_to_the_same_losses_in_any_number_of_processes():
    alone = the_example()
    assert alone[-1] < 0.9 * alone[0]
    for size in (2, 3):
        for losses in run_in(size, the_example):
            assert losses == pytest.approx(alone, rel=1e-4)
