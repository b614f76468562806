"""Tensors on disk in the safetensors layout, written and read in place: no second copy of a model is made.

A file is 8 bytes with the length of the header, the header (JSON: the type, shape and offset of each tensor by name),
and the values. They go straight from a tensor's memory to the file, and the checksum is computed on the way; they are
read back into existing tensors. If strides forbid that, at most CHUNK bytes are copied at a time.
"""

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ..errors import DamagedSave, ShoestringError

CHUNK = 2**20
MOST_HEADER = 100_000_000  # bytes; the library's own limit

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Written:
    """The size and checksum that a file must have when it is read."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: its values begin at byte `start` of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class HashedFile:
    """A file that is written from start to end, and the checksum of its content."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.bytes, self.hash = file, 0, hashlib.sha256()

    def write(self, data: Any) -> None:
        view = memoryview(data)
        self.hash.update(view)
        self.bytes += len(view)
        while len(view):
            view = view[self.file.write(view) :]  # an unbuffered file may take only a part

    @property
    def written(self) -> Written:
        return Written(self.bytes, self.hash.hexdigest())


def write_tensors(
    file: IO[bytes], tensors: Mapping[str, Tensor], make: Callable[[str], Tensor] | None = None
) -> Written:
    """Writes named tensors to an open, unbuffered file; at most CHUNK bytes are copied at a time.

    With `make(name)`, its results are written instead, each made when its turn comes; `tensors` gives their types and
    shapes.
    """
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())  # keeps all values aligned
    out = HashedFile(file)
    out.write(_header(names, tensors))
    for name in names:
        _write_values(out, tensors[name] if make is None else make(name))
    return out.written


def _write_values(out: HashedFile, tensor: Tensor) -> None:
    for piece in pieces(tensor.detach()):
        out.write(as_bytes(piece.cpu().contiguous()))


def _header(names: list[str], tensors: Mapping[str, Tensor]) -> bytes:
    places, end = {}, 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in CODES or tensor.layout != torch.strided:
            raise ShoestringError(
                f"tensor {name!r} ({tensor.dtype}, {tensor.layout}) cannot be saved: "
                "only dense tensors of plain types can"
            )
        start, end = end, end + tensor.numel() * tensor.element_size()
        places[name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(places).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def pieces(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor -> parts of at most CHUNK bytes that together hold its values in order."""
    size = tensor.numel() * tensor.element_size()
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(CHUNK // tensor.element_size()) if size else ()
    elif size <= CHUNK:
        yield tensor
    elif (rows := CHUNK * len(tensor) // size) > 1:
        yield from tensor.split(rows)
    else:
        for row in tensor:
            yield from pieces(row)


def as_bytes(tensor: Tensor) -> memoryview:
    """A contiguous tensor on the CPU -> its memory, not a copy."""
    return tensor.view(-1).view(torch.uint8).numpy().data


class TensorFile:
    """The tensors of a file, read on demand: into new tensors, or into existing ones."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries = _read_header(path)

    def read(self, name: str) -> Tensor:
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        self.read_into(name, tensor)
        return tensor

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Fills a tensor of the same type and shape, whatever its strides or device."""
        entry = self.entries[name]
        assert (entry.dtype, entry.shape) == (tensor.dtype, tuple(tensor.shape)), name
        with self.path.open("rb", buffering=0) as file, torch.no_grad():
            file.seek(entry.start)
            for piece in pieces(tensor.detach()):
                _read_piece(file, piece)


def _read_piece(file: IO[bytes], piece: Tensor) -> None:
    """Reads the next values of a file into a piece, straight into its memory if possible."""
    if piece.is_contiguous() and piece.device.type == "cpu":
        _fill(file, as_bytes(piece))
    else:
        values = torch.empty(piece.shape, dtype=piece.dtype)
        _fill(file, as_bytes(values))
        piece.copy_(values)


def _fill(file: IO[bytes], view: memoryview) -> None:
    while len(view):
        count = file.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise DamagedSave(f"{file.name} ends too early: it was truncated after it was checked")
        view = view[count:]


def _read_header(path: Path) -> dict[str, Entry]:
    require_regular(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(MOST_HEADER, size):
                raise ValueError(f"it would have {length:,} bytes")
            record = json.loads(file.read(length))
        record.pop("__metadata__", None)
        entries = {name: _entry(place, 8 + length, size) for name, place in record.items()}
    except OSError as error:
        raise ShoestringError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise DamagedSave(f"{path} is not a safetensors file: its header cannot be read ({error})") from error
    return entries


def require_regular(path: Path) -> None:
    """Refuses what exists and is not a regular file: opening a pipe would wait for ever, a device never ends."""
    if path.exists() and not path.is_file():
        raise DamagedSave(f"{path} is not a regular file, so it is not part of a save")


def _entry(place: dict[str, Any], values: int, size: int) -> Entry:
    """A header's record of a tensor, where the values begin in the file, and the file's size -> the entry."""
    dtype, shape, (start, end) = DTYPES[place["dtype"]], tuple(place["shape"]), place["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
        raise ValueError("a size that is not a whole number")
    if values + end > size:
        raise ValueError(f"a tensor that ends at byte {values + end:,} of {size:,}")
    if end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{end - start} bytes for a tensor of shape {shape}")
    return Entry(dtype, shape, values + start)


def checksum(path: Path) -> Written:
    """A file -> its size and SHA-256, read CHUNK bytes at a time."""
    digest, size, buffer = hashlib.sha256(), 0, memoryview(bytearray(CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return Written(size, digest.hexdigest())
