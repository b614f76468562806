"""The counter reads what the allocator meter reads, to the byte, in every thread, and keeps nothing."""

import sys
import threading
from pathlib import Path

import pytest
import torch

from shoestring import Plan, apply, builtin
from shoestring.measuring.allocator import measure_allocator
from shoestring.measuring.counted import is_available, measure_counted

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
import growth

pytestmark = pytest.mark.skipif(not is_available(), reason="the core of this checkout does not count, or the system")
BYTES = torch.uint8


@pytest.mark.parametrize("plan", [
    Plan(), Plan(precision="fp16", microbatch=3), Plan(checkpoint="residual-1*", optimizer="8bit"), Plan(nonzero=30),
], ids=str)  # fmt: skip
def test_a_step_has_the_peak_that_the_allocator_meter_reads(plan):
    lean = apply(builtin("wrn-10-0.5", batch=6), plan)
    batch = lean.task.batch
    for _ in range(2):
        lean.step(batch)
    readings = [meter(lambda: lean.step(batch), lean.held()) for meter in (measure_allocator, measure_counted)]
    assert readings[0].peak_bytes == readings[1].peak_bytes > readings[1].start_bytes > 0


def test_what_was_there_before_is_counted_if_it_is_held_and_its_end_is_no_gain():
    before = [torch.empty(5000, dtype=BYTES)]

    def run():
        before.clear()
        return torch.empty(1000, dtype=BYTES)

    reading = measure_counted(run)
    assert (reading.peak_bytes, reading.end_bytes) == (1000, 1000)
    kept = torch.empty(700, dtype=BYTES)
    assert measure_counted(lambda: torch.empty(10, dtype=BYTES), [kept, kept[3:]]).peak_bytes == 710


def test_blocks_of_another_thread_are_counted_and_what_it_frees_is_free():
    mine = []

    def other():
        mine.clear()
        mine.append(torch.empty(300, dtype=BYTES))

    def run():
        mine.append(torch.empty(2000, dtype=BYTES))
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    reading = measure_counted(run)
    assert (reading.peak_bytes, reading.end_bytes) == (2000, 300)


def test_after_an_error_it_counts_again_and_inside_itself_the_allocator_meter_reads():
    with pytest.raises(KeyError):
        measure_counted(lambda: {}["missing"])
    inner = []
    outer = measure_counted(lambda: inner.append(measure_counted(lambda: torch.empty(50, dtype=BYTES))))
    assert outer.meter == "counted" and outer.peak_bytes == 50
    assert inner[0].meter == "allocator" and inner[0].peak_bytes == 50


@pytest.mark.skipif(growth.malloc_bytes() is None, reason="needs glibc's mallinfo2")
def test_its_own_bytes_are_few():
    def heap_of(meter) -> int:
        used = []

        def run():
            for _ in range(20_000):
                torch.empty(8)
            used.append(growth.malloc_bytes())

        meter(run)
        return used[0]

    heap_of(measure_counted)
    bare = heap_of(lambda run: run())
    assert heap_of(measure_counted) - bare < 50_000 < 5_000_000 < heap_of(measure_allocator) - bare
