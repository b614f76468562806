"""Tensors on disk in the safetensors layout, written and read in place: no second copy of a model is made.

A file is 8 bytes with the length of the header, the header (JSON: the type, shape and offset of each tensor by name),
and the values. A sealed file has its own SHA-256 in the header (`__metadata__`). Values go straight from the tensor's
memory to the file, and the checksum is computed on the way; they are read back into existing tensors. If strides forbid
that, at most CHUNK bytes are copied at a time.
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

from ..distributed import first_row, local
from ..errors import DamagedSave, ShoestringError
from ..records import matches, read_object

CHUNK = 2**20
MOST_HEADER = 16 * 2**20  # bytes: 100,000 tensors; one of the library's own limit takes gigabytes to parse
MOST_DIMENSIONS = 64  # of a tensor, as in PyTorch
OURS, BLANK = "shoestring", "0" * 64  # the key of a seal, and what is hashed in its place

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

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


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
    file: IO[bytes], tensors: Mapping[str, Tensor], make: Callable[[str], Tensor] | None = None, sealed: bool = False
) -> Written:
    """Writes named tensors to an open, unbuffered file; at most CHUNK bytes are copied at a time.

    With `make(name)`, its results are written instead, each made when its turn comes; `tensors` gives their types and
    shapes. A `sealed` file has its checksum inside, for one that no manifest speaks for.
    """
    names = in_order(tensors)
    out = HashedFile(file)
    header = _header(names, tensors, {"__metadata__": {"format": "pt", OURS: _mark(BLANK)}} if sealed else {})
    out.write(header)
    for name in names:
        _write_values(out, tensors[name] if make is None else make(name))
    if sealed:
        file.seek(header.index(_mark(BLANK).encode()))
        file.write(_mark(out.written.sha256).encode())
    return out.written


def in_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors as a file has them: by the size of an element, which keeps all values aligned."""
    return sorted(tensors, key=lambda name: -tensors[name].element_size())


def _mark(digest: str) -> str:
    return f"sha256 {digest}"


def _write_values(out: HashedFile, tensor: Tensor) -> None:
    for piece in pieces(tensor.detach()):
        out.write(as_bytes(piece.cpu().contiguous()))


def _header(names: list[str], tensors: Mapping[str, Tensor], more: dict[str, Any]) -> bytes:
    places, end = more, 0
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
        self.entries, self._metadata = _read_header(path)

    def verify(self) -> bool:
        """Whether the file is sealed; DamagedSave if it is, and is not as it was written."""
        values = [value for key, value in self._metadata.items() if key == OURS or value.startswith(_mark(""))]
        if not values:
            return False
        mark, start = values[0].encode(), min((entry.start for entry in self.entries.values()), default=None)
        with self.path.open("rb") as file:
            digest = hashlib.sha256(file.read(start).replace(mark, _mark(BLANK).encode(), 1))
            for chunk in _chunks(file):
                digest.update(chunk)
        if mark != _mark(digest.hexdigest()).encode() or OURS not in self._metadata:
            raise DamagedSave(f"{self.path} is damaged: its content is not that of its checksum")
        return True

    def read(self, name: str) -> Tensor:
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        self.read_into(name, tensor)
        return tensor

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Fills a tensor of the same type and shape, whatever its strides or device; of one in shards this process's
        rows."""
        entry = self.entries[name]
        assert (entry.dtype, entry.shape) == (tensor.dtype, tuple(tensor.shape)), name
        with self.path.open("rb", buffering=0) as file, torch.no_grad():
            row = math.prod(entry.shape[1:]) * entry.dtype.itemsize
            file.seek(entry.start + first_row(tensor) * row)
            for piece in pieces(local(tensor.detach())):
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


def _read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """A file -> its tensors, which together are all of its values, and its further words."""
    require_regular(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(MOST_HEADER, size):
                raise ValueError(f"it would have {length:,} bytes")
            record = read_object(file.read(length))
        metadata = record.pop("__metadata__", {})
        if not matches(metadata, dict[str, str]):
            raise ValueError("metadata that are not words")
        entries = {name: _entry(place, 8 + length, size) for name, place in record.items()}
        _require_whole(entries, 8 + length, size)
    except OSError as error:
        raise ShoestringError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise DamagedSave(f"{path} is not a safetensors file: its header cannot be read ({error})") from error
    return entries, metadata


def _require_whole(entries: Mapping[str, Entry], start: int, size: int) -> None:
    """Refuses tensors that overlap, and bytes that belong to none."""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].bytes)):
        if entry.start != start:
            raise ValueError(
                f"tensor {name!r:.60} begins at byte {entry.start:,}, and the one before ends at {start:,}"
            )
        start += entry.bytes
    if start != size:
        raise ValueError(f"its tensors end at byte {start:,} of {size:,}")


def require_regular(path: Path) -> None:
    """Refuses what exists and is not a regular file: opening a pipe would wait for ever, a device never ends."""
    if path.exists() and not path.is_file():
        raise DamagedSave(f"{path} is not a regular file, so it is not part of a save")


def _entry(place: dict[str, Any], values: int, size: int) -> Entry:
    """A header's record of a tensor, where the values begin in the file, and the file's size -> the entry."""
    dtype, shape, (start, end) = DTYPES[place["dtype"]], tuple(place["shape"]), place["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
        raise ValueError("a size that is not a whole number")
    if len(shape) > MOST_DIMENSIONS or math.prod(filter(None, shape)) * dtype.itemsize >= 2**63:
        raise ValueError(f"a tensor of {len(shape):,} dimensions, or of 2^63 bytes and more")
    if values + end > size:
        raise ValueError(f"a tensor that ends at byte {values + end:,} of {size:,}")
    if end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{end - start} bytes for a tensor of shape {shape}")
    return Entry(dtype, shape, values + start)


def checksum(path: Path) -> Written:
    """A file -> its size and SHA-256, read CHUNK bytes at a time."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        for chunk in _chunks(file):
            digest.update(chunk)
            size += len(chunk)
    return Written(size, digest.hexdigest())


def _chunks(file: Any) -> Iterator[memoryview]:
    """The rest of an open file, at most CHUNK bytes at a time, in one buffer."""
    buffer = memoryview(bytearray(CHUNK))
    while count := file.readinto(buffer):
        yield buffer[:count]
