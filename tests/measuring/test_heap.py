"""The heap meter counts every block of malloc and its kin, in every thread, within malloc's rounding."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from plants import BLOCK, KIN

from shoestring.errors import ShoestringError
from shoestring.measuring import heap, measure
from shoestring.measuring.heap import measure_heap, preload_environment

PLANTS = str(Path(__file__).with_name("plants.py"))
ROUNDING = 8192  # bytes: malloc rounds large blocks to a page; Python's own objects are the rest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD")


@pytest.fixture(scope="module")
def readings(tmp_path_factory):
    answer = tmp_path_factory.mktemp("plants") / "readings.json"
    ours = {**preload_environment(), "LD_PRELOAD": str(heap.library())}  # even if we run under another meter
    subprocess.run([sys.executable, PLANTS, str(answer)], env=ours, check=True)
    return json.loads(answer.read_text())


def blocks(reading):
    """Bytes -> how many blocks; fails where they are not a whole number of blocks, but for the rounding."""
    counts = tuple(round(size / BLOCK) for size in reading)
    for size, count in zip(reading, counts, strict=True):
        assert size == pytest.approx(count * BLOCK, abs=ROUNDING * max(1, count))
    return counts


@pytest.mark.parametrize(
    ("plant", "peak_and_end"),
    [
        ("held", (1, 1)),
        ("dropped", (1, 0)),
        ("grown_and_shrunk", (3, 1)),
        ("two_in_turn", (1, 0)),
        ("two_at_once", (2, 0)),
        ("eight_threads", (8, 0)),
    ],
)
def test_planted_blocks_are_read(readings, plant, peak_and_end):
    assert blocks(readings[plant]) == peak_and_end


@pytest.mark.parametrize("name", KIN)
def test_every_kin_of_malloc_is_counted_and_freed(readings, name):
    assert blocks(readings[name]) == (1, 1)
    assert blocks(readings[f"{name} and free"]) == (1, 0)


def test_a_tensor_of_a_fresh_process_is_read_and_torchs_own_memory_is_not():
    reading = measure_heap(f"{PLANTS}:tensor", [1_000_000])
    assert reading.peak_bytes == pytest.approx(4_000_000, abs=ROUNDING)
    assert reading.end_bytes == pytest.approx(4_000_000, abs=ROUNDING)


def test_a_script_is_measured_with_its_command_line(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys\nblock = bytearray(int(sys.argv[1]))\n")
    assert measure_heap(str(script), [3_000_000]).peak_bytes == pytest.approx(3_000_000, abs=50_000)


def test_another_meter_with_the_same_readers_is_used_as_it_is(tmp_path):
    """A process that already runs under a meter passes that one on and preloads no second."""
    script = tmp_path / "nested.py"
    script.write_text(
        "import os\nfrom shoestring.measuring.heap import is_preloaded, preload_environment\n"
        "assert is_preloaded()\n"
        "assert preload_environment()['LD_PRELOAD'] == os.environ['LD_PRELOAD']\n"
    )
    subprocess.run([sys.executable, str(script)], env=preload_environment(), check=True)


def test_without_the_meter_in_the_process_readers_say_how_to_get_it():
    if heap.is_preloaded():
        pytest.skip("this process runs under a heap meter")
    with pytest.raises(ShoestringError, match="must be there from the start"):
        heap.live()
    with pytest.raises(ShoestringError, match="measure_heap"):
        measure(lambda: None, meter="heap")


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (f"{PLANTS}:nothing", "no function called 'nothing'"),
        (f"{PLANTS}:fails", "KeyError: 'planted'"),
        ("no_such_file.py:run", "no file no_such_file.py"),
        ("no_such_module:run", "No module named 'no_such_module'"),
    ],
)
def test_a_target_that_cannot_run_is_named_with_its_reason(target, reason):
    with pytest.raises(ShoestringError, match=reason):
        measure_heap(target)


def test_a_process_that_dies_gives_an_error_and_no_reading(tmp_path):
    script = tmp_path / "dies.py"
    script.write_text("import os\nos._exit(7)\n")
    with pytest.raises(ShoestringError, match="exit code 7"):
        measure_heap(str(script))


def test_a_run_that_takes_too_long_is_stopped(tmp_path):
    script = tmp_path / "sleeps.py"
    script.write_text("import time\ntime.sleep(60)\n")
    with pytest.raises(ShoestringError, match=r"longer than 0\.5 s"):
        measure_heap(str(script), timeout_seconds=0.5)


@pytest.fixture
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path / "shoestring"


def test_the_meter_is_compiled_once(fresh_cache, monkeypatch):
    built = heap.library()
    assert [built] == list(fresh_cache.iterdir())
    monkeypatch.setenv("PATH", "")
    assert heap.library() == built


def test_a_missing_compiler_is_named_with_what_to_do(fresh_cache, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ShoestringError, match=r"needs a C compiler.*install one"):
        heap.library()


def test_a_compiler_that_fails_leaves_nothing_behind(fresh_cache, monkeypatch):
    monkeypatch.setenv("CC", shutil.which("false"))
    with pytest.raises(ShoestringError, match=r"could not be compiled with .*false: exit code 1"):
        heap.library()
    assert not fresh_cache.exists()
