"""The sources of the core compile for aarch64, as the generic core is built."""

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = "aarch64-linux-gnu-g++"
SOURCES = sorted((ROOT / "csrc").glob("*.cpp"))
LANES = re.search(r"add_core\(_core_generic (\d+)\)", (ROOT / "CMakeLists.txt").read_text())[1]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"needs {COMPILER}: apt-get install g++-aarch64-linux-gnu")
@pytest.mark.parametrize("source", SOURCES, ids=[source.stem for source in SOURCES])
def test_a_source_compiles_for_aarch64(source, tmp_path):
    nanobind = pytest.importorskip("nanobind")
    command = [
        COMPILER, "-std=gnu++17", "-O0", "-fPIC", "-fopenmp", "-Wno-psabi", "-DCORE_NAME=_core_generic",
        f"-DCORE_LANES={LANES}", f"-I{nanobind.include_dir()}", f"-I{sysconfig.get_paths()['include']}",
        "-c", source, "-o", tmp_path / "object",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "object").read_bytes()[18:20] == b"\xb7\x00"  # an ELF object of AArch64
