"""ARCHITECTURE.md's "One lean step, hop by hop" is what a lean step does: its functions are called, in its order."""

import re
import sys
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import pytest
import torch

from shoestring import Plan, apply, builtin
from shoestring.kernels.core import core
from shoestring.models import materialise

ROOT = Path(__file__).parent.parent
SECTION = (ROOT / "ARCHITECTURE.md").read_text().split("## One lean step, hop by hop\n")[1].split("\n## ")[0]
HOPS = SECTION.split("**Three ways into PyTorch**")[0]
FUNCTIONS = re.findall(r"`((?:[a-z_]+\.)+(?:[A-Z_]\w*\.)?\w+)`", SECTION)
IN_ORDER = re.findall(r"`((?:[a-z_]+\.)+(?:[A-Z_]\w*\.)?\w+)`", HOPS)
KERNELS = re.findall(r"`(csrc/\w+\.cpp):(\w+)`", SECTION)


def is_ours(name):
    return not name.startswith("shoestring.") and not name.endswith(".py")


def resolved(name):
    """A dotted name below `shoestring` -> what it names."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            module = import_module("shoestring." + ".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        return attrgetter(".".join(parts[count:]))(module)
    raise AssertionError(f"{name} is in no module")


def called(run):
    """A function -> the functions of ours that it called, in order, as ARCHITECTURE.md names them."""
    names = []

    def note(frame, event, argument):
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("shoestring."):
            names.append(f"{module.removeprefix('shoestring.')}.{frame.f_code.co_qualname}")

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return names


def test_the_section_names_enough_to_be_followed():
    assert len(list(filter(is_ours, IN_ORDER))) > 40 and len(KERNELS) >= 4


@pytest.mark.parametrize("name", sorted(set(filter(is_ours, FUNCTIONS))))
def test_each_function_that_it_names_exists(name):
    assert callable(resolved(name))


@pytest.mark.parametrize("path, function", KERNELS)
def test_each_kernel_that_it_names_exists(path, function):
    assert re.search(rf"\bvoid {function}\(", (ROOT / path).read_text())


@pytest.mark.skipif(core is None, reason="the kernels are not compiled")
def test_a_lean_step_calls_them_in_this_order():
    task = builtin("wrn-28-2", batch=4, device="meta")
    plan = Plan(nonzero=30, precision="fp16", checkpoint="residual-2*", microbatch=2)
    lean = apply(task, plan)
    materialise(lean.model)
    torch.manual_seed(0)
    batch = lean.task.batch
    lean.step(batch)
    lean.stepper.tapes.clear()  # the section follows the model's code
    calls = iter(called(lambda: lean.step(batch)))
    for name in filter(is_ours, IN_ORDER):
        assert name in calls, f"{name} is not called after what the section names before it"
