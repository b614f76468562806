"""The process meter reads resident memory: what was touched, not what was only allocated."""

import mmap

import pytest

from shoestring.errors import ShoestringError
from shoestring.measuring import process

BLOCK = 64 * 2**20
SLACK = 4 * 2**20  # the kernel counts pages in batches, and Python lives beside the block


def touched(size):
    block = mmap.mmap(-1, size)
    for offset in range(0, size, mmap.PAGESIZE):
        block[offset] = 1
    return block


def test_a_touched_block_counts_at_the_peak_and_not_after_it_is_gone():
    reading = process.measure_process(lambda: touched(BLOCK).close())
    assert reading.meter == "process" and reading.tensor_peak_bytes is None
    assert reading.peak_bytes - reading.start_bytes == pytest.approx(BLOCK, abs=SLACK)
    assert reading.end_bytes - reading.start_bytes == pytest.approx(0, abs=SLACK)


def test_a_block_that_is_still_there_counts_at_the_end():
    reading = process.measure_process(lambda: touched(BLOCK))
    assert reading.end_bytes - reading.start_bytes == pytest.approx(BLOCK, abs=SLACK)


def test_a_block_that_was_never_touched_is_not_resident():
    reading = process.measure_process(lambda: mmap.mmap(-1, BLOCK))
    assert reading.peak_bytes - reading.start_bytes < SLACK


def test_a_system_that_tells_nothing_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "_STATUS", tmp_path / "missing")
    with pytest.raises(ShoestringError, match="VmRSS"):
        process.rss_bytes()
    monkeypatch.setattr(process, "_RESET", tmp_path / "missing" / "folder")
    with pytest.raises(ShoestringError, match="cannot be reset"):
        process.reset_peak()


@pytest.mark.slow
def test_the_base_of_a_process_is_measured_once_and_more_than_torch_alone(tmp_path, monkeypatch):
    from shoestring.measuring import base

    monkeypatch.setenv("SHOESTRING_CACHE", str(tmp_path))
    found = base.process_base_bytes()
    assert 100_000_000 < found < 2_000_000_000
    monkeypatch.setattr(base, "_measure", lambda: 1)
    assert base.process_base_bytes() == found
