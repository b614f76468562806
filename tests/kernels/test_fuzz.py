"""Every compiled kernel gives PyTorch's numbers in any geometry, and touches no memory but its own."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import fuzz
import pytest

from shoestring.kernels.core import build, name

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(name == "torch", reason="needs the compiled core")


@pytest.mark.parametrize("family", fuzz.FAMILIES)
def test_random_calls_agree_with_pytorch(family):
    for number in range(60 if "conv" in family else 30):
        fuzz.check(family, number)


@pytest.mark.slow
@pytest.mark.parametrize("family", fuzz.FAMILIES)
def test_a_thousand_random_calls_agree_with_pytorch(family):
    for number in range(1000, 2000):
        fuzz.check(family, number)


def sanitizer() -> Path | None:
    """The library of the compiler's AddressSanitizer, which must be loaded before anything else."""
    compiler = shutil.which("g++")
    if compiler is None:
        return None
    told = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    path = Path(told.stdout.strip())
    return path.resolve() if path.is_absolute() and path.exists() else None


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    """Where the cores are built with AddressSanitizer, each when it is asked for."""
    pytest.importorskip("nanobind")
    if sanitizer() is None:
        pytest.skip("g++ has no AddressSanitizer here")
    build = tmp_path_factory.mktemp("sanitized")
    ninja = Path(importlib.import_module("ninja").BIN_DIR) / "ninja"
    cmake = Path(importlib.import_module("cmake").CMAKE_BIN_DIR) / "cmake"
    settings = {
        "CMAKE_BUILD_TYPE": "Debug",
        "CORE_OPTIMIZATION": "-O1",
        "CMAKE_CXX_FLAGS": "-fsanitize=address -fno-omit-frame-pointer -g1 -w",
        "CMAKE_MODULE_LINKER_FLAGS": "-fsanitize=address",
        "CMAKE_MAKE_PROGRAM": ninja,
        "Python_EXECUTABLE": sys.executable,
        "nanobind_DIR": importlib.import_module("nanobind").cmake_dir(),
    }
    command = [cmake, "-S", ROOT, "-B", build, "-G", "Ninja", *(f"-D{key}={value}" for key, value in settings.items())]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return build


# The sanitized modules stand in for those of the package, however it was installed.
RUN = """
import importlib.util, pathlib, runpy, sys
import torch
folder, script, *sys.argv[1:] = sys.argv[1:]
for path in pathlib.Path(folder).glob("_core_*.so"):
    name = "shoestring.kernels." + path.name.split(".")[0]
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
sys.argv[0] = script
runpy.run_path(script, run_name="__main__")
"""


def run_sanitized(folder, core, script, *arguments):
    cmake = Path(importlib.import_module("cmake").CMAKE_BIN_DIR) / "cmake"
    command = [cmake, "--build", folder, "--target", f"_core_{core}"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    environment = os.environ | {
        "LD_PRELOAD": str(sanitizer()),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python and PyTorch keep what they need until the end
        "SHOESTRING_CORE": core,
        "PYTHONPATH": str(ROOT / "tests" / "kernels"),
    }
    command = [sys.executable, "-c", RUN, str(folder), str(script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_the_sanitizer_sees_a_write_beside_a_tensor(sanitized, tmp_path):
    script = tmp_path / "beside.py"
    script.write_text(
        "import torch\nfrom shoestring.kernels.core import core\n"
        "mask, bits = torch.ones(800, dtype=torch.bool), torch.empty(10, dtype=torch.uint8)\n"
        "core.pack_bits(mask.data_ptr(), bits.data_ptr(), 800, 1)\n"
    )
    done = run_sanitized(sanitized, "generic", script)
    assert done.returncode and "heap-buffer-overflow" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("core", ["generic", "avx2", "lanes16", "avx512"])
def test_random_calls_touch_no_memory_but_their_own(sanitized, core):
    if not build("generic").supports(core):
        pytest.skip(f"{core} does not run on this CPU")
    script = ROOT / "tests" / "kernels" / "fuzz.py"
    done = run_sanitized(sanitized, core, script, "--cases", "300", "--first", "3000", "--unfenced")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("300 cases") == len(fuzz.FAMILIES)
