"""`open_images(folder)`: an image data set in any of the usual layouts, streamed from its files."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import ShoestringError
from . import cifar, folders, idx
from .augment import Augment
from .draws import mix, shuffled
from .splits import MappedSplit, Part, Split, mean_and_std

EMBEDDED = Path(__file__).parent / "embedded" / "fashion-mnist"
# Where the usual download scripts put the files inside the folder that the user gives.
_INSIDE = ("cifar-10-batches-bin", "cifar-10-batches-py", "FashionMNIST/raw", "MNIST/raw", "raw")


@dataclass(frozen=True)
class Images:
    """Two splits, the names of the classes, the normalisation and the shape (channels, height, width)."""

    train: Split
    test: Split
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    shape: tuple[int, int, int]


@dataclass(frozen=True)
class ImageBatches:
    """The batches of an epoch: `read(epoch, number)` -> uint8 images, labels, draws.

    With a `seed`, for training: a new order and new augmentations each epoch, full batches only. Without one, for
    testing: in the order of the files, no augmentation, and the last batch may be smaller. A batch depends only on
    (seed, epoch, number), so that a run can be resumed in the middle of an epoch.
    """

    split: Split
    size: int
    augment: Augment
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.size < 1 or len(self) < 1:
            raise ShoestringError(
                f"batches of {self.size} cannot be made from {len(self.split)} images: use another size"
            )

    def fingerprint(self) -> str:
        """What the images are, all of them: a resumed run compares it."""
        return self.split.fingerprint()

    def __len__(self) -> int:
        whole, rest = divmod(len(self.split), self.size)
        return whole + (self.seed is None and rest > 0)

    def read(self, epoch: int, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Batch `number` of an epoch, both counted from 0."""
        if not 0 <= number < len(self):
            raise ShoestringError(f"batch {number} of an epoch of {len(self)} batches: count from 0")
        indices = np.arange(number * self.size, min(len(self.split), (number + 1) * self.size))
        if self.seed is None:
            return *self.split.read(indices), torch.zeros((len(indices), 3), dtype=torch.int8)
        indices = shuffled(indices, len(self.split), self.seed, epoch)
        keys = mix(self.seed, epoch, indices)
        return *self.split.read(indices, keys), self.augment.draw(keys)


def open_images(
    folder: str | Path | None = None, *, channels: int | None = None, size: int | None = None, resized: int = 224
) -> Images:
    """A folder -> its images: CIFAR-10 (binary or python), MNIST's IDX, or train/CLASS/*.jpg; None: embedded.

    `channels=3` repeats a grey channel. `size` is the side of the images: smaller ones get a black border (IDX: 32 by
    default), those of image folders are resized (by default to `resized`).
    """
    if folder is None:
        return _idx(EMBEDDED, channels, size)
    where = Path(folder)
    if not where.is_dir():
        reason = "is a file: unpack it" if where.exists() else "does not exist: check the path"
        raise ShoestringError(f"the data folder {where} {reason}")
    for place in (where, *(where / name for name in _INSIDE)):
        if (images := _open(place, channels, size, resized)) is not None:
            return images
    raise ShoestringError(
        f"{where} has no known image layout: it needs data_batch_1.bin or data_batch_1 (CIFAR-10), "
        "train-images-idx3-ubyte[.gz] (MNIST), or train/CLASS/*.jpg and val/CLASS/*.jpg"
    )


def _open(folder: Path, channels: int | None, size: int | None, resized: int) -> Images | None:
    if any(folder.glob("data_batch_?.bin")):
        return _cifar(cifar.open_binary(folder), channels, size)
    if any(folder.glob("data_batch_?")):
        return _cifar(cifar.open_python(folder), channels, size)
    if idx.has_idx(folder):
        return _idx(folder, channels, size)
    if (folder / "train").is_dir():
        shape = _shape((3, 1, 1), channels, size or resized)
        train, test = folders.open_folders(folder, shape[1])
        return Images(train, test, train.classes, folders.MEAN, folders.STD, shape)
    return None


def _cifar(splits: tuple[MappedSplit, MappedSplit], channels: int | None, size: int | None) -> Images:
    shape = _shape(cifar.SHAPE, channels, size)
    train, test = (MappedSplit(split.parts, shape) for split in splits)
    return Images(train, test, cifar.CLASSES, cifar.MEAN, cifar.STD, shape)


def _idx(folder: Path, channels: int | None, size: int | None) -> Images:
    parts: tuple[Part, Part] = idx.open_idx(folder)
    natural = parts[0].images.shape[1:]
    shape = _shape(natural, channels, size or max(32, *natural))
    train, test = (MappedSplit((part,), shape) for part in parts)
    return Images(train, test, idx.class_names(folder), *mean_and_std(train), shape)


def _shape(natural: tuple[int, ...], channels: int | None, size: int | None) -> tuple[int, int, int]:
    """The images' own shape and the requested one -> the shape that is returned."""
    own, height, width = natural
    if channels not in (None, own, 3 if own == 1 else own):
        raise ShoestringError(f"images of {own} channel(s) cannot have {channels}: leave `channels` out")
    if size is not None and size < max(height, width):
        raise ShoestringError(
            f"images of {height}x{width} do not fit into {size}x{size}: give at least {max(height, width)}"
        )
    return channels or own, size or height, size or width
