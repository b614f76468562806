"""The memory that is left: of cgroups in both versions, of the process's own limits, and of the system."""

import ctypes
import resource
import subprocess
import sys

import pytest

from shoestring import limits
from shoestring.cli.budgets import auto_budget
from shoestring.cli.plan import budget
from shoestring.errors import ShoestringError


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A /proc and a /sys/fs/cgroup of our own, in which files are written by `system(path=text)`."""
    monkeypatch.setattr(limits, "PROC", tmp_path / "proc")
    monkeypatch.setattr(limits, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(limits, "_process", lambda: iter(()))

    def write(files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    return write


def test_the_tightest_cgroup_around_the_process_counts(system):
    system({
        "proc/self/cgroup": "0::/user/job\n",
        "cgroup/user/job/memory.max": "max\n", "cgroup/user/job/memory.current": "10\n",
        "cgroup/user/memory.max": "5000\n", "cgroup/user/memory.current": "2000\n",
        "cgroup/memory.max": "9000\n", "cgroup/memory.current": "100\n",
        "proc/meminfo": "MemTotal: 99 kB\nMemAvailable: 88 kB\n",
    })  # fmt: skip
    assert sorted(room.left_bytes for room in limits.limits()) == [3000, 8900]
    assert limits.room().left_bytes == 3000 and "5,000" in limits.room().of


def test_the_older_cgroups_are_read_too(system):
    system({
        "proc/self/cgroup": "5:cpu,cpuacct:/x\n3:memory:/job\n",
        "cgroup/memory/job/memory.limit_in_bytes": "4096\n", "cgroup/memory/job/memory.usage_in_bytes": "96\n",
        "cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",  # none is set
    })  # fmt: skip
    assert [room.left_bytes for room in limits.limits()] == [4000]


def test_a_container_sees_its_own_group_as_the_root(system):
    """Its path is that of the host, which is not there: the root's files are."""
    system({"proc/self/cgroup": "0::/docker/abc\n", "cgroup/memory.max": "700\n", "cgroup/memory.current": "900\n"})
    assert [room.left_bytes for room in limits.limits()] == [0]


def test_without_a_limit_auto_takes_what_is_available_and_says_so(system):
    said = []
    system({"proc/self/cgroup": "0::/\n", "cgroup/memory.max": "max\n", "proc/meminfo": "MemAvailable: 1000 kB\n"})
    assert auto_budget(said.append) == 921_600
    assert "the memory that is available" in said[0] and "921.6 KB" in said[0]


def test_where_nothing_is_known_or_left_auto_is_refused(system):
    with pytest.raises(ShoestringError, match="finds no limit"):
        auto_budget(print)
    system({"proc/self/cgroup": "0::/\n", "cgroup/memory.max": "5\n", "cgroup/memory.current": "5\n"})
    with pytest.raises(ShoestringError, match="nothing is left of the cgroup limit of 5 bytes"):
        auto_budget(print)


@pytest.mark.parametrize("text", ["garbage", "", "1:name=systemd:/", ":::", "0::", "x\n\n0::/a:b\n"])
def test_what_cannot_be_read_is_no_limit(system, text):
    system({"proc/self/cgroup": text, "cgroup/memory.max": "not a number"})
    assert limits.limits() == [] and limits.room() is None


@pytest.mark.parametrize(("kind", "name"), [("RLIMIT_AS", "AS"), ("RLIMIT_DATA", "DATA")])
def test_a_limit_of_the_process_is_seen_with_what_it_has_taken(kind, name):
    code = (
        f"import resource; resource.setrlimit(resource.{kind}, (2**32, resource.RLIM_INFINITY));"
        "from shoestring.limits import limits; print(*[(r.left_bytes, r.of) for r in limits() if 'RLIMIT' in r.of])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    left, words = eval(out)
    assert 2**31 < left < 2**32 and f"RLIMIT_{name} of 4,294,967,296 bytes" in words
    assert resource.getrlimit(resource.RLIMIT_AS)[0] != 2**32  # of that process alone


def test_a_budget_is_a_size_or_auto():
    assert (budget("7MB"), budget("auto"), budget("50%")) == ("7MB", "auto", "50%")
    with pytest.raises(ShoestringError, match="not a size"):
        budget("automatic")


FREED = """
import ctypes, sys
from shoestring.limits import give_back
c = ctypes.CDLL(None)
c.malloc.restype, c.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
data = lambda: int([line for line in open("/proc/self/status") if line.startswith("VmData")][0].split()[1])
c.free(c.malloc(16_000_000))  # as a first step does: from now on, glibc takes smaller blocks from its heap
give_back(from_now_on="map" in sys.argv)
before = data()
blocks = [c.malloc(1_000_000) for _ in range(40)]
for block in blocks[::2]:
    c.free(block)
print(data() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_after_memory_ran_out_what_is_freed_goes_back_even_between_blocks_in_use():
    kept, given = (
        int(subprocess.run([sys.executable, "-c", FREED, *words], capture_output=True, text=True, check=True).stdout)
        for words in ([], ["map"])
    )
    assert kept > 38_000 and given < 21_000  # KB
