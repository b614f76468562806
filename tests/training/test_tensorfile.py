import json
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from shoestring.errors import DamagedSave, ShoestringError
from shoestring.measuring import measure_allocator
from shoestring.runs import tensorfile
from shoestring.runs.tensorfile import CHUNK, DTYPES, TensorFile, checksum, pieces, write_tensors


def write(path, tensors):
    with path.open("wb", buffering=0) as file:
        return write_tensors(file, tensors)


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def one_of_each_type():
    raw = torch.randint(256, (6, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return {code: raw > 100 if dtype == torch.bool else raw.view(dtype) for code, dtype in DTYPES.items()}


AWKWARD = {
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 3),
    "odd": torch.arange(3, dtype=torch.uint8),
    "transposed": torch.randn(5, 7).t(),
    "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "every second": torch.randn(10)[::2],
    "expanded": torch.randn(3, 1).expand(3, 4),
    'name with "quotes" and ümlauts': torch.ones(1),
}


@pytest.mark.parametrize("tensors", [one_of_each_type(), AWKWARD, {}], ids=["types", "shapes", "none"])
def test_what_is_written_is_read_again_to_the_bit(tmp_path, tensors):
    write(tmp_path / "a", tensors)
    file = TensorFile(tmp_path / "a")
    assert set(file.entries) == set(tensors)
    for name, tensor in tensors.items():
        found = file.read(name)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(bits(found), bits(tensor))


@pytest.mark.parametrize("tensors", [one_of_each_type(), AWKWARD], ids=["types", "shapes"])
def test_the_safetensors_library_reads_our_files_and_we_read_its(tmp_path, tensors):
    write(tmp_path / "ours", tensors)
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, tmp_path / "theirs")
    theirs, ours = load_file(tmp_path / "ours"), TensorFile(tmp_path / "theirs")
    for name, tensor in tensors.items():
        assert torch.equal(bits(theirs[name]), bits(tensor)) and torch.equal(bits(ours.read(name)), bits(tensor))


@pytest.mark.parametrize("name", ["scalar", "transposed", "channels last", "every second"])
def test_a_tensor_that_is_there_already_is_filled_whatever_its_strides(tmp_path, name):
    write(tmp_path / "a", AWKWARD)
    base = torch.zeros_like(AWKWARD[name])
    place, strides = base.data_ptr(), base.stride()
    TensorFile(tmp_path / "a").read_into(name, base)
    assert torch.equal(base, AWKWARD[name]) and (base.data_ptr(), base.stride()) == (place, strides)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 64), st.randoms(use_true_random=False))
def test_the_pieces_of_a_tensor_are_its_values_in_order(shape, chunk, random):
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
    order = random.sample(range(len(shape)), len(shape))
    tensor = tensor.permute(order)
    before, tensorfile.CHUNK = tensorfile.CHUNK, max(4, chunk)
    try:
        parts = list(pieces(tensor))
    finally:
        tensorfile.CHUNK = before
    assert torch.equal(torch.cat([part.reshape(-1) for part in parts]), tensor.reshape(-1))
    assert all(part.numel() * 4 <= max(4, chunk) for part in parts)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_writing_and_reading_copy_at_most_a_chunk(tmp_path, layout):
    tensors = {str(n): torch.zeros(64, 64, 32, 32).to(memory_format=layout) for n in range(2)}  # 16.8 MB each
    writing = measure_allocator(lambda: write(tmp_path / "a", tensors))
    file = TensorFile(tmp_path / "a")
    reading = measure_allocator(lambda: [file.read_into(name, tensor) for name, tensor in tensors.items()])
    most = 0 if layout == torch.contiguous_format else CHUNK
    assert writing.peak_bytes <= most and reading.peak_bytes <= most


def test_the_checksum_told_while_writing_is_that_of_the_file(tmp_path):
    written = write(tmp_path / "a", AWKWARD)
    assert written == checksum(tmp_path / "a") and written.bytes == (tmp_path / "a").stat().st_size


def test_a_tensor_that_no_file_can_hold_is_refused(tmp_path):
    with pytest.raises(ShoestringError, match=r"'x'.*cannot be saved"):
        write(tmp_path / "a", {"x": torch.eye(3).to_sparse()})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"abc",
        struct.pack("<Q", 2**62) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"\xff\xff",
        *(
            struct.pack("<Q", len(text)) + text
            for text in (
                json.dumps({"x": place}).encode()
                for place in (
                    {},
                    {"dtype": "PICKLE", "shape": [1], "data_offsets": [0, 4]},
                    {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
                    {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]},
                    {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]},
                )
            )
        ),
    ],
)
def test_a_file_with_a_wrong_header_is_refused(tmp_path, data):
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(DamagedSave, match="not a safetensors file"):
        TensorFile(tmp_path / "a")


def test_a_file_that_was_cut_does_not_give_half_a_tensor(tmp_path):
    write(tmp_path / "a", {"x": torch.randn(100)})
    with (tmp_path / "a").open("r+b") as file:
        file.truncate((tmp_path / "a").stat().st_size - 1)
    with pytest.raises(DamagedSave, match="ends at byte 480 of 479"):
        TensorFile(tmp_path / "a").read("x")
