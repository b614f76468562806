"""Real cgroups: their limit is the default budget, and a run that the kernel kills in one goes on with less."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

LIMIT = 700 * 2**20  # torch and our own modules take some 300 MB of it
MEMORY = Path("/sys/fs/cgroup/memory")

TASK = """
    import torch
    from shoestring import SGD, Task

    class Hungry(torch.nn.Module):
        \"\"\"16 MB for each example, and no parameters to speak of.\"\"\"
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def forward(self, x):
            wide = x[:, :1].expand(-1, 2**22).contiguous()
            return self.layer(x) + wide[:, :2]

    def task(batch=32):
        example = torch.randn(batch, 4), torch.randint(2, (batch,))
        def loss(model, batch):
            return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        return Task(Hungry(), loss, example, SGD(lr=0.1), microbatches=True)

    def batches(batch=32):
        torch.manual_seed(0)
        return [(torch.randn(batch, 4), torch.randint(2, (batch,))) for _ in range(4)]
"""


@pytest.fixture
def cgroup():
    """A cgroup with LIMIT bytes, inside our own -> the words before a command that runs in it."""
    ours = next((line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines()
                 if line.split(":")[1] == "memory"), None)  # fmt: skip
    if ours is None or not MEMORY.is_dir():
        pytest.skip("this machine has no memory cgroup of version 1")
    place = MEMORY / ours.lstrip("/") / f"shoestring-{os.getpid()}"
    try:
        place.mkdir()
        (place / "memory.limit_in_bytes").write_text(str(LIMIT))
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error.strerror}")
    yield ["sh", "-c", f'echo $$ > {place}/cgroup.procs && exec "$@"', "sh"]
    place.rmdir()


def run(cgroup, tmp_path, *words):
    (tmp_path / "mine.py").write_text(textwrap.dedent(TASK))
    command = [*cgroup, sys.executable, "-m", "shoestring", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)


def test_the_limit_of_a_cgroup_is_the_budget_where_none_is_named(cgroup, tmp_path):
    code = "from shoestring.limits import room; print(room().left_bytes)"
    done = subprocess.run([*cgroup, sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) < LIMIT
    done = run(cgroup, tmp_path, "plan", "mine.py:task", "--budget", "auto", "--json")
    assert done.returncode == 0, done.stderr
    assert 0 < json.loads(done.stdout)["budget_bytes"] < LIMIT


def test_a_run_that_the_kernel_kills_for_its_memory_goes_on_with_less(cgroup, tmp_path):
    words = (
        "train",
        "mine.py:task",
        "--data",
        "mine.py:batches",
        "--updates",
        "4",
        "--save-every",
        "1",
        "--run",
        "run",
    )
    done = run(cgroup, tmp_path, *words, "--supervise")
    assert done.returncode == 0, done.stderr
    assert "was killed" in done.stderr or "ran out of memory" in done.stderr
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["finished"] and record["settings"]["techniques"]["microbatch"] < 32
