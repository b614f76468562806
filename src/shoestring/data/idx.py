"""IDX files, gzipped or not, the format of MNIST and Fashion-MNIST, memory-mapped."""

import gzip
import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..errors import ShoestringError
from .cifar import check_labels
from .files import map_file, need_file, spill
from .splits import Part

FASHION = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
DIGITS = tuple("0123456789")
MOST_UNZIPPED = 2**30  # bytes; the largest data sets of this kind have 640 MB


def has_idx(folder: Path) -> bool:
    return any((folder / f"train-images-idx3-ubyte{end}").is_file() for end in ("", ".gz"))


def open_idx(folder: Path) -> tuple[Part, Part]:
    """`train-` and `t10k-` files in `folder` -> the training and the test part, one channel each."""
    train, test = _part(folder, "train"), _part(folder, "t10k")
    if train.images.shape[1:] != test.images.shape[1:]:
        raise ShoestringError(
            f"{folder} has training images of {train.images.shape[2:]} pixels and test images of "
            f"{test.images.shape[2:]}: they are not of the same set; download both again"
        )
    return train, test


def class_names(folder: Path) -> tuple[str, ...]:
    """Fashion-MNIST's classes if the folder's path says fashion, else the ten digits."""
    return FASHION if "fashion" in str(folder.resolve()).lower() else DIGITS


def _part(folder: Path, split: str) -> Part:
    images_path = _find(folder, f"{split}-images-idx3-ubyte")
    labels_path = _find(folder, f"{split}-labels-idx1-ubyte")
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if len(images) != len(labels):
        raise ShoestringError(
            f"{images_path} holds {len(images):,} images and {labels_path} {len(labels):,} labels: "
            "they are not of the same set; download both again"
        )
    return Part(images[:, None], check_labels(labels, 10, labels_path))


def _find(folder: Path, name: str) -> Path:
    raw = folder / name
    return raw if raw.is_file() else need_file(folder / f"{name}.gz")


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """An IDX file of unsigned bytes -> its array, mapped.

    The header is 0, 0, 8 (unsigned bytes), the number of dimensions, and each dimension in four bytes.
    """
    data = spill(_unzip(path, dimensions)) if path.suffix == ".gz" else map_file(path)
    start = 4 + 4 * dimensions
    shape = _shape(path, bytes(data[:start]), dimensions)
    expected = start + math.prod(shape)
    if len(data) != expected:
        raise ShoestringError(_unlike_header(path, f"{len(data):,}", expected, shape))
    return data[start:].reshape(shape)


def _shape(path: Path, header: bytes, dimensions: int) -> list[int]:
    """A file's first bytes -> the shape that they declare."""
    magic, expected = header[:4], bytes((0, 0, 8, dimensions))
    if magic != expected:
        raise ShoestringError(
            f"{path} begins with {magic.hex() or 'nothing'}, and an IDX file of {dimensions} dimension(s) "
            f"with {expected.hex()}: it is another kind of file; download it again"
        )
    if len(header) < 4 + 4 * dimensions:
        raise ShoestringError(f"{path} ends within its header, after {len(header)} bytes: download it again")
    shape = list(struct.unpack(f">{dimensions}I", header[4:]))
    if not all(shape):
        raise ShoestringError(f"{path} declares the empty shape {shape}: it is damaged; download it again")
    return shape


def _unlike_header(path: Path, found: str, expected: int, shape: list[int]) -> str:
    return (
        f"{path} has {found} bytes, and its header declares {expected:,} for {shape}: "
        "it is truncated or damaged; download it again"
    )


def _unzip(path: Path, dimensions: int) -> Iterator[bytes]:
    """Unzips the bytes that a file's own header declares; anything beyond is never unzipped."""
    try:
        with gzip.open(need_file(path)) as file:
            header = file.read(4 + 4 * dimensions)
            shape = _shape(path, header, dimensions)
            left = math.prod(shape)
            if left > MOST_UNZIPPED:
                raise ShoestringError(
                    f"{path} declares {left:,} bytes for {shape}, and at most {MOST_UNZIPPED:,} are unzipped here: "
                    "it is damaged, or unzip it yourself"
                )
            yield header
            while left and (chunk := file.read(min(left, 1 << 16))):
                left -= len(chunk)
                yield chunk
            if not left and file.read(1):
                expected = len(header) + math.prod(shape)
                raise ShoestringError(_unlike_header(path, f"more than {expected:,}", expected, shape))
    except (EOFError, OSError, zlib.error) as error:
        raise ShoestringError(
            f"{path} cannot be unzipped, it is truncated or damaged ({error}): download it again"
        ) from error
