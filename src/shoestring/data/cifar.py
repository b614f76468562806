"""CIFAR-10 in its two official layouts, memory-mapped from the files."""

from pathlib import Path

import numpy as np

from ..errors import ShoestringError
from .files import map_file, need_file, spill
from .pickles import Bytes, read_pickle
from .splits import MappedSplit, Part

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# The training set's, as published.
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32
_RECORD = np.dtype([("label", np.uint8), ("image", np.uint8, SHAPE)])


def open_binary(folder: Path) -> tuple[MappedSplit, MappedSplit]:
    """`data_batch_1.bin` to `_5.bin` and `test_batch.bin` -> the training and the test split."""
    return _splits([_binary_part(folder / f"{name}.bin") for name in _names()], folder)


def open_python(folder: Path) -> tuple[MappedSplit, MappedSplit]:
    """`data_batch_1` to `_5` and `test_batch`, never run -> the training and the test split."""
    return _splits([_python_part(folder / name) for name in _names()], folder)


def _names() -> list[str]:
    return [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]


def _binary_part(path: Path) -> Part:
    size = need_file(path).stat().st_size
    if size % _RECORD.itemsize:
        raise ShoestringError(
            f"{path} is truncated: {size:,} bytes are not a multiple of {_RECORD.itemsize:,} (1 label and "
            f"{_PIXELS:,} pixels per image); download it again"
        )
    records = map_file(path).view(_RECORD)
    return Part(records["image"], check_labels(records["label"], len(CLASSES), path))


def _python_part(path: Path) -> Part:
    entries = read_pickle(need_file(path))
    data, labels = entries.get("data"), entries.get("labels")
    if not isinstance(data, Bytes) or data.span is None or not isinstance(labels, list):
        raise ShoestringError(f"{path} has no 'data' and 'labels': it is not a batch of CIFAR-10; unpack it again")
    count = len(labels)
    if data.shape != (count, _PIXELS) or data.span.length != count * _PIXELS:
        raise ShoestringError(
            f"{path} has {count:,} labels but images of shape {data.shape}, {data.span.length:,} bytes: "
            f"it takes ({count}, {_PIXELS}); unpack the official archive again"
        )
    if not all(isinstance(label, int) and 0 <= label < 256 for label in labels):
        raise ShoestringError(f"{path} has labels that are not numbers from 0 to 9: unpack the official archive again")
    pixels = map_file(path)[data.span.offset : data.span.offset + data.span.length]
    mapped = spill([bytes(labels)])
    return Part(pixels.reshape(count, *SHAPE), check_labels(mapped, len(CLASSES), path))


def _splits(parts: list[Part], folder: Path) -> tuple[MappedSplit, MappedSplit]:
    counts = [len(part.labels) for part in parts[:5]]
    if len(set(counts)) > 1:
        raise ShoestringError(
            f"the five training files of {folder} hold {counts} images, not the same number each: "
            "the shorter ones are truncated; download them again"
        )
    return MappedSplit(tuple(parts[:5]), SHAPE), MappedSplit(tuple(parts[5:]), SHAPE)


def check_labels(labels: np.ndarray, classes: int, path: Path) -> np.ndarray:
    """Labels -> the same labels, if each is below the number of classes."""
    if len(labels) and labels.max() >= classes:
        image = int(np.argmax(labels >= classes))
        raise ShoestringError(
            f"{path}: image {image:,} has label {labels[image]}, but labels go from 0 to {classes - 1}; "
            "the file is damaged or of another data set; download it again"
        )
    return labels
