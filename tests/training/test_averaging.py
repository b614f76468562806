import pytest
import torch

from shoestring.errors import ShoestringError
from shoestring.measuring import measure_allocator
from shoestring.training.averaging import average_into
from shoestring.training.tensorfile import TensorFile, write_tensors


def files(tmp_path, *contents):
    for number, tensors in enumerate(contents):
        with (tmp_path / str(number)).open("wb", buffering=0) as file:
            write_tensors(file, tensors)
    return [TensorFile(tmp_path / str(number)) for number in range(len(contents))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_weights_are_the_mean_in_at_least_32_bits(tmp_path, dtype):
    parts = [torch.randn(5, 3, generator=torch.Generator().manual_seed(n)).to(dtype) for n in range(10)]
    result = {"w": torch.zeros(5, 3, dtype=dtype)}
    average_into(result, files(tmp_path, *({"w": part} for part in parts)))
    wide = torch.promote_types(dtype, torch.float32)
    expected = torch.stack(parts).to(wide).mean(0).to(dtype)
    assert torch.allclose(result["w"].double(), expected.double(), atol=torch.finfo(dtype).eps)


def test_ten_large_weights_of_16_bits_do_not_overflow_on_the_way(tmp_path):
    result = {"w": torch.zeros(2, dtype=torch.float16)}
    average_into(result, files(tmp_path, *({"w": torch.full((2,), 60_000.0).half()} for _ in range(10))))
    assert torch.equal(result["w"], torch.full((2,), 60_000.0).half())


def test_counters_are_the_last_ones(tmp_path):
    result = {"seen": torch.tensor(0)}
    average_into(result, files(tmp_path, *({"seen": torch.tensor(n)} for n in (10, 20, 30))))
    assert result["seen"] == 30


@pytest.mark.parametrize("other", [torch.tensor([1, 0], dtype=torch.uint8), torch.ones(3, dtype=torch.uint8)])
def test_weights_under_masks_that_changed_are_not_averaged(tmp_path, other):
    mask = torch.tensor([0, 1], dtype=torch.uint8)
    with pytest.raises(ShoestringError, match="mask changed between them"):
        average_into({"mask": mask.clone()}, files(tmp_path, {"mask": other}, {"mask": mask}))


def test_one_tensor_at_a_time_is_in_memory(tmp_path):
    names, size = [str(n) for n in range(8)], 400_000
    contents = [{name: torch.zeros(size // 4) for name in names} for _ in range(4)]
    found = files(tmp_path, *contents)
    used = measure_allocator(lambda: average_into(contents[0], found))
    assert used.peak_bytes <= 2 * size  # the sum, and the one that is added
