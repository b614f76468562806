"""Codecs: how saved activations are stored, such as offloaded or quantised. Each packs a tensor; `take()` unpacks it.

A codec is opened per pass and then is a function from a tensor to what is stored of it. Adding one takes a class with
`take()`, a function that opens it, and an entry in `CODECS`; examples/new_codec.py is one.
"""

import errno
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._guards import active_fake_mode

from ...ambient import Ambient
from ...cache import spill_folder
from ...errors import ShoestringError
from ...passes.saved_tensors import AsIs, Store, Stored, samples_at_a_time
from ...units import format_bytes
from ..technique import Risk
from .compressed import pack_both, pack_int, pack_pool, takes_floats, takes_pool

LARGEST_HALF = torch.finfo(torch.float16).max


class View:
    """A view of a tensor that is stored flat; `take` restores the view's shape and strides."""

    __slots__ = ("base", "geometry")

    def __init__(self, tensor: Tensor, base: Stored) -> None:
        self.base, self.geometry = base, (tensor.shape, tensor.stride(), tensor.storage_offset())

    def take(self) -> Tensor:
        return self.base.take().as_strided(*self.geometry)


class Half:
    """A 16-bit copy: FP16, or BF16 if a value is beyond FP16's range."""

    __slots__ = ("__weakref__", "copy", "dtype", "origin")

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self.copy = tensor.to(torch.float16 if _fits_half(tensor) else torch.bfloat16)

    def take(self) -> Tensor:
        return self.copy.to(self.dtype)


def _fits_half(tensor: Tensor) -> bool:
    if active_fake_mode():
        return True  # a fake has no values; both forms have the same size
    least, most = torch.aminmax(tensor)
    return bool(least >= -LARGEST_HALF) and bool(most <= LARGEST_HALF)


class OnDisk:
    """A tensor in a file; `take` reads it into new memory."""

    __slots__ = ("__weakref__", "device", "dtype", "file", "offset", "origin", "shape")

    def __init__(self, file: "Spill", tensor: Tensor) -> None:
        self.file, self.shape, self.dtype, self.device = file, tensor.shape, tensor.dtype, tensor.device
        self.offset = file.write(tensor)

    def take(self) -> Tensor:
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.file.read(tensor, self.offset)
        return tensor.to(self.device)


class Spill:
    """An unnamed file to which tensors are appended; it vanishes however the process ends."""

    def __init__(self, folder: str) -> None:
        self.folder, self.end = folder, 0
        self.file = _telling(folder, lambda: tempfile.TemporaryFile(dir=folder, buffering=0))  # noqa: SIM115 - `offload` closes

    def write(self, tensor: Tensor) -> int:
        """Adds a tensor -> where it begins in the file."""
        offset, self.end = self.end, self.end + tensor.nbytes
        if (told := Ambient.now().offloaded_bytes) is not None:
            told.append(tensor.nbytes)
        if not active_fake_mode():
            place = offset
            for piece in _pieces(tensor):
                _telling(self.folder, partial(_write, self.file.fileno(), _bytes(piece.contiguous().cpu()), place))
                place += piece.nbytes
        return offset

    def read(self, tensor: Tensor, offset: int) -> None:
        """Fills a new tensor from the file."""
        if not active_fake_mode():
            _telling(self.folder, partial(_read, self.file.fileno(), _bytes(tensor), offset))


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """A contiguous tensor -> itself; any other -> slices of its rows, small enough to be copied one at a time."""
    if tensor.is_contiguous():
        yield tensor
    else:
        yield from tensor.split(samples_at_a_time(tensor.shape, tensor.dtype))


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def _write(file: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def _read(file: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.preadv(file, [data], offset)
        if not count:
            raise OSError(errno.EIO, "the file ends early")
        data, offset = data[count:], offset + count


def _telling(folder: str, act: Callable[[], Any]) -> Any:
    """Calls `act`, which writes or reads a file in the folder; an OSError becomes a ShoestringError with the cause."""
    try:
        return act()
    except OSError as error:
        free = format_bytes(_free_bytes(folder))
        raise ShoestringError(
            f"cannot offload activations to {folder}, which has {free} free: {error.strerror}; "
            "free some space, or set TMPDIR to a folder on another disk"
        ) from error


def _free_bytes(folder: str) -> int:
    try:
        disk = os.statvfs(folder)
    except OSError:
        return 0
    return disk.f_bavail * disk.f_frsize


# -- the registry -----------------------------------------------------------------------------------------------
@contextmanager
def whole() -> Iterator[Store]:
    yield AsIs


@contextmanager
def half() -> Iterator[Store]:
    yield Half


@contextmanager
def offload() -> Iterator[Store]:
    """Opens a file for the pass."""
    spill = Spill(spill_folder())
    with spill.file:
        yield partial(OnDisk, spill)


class Codec(NamedTuple):
    """`opened()` gives the store of a pass, or `pack(tensor, channel, draw)` compresses a tensor (compressed.py).

    `takes(tensor, channel)` tells whether the tensor is one for it; `channel` is the dimension of its channels.
    """

    name: str
    takes: Callable[[Tensor, int], bool]
    risk: Risk
    opened: Callable[[], AbstractContextManager[Store]] | None = None
    pack: Callable[..., Stored] | None = None


def _any(tensor: Tensor, channel: int) -> bool:
    return True


def _wide(tensor: Tensor, channel: int) -> bool:
    return tensor.dtype in (torch.float32, torch.float64)


CODECS = {
    codec.name: codec
    for codec in (
        Codec("whole", _any, Risk.EXACT, opened=whole),
        Codec("half", _wide, Risk.APPROXIMATE, opened=half),
        Codec("offload", _any, Risk.EXACT, opened=offload),
    )
}
COMPRESSING = re.compile(r"pool(?P<k>[1-9]\d*)(\+int(?P<rest>[842]))?|int(?P<bits>[842])")


def codec_of(word: str) -> Codec | None:
    """A codec's word -> the codec: one of CODECS, poolK, intB or poolK+intB; None if it is none of these."""
    if word in CODECS:
        return CODECS[word]
    if (found := COMPRESSING.fullmatch(word)) is None or found["k"] == "1":
        return None
    if found["bits"]:
        return Codec(word, takes_floats, Risk.APPROXIMATE, pack=pack_int(int(found["bits"])))
    k = int(found["k"])
    pack = pack_both(k, int(found["rest"])) if found["rest"] else pack_pool(k)
    return Codec(word, takes_pool(k), Risk.APPROXIMATE, pack=pack)
