"""One way in to all meters, and a plain word where one cannot work."""

import pytest
import torch

from shoestring.errors import ShoestringError
from shoestring.measuring import METERS, available, heap, measure


def test_the_default_meter_reads_tensors_to_the_byte():
    reading = measure(lambda: torch.empty(100))
    assert (reading.meter, reading.peak_bytes) == ("allocator", 400)


def test_the_record_is_plain_json_without_the_long_timelines():
    record = measure(lambda: torch.empty(100)).to_json()
    assert record["peak_bytes"] == 400 and record["by_operation"] == {"aten::empty": 400}
    assert not [key for key in record if "timeline" in key]


def test_a_meter_that_does_not_exist_is_refused():
    with pytest.raises(ShoestringError, match="no meter called 'scales': choose one of allocator, heap"):
        measure(lambda: None, meter="scales")


def test_only_the_heap_meter_takes_a_target():
    with pytest.raises(ShoestringError, match="runs a function"):
        measure("module:function")


def test_every_meter_says_whether_it_works_and_why():
    meters = available()
    assert tuple(meters) == METERS
    assert meters["allocator"][0]
    assert all(isinstance(works, bool) and reason for works, reason in meters.values())


def test_a_heap_meter_without_a_compiler_is_reported_as_missing(tmp_path, monkeypatch):
    if heap.is_preloaded():
        pytest.skip("this process runs under a heap meter")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    works, reason = available()["heap"]
    assert not works and "C compiler" in reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_cuda_meter_says_so():
    assert available()["cuda"] == (False, "torch finds no GPU")
    with pytest.raises(ShoestringError, match="needs a GPU"):
        measure(lambda: None, meter="cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_tensor_on_the_gpu_is_read():
    reading = measure(lambda: torch.empty(2**20, device="cuda"), meter="cuda")
    assert reading.peak_bytes - reading.start_bytes == 2**22
