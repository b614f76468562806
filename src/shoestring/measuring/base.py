"""The memory of a process that trains nothing: Python, torch and what a first step loads, measured once per machine."""

import json
import os
import subprocess
import sys

import torch

from ..cache import made_cache_folder, write_whole
from ..errors import ShoestringError
from ..records import read_object

# A tiny task is profiled, planned for and stepped, with all that a run imports; its own tensors are a few KB.
_PROGRAM = """
import torch
from torch import nn
import shoestring
from shoestring.measuring.counted import measure_counted
from shoestring.measuring.process import peak_rss_bytes
from shoestring.reporting import page, run_progress, terminal
from shoestring.training import job, loop

model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
loss = lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])
task = shoestring.Task(model, loss, (torch.randn(4, 3, 8, 8), torch.zeros(4).long()), shoestring.SGD(momentum=0.9))
shoestring.plan(task, None)  # a search, which is most of what is resident
lean = shoestring.apply(task, shoestring.Plan(precision="bf16", checkpoint="no-bn", microbatch=2))
measure_counted(lambda: [lean.step(task.batch) for _ in range(2)])
print(peak_rss_bytes())
"""


def process_base_bytes() -> int:
    """Bytes that a training process is resident with before its model's own: measured in a fresh process, cached."""
    cached = made_cache_folder() / f"process-base-3-{torch.__version__}-{torch.get_num_threads()}.json"
    try:
        return int(read_object(cached.read_bytes())["bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        found = _measure()
        write_whole(cached, json.dumps({"bytes": found}).encode())
        return found


def _measure() -> int:
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    ran = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, env=environment)
    if ran.returncode:
        raise ShoestringError(f"the memory of an empty process could not be measured: {ran.stderr.strip()[-200:]}")
    return int(ran.stdout.split()[-1])
