"""The core that SHOESTRING_CORE names is the one that runs: the Makefile runs a few tests on each."""

import os
import subprocess
import sys

import pytest
import torch

from shoestring.kernels import core
from shoestring.kernels.bitmask import pack_bits

FORCED = os.environ.get("SHOESTRING_CORE")


def test_this_process_runs_on_the_core_that_was_asked_for():
    if FORCED:
        assert core.name == FORCED
    else:
        assert core.name == "avx2" if core.core.supports_avx2() else "generic"


def test_without_a_compiled_core_an_op_is_the_dispatchers_own():
    compiled = not isinstance(pack_bits, torch._ops.OpOverload)
    assert compiled == (core.name != "torch")


@pytest.mark.parametrize("name", ["generic", "torch"])
def test_a_core_can_be_forced(name):
    code = "from shoestring.kernels import core; print(core.name, core.core is None)"
    found = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"SHOESTRING_CORE": name}, capture_output=True
    )
    assert found.stdout.decode().split() == [name, str(name == "torch")]


def test_a_core_that_does_not_exist_is_refused():
    env = os.environ | {"SHOESTRING_CORE": "sse9"}
    found = subprocess.run([sys.executable, "-c", "import shoestring.kernels.core"], env=env, capture_output=True)
    assert b"SHOESTRING_CORE=sse9 does not exist: use avx2, generic or torch" in found.stderr
