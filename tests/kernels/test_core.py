"""The core that SHOESTRING_CORE names is the one that runs: the Makefile runs a few tests on each."""

import os
import platform
import subprocess
import sys

import pytest
import torch

from shoestring.errors import ShoestringError
from shoestring.kernels import core
from shoestring.kernels.bitmask import pack_bits

FORCED = os.environ.get("SHOESTRING_CORE")
LANES = {"avx512": 16, "lanes16": 16, "avx2": 8, "generic": 4}


@pytest.fixture
def load(monkeypatch):
    """load(name): what an import of the kernels would choose where SHOESTRING_CORE is that name."""

    def load(name):
        monkeypatch.setenv("SHOESTRING_CORE", name)
        return core._load()

    return load


def test_this_process_runs_on_the_core_that_was_asked_for():
    if FORCED:
        assert core.name == FORCED
    else:
        assert core.name == next(name for name in core.NEEDS if core.core.supports(name))


@pytest.mark.skipif(not hasattr(torch.cpu, "get_capabilities"), reason="this torch does not tell the CPU's features")
def test_the_core_is_chosen_by_the_features_that_pytorch_finds_too():
    able, supports = torch.cpu.get_capabilities(), core.build("generic").supports
    assert supports("generic") and not supports("sse9")
    assert supports("avx2") == all(able.get(name, False) for name in ("avx2", "fma3", "f16c"))
    assert supports("avx512") == all(able.get(f"avx512_{name}", False) for name in ("f", "bw", "vl", "dq"))


def test_without_a_compiled_core_an_op_is_the_dispatchers_own():
    compiled = not isinstance(pack_bits, torch._ops.OpOverload)
    assert compiled == (core.name != "torch")


@pytest.mark.parametrize("name", [*core.CHOICES, "lanes16"])
def test_a_core_can_be_forced_where_the_cpu_runs_it_and_is_refused_elsewhere(load, name):
    if name == "torch" or core.build("generic").supports(name):
        found, compiled = load(name)
        assert (found, getattr(compiled, "lanes", 0)) == (name, LANES.get(name, 0))
    else:
        with pytest.raises(ShoestringError, match=f"SHOESTRING_CORE={name} needs a CPU with"):
            load(name)


def test_it_is_forced_at_import():
    code = "from shoestring.kernels import core; print(core.name)"
    environment = os.environ | {"SHOESTRING_CORE": "generic"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True).stdout == b"generic\n"


def test_a_core_that_does_not_exist_is_refused(load):
    with pytest.raises(
        ShoestringError, match="SHOESTRING_CORE=sse9 does not exist: use avx512, avx2, generic or torch"
    ):
        load("sse9")


def test_a_core_that_was_not_built_is_refused_with_the_remedy(monkeypatch):
    if not core.build("generic").supports("lanes16"):
        pytest.skip("lanes16 needs AVX2")
    monkeypatch.setitem(sys.modules, "shoestring.kernels._core_lanes16", None)
    with pytest.raises(ShoestringError, match="SHOESTRING_CORE=lanes16 was not built: install from a checkout"):
        core.build("lanes16")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the other cores are for x86-64")
@pytest.mark.parametrize("name", ["avx512", "avx2", "generic", "lanes16"])
def test_every_core_was_built_and_has_the_same_kernels(name):
    """That of AVX-512 cannot be loaded elsewhere: its initialisation may use what the CPU has not."""
    from importlib.util import find_spec

    assert find_spec(f"shoestring.kernels._core_{name}") is not None
    if core.build("generic").supports(name):
        assert set(dir(core.build(name))) == set(dir(core.build("generic")))
