"""The cells of the table run the kernels that users run, and every build of them trains alike."""

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import flagship
import pytest
import torch
from runs import astray, run, went
from table import PLANS, task

from shoestring import Plan, apply
from shoestring.kernels import core

HERE = Path(__file__).parent
# They choose, check, write and read the positions of nonzeros, between steps or where the kernels need no table; count
# what the allocator hands out; or call the others, from the third pass on (tests/test_taping.py).
AROUND_A_STEP = {
    "bitmap_from_index", "check_index", "count_nonzeros", "decode_index", "gaps_from_bitmap", "set_bits",
    "supports", "allocations_available", "allocations_begin", "allocations_end", "run_tape",
}  # fmt: skip


class Counting:
    """The compiled core, and how often each of its kernels was called."""

    def __init__(self, compiled):
        self.compiled, self.calls = compiled, Counter()

    def __getattr__(self, name):
        kernel = getattr(self.compiled, name)
        if not callable(kernel):  # how many lanes it has
            return kernel

        def counted(*args):
            self.calls[name] += 1
            return kernel(*args)

        return counted


@pytest.fixture
def counting(monkeypatch):
    if core.core is None:
        pytest.skip("SHOESTRING_CORE=torch: no kernel is compiled")
    counting = Counting(core.core)
    for name, module in sys.modules.items():
        if name.startswith("shoestring.kernels.") and vars(module).get("core") is counting.compiled:
            monkeypatch.setattr(module, "core", counting)
    return counting


STEPS = [
    ("wrn", "no-bn"), ("wrn", "everything"), ("gpt", "nonzero"), ("mlp", "masks"), ("mlp", "8bit"),
    ("dynamicconv", "fp16, residual-1, microbatch by tokens"), ("wrn", "int4"), ("unet", "pool2"),
]  # fmt: skip


def test_every_compiled_kernel_is_run_by_a_step(counting):
    rounded_by_chance = "mlp", Plan(precision="bf16", optimizer="sm3")  # SM3 in 16 bits is in no row of its own
    for model, plan in [*((model, PLANS[row][1]) for model, row in STEPS), rounded_by_chance]:
        run(apply(task(model).with_(clip=1.0), plan).task, steps=1)
    kernels = {name for name, kernel in vars(counting.compiled).items() if callable(kernel) and name[0] != "_"}
    computing = {name for name in kernels if not name.endswith(("_plan", "_scratch"))}  # the others' sizes are cached
    assert computing - set(counting.calls) <= AROUND_A_STEP


@pytest.mark.parametrize("plan", ["no-bn", "residual-1*", "residual-2*", "optimal"])
def test_exact_plans_in_fp32_run_the_compiled_convolution_and_batch_norm(counting, plan):
    run(apply(task("wrn"), PLANS[plan][1]).task, steps=1)
    wanted = {"conv_gather", "conv_weight_gradient", "batch_norm_statistics", "batch_norm_backward"}
    assert wanted <= set(counting.calls)


trained_here = cache(flagship.trained)


SLOW = pytest.mark.slow  # their quick relative: `make test-cores` runs some cells of the table on them


@pytest.mark.parametrize("build", ["torch", pytest.param("generic", marks=SLOW), pytest.param("lanes16", marks=SLOW)])
def test_everything_together_trains_on_the_references_as_on_the_compiled_kernels(tmp_path, build):
    """FP32 sums in another order are rounded to another FP16 number now and then: 2% of the way after two steps."""
    if build != "torch" and not core.build("generic").supports(build):
        pytest.skip(f"{build} does not run on this CPU")
    paths = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, HERE / "flagship.py", tmp_path / "weights"]
    subprocess.run(command, check=True, env=os.environ | {"SHOESTRING_CORE": build, "PYTHONPATH": paths})
    there = replace(trained_here(), weights=torch.load(tmp_path / "weights", weights_only=True))
    assert went(there, trained_here()) == pytest.approx(1, abs=0.005)
    assert astray(there, trained_here()) < 0.04
