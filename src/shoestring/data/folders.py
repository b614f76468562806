"""Image folders in ImageNet's layout, train/CLASS/*.jpg and val/CLASS/*.jpg, decoded by Pillow when read."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import ShoestringError, how_to_install
from .draws import mix
from .files import Rows, need_file

# ImageNet's training set's, as published.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
_FORMATS = ("JPEG", "PNG", "BMP", "WEBP")  # whatever the name says: Pillow runs programs for some other formats
_MOST_PIXELS = 2**26  # in one file
_MOST_DECODED = 2**24  # pixels that are decoded of it: 50 MB; of a JPEG, no more than the crop needs
_TEST_NAMES = ("val", "validation", "test")


@dataclass(frozen=True)
class FolderSplit:
    """Images of `size` x `size` from one folder per class. Their names are in a mapped file, not in memory.

    Besides the batch, a read takes the memory of one decoded image per thread of torch.
    """

    folder: Path
    classes: tuple[str, ...]
    size: int
    class_ends: np.ndarray  # the number of images up to the end of each class
    names: Rows

    def __len__(self) -> int:
        return len(self.names)

    def path(self, index: int) -> Path:
        return self.folder / self.classes[self.label(index)] / self.names.text(index)

    def label(self, index: int) -> int:
        return int(np.searchsorted(self.class_ends, index, side="right"))

    def read(self, indices: np.ndarray, keys: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        """Indices -> images and labels: a random crop of each image with `keys`, its centre without."""
        images = torch.empty((len(indices), 3, self.size, self.size), dtype=torch.uint8)

        def decode(place: int) -> None:
            key = None if keys is None else int(keys[place])
            images[place] = torch.from_numpy(_decode(self.path(indices[place]), self.size, key))

        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(decode, range(len(indices))))
        return images, torch.tensor([self.label(index) for index in indices], dtype=torch.int64)


def open_folders(folder: Path, size: int = 224) -> tuple[FolderSplit, FolderSplit]:
    """A folder with train/CLASS and val/CLASS (or test/CLASS) -> the training and the test split."""
    classes = tuple(sorted(entry.name for entry in (folder / "train").iterdir() if entry.is_dir()))
    test = next((folder / name for name in _TEST_NAMES if (folder / name).is_dir()), None)
    if test is None:
        raise ShoestringError(f"{folder} has train/ but no val/ or test/: add a folder of images to test on")
    unknown = sorted({entry.name for entry in test.iterdir() if entry.is_dir()} - set(classes))
    if unknown:
        raise ShoestringError(
            f"{test} has {len(unknown)} class(es) that train/ does not have, such as {unknown[0]!r}: "
            "an image folder needs the same classes in both; rename or remove it"
        )
    return _split(folder / "train", classes, size), _split(test, classes, size)


def _split(folder: Path, classes: tuple[str, ...], size: int) -> FolderSplit:
    counts: list[int] = []

    def names() -> Iterator[str]:
        for name in classes:
            files = _images(folder / name)
            counts.append(len(files))
            yield from files

    rows = Rows.of_texts(names())
    return FolderSplit(folder, classes, size, np.cumsum(counts), rows)


def _images(folder: Path) -> list[str]:
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name) if folder.is_dir() else []
    files = [entry.name for entry in entries]
    images = [entry.name for entry in entries if entry.name.lower().endswith(_ENDINGS)]
    for entry in entries:
        if entry.name.lower().endswith(_ENDINGS) and not entry.is_file():
            raise ShoestringError(f"{entry.path} is not a regular file: replace or remove it")
    if not images:
        raise ShoestringError(
            f"{folder} holds no image ({len(files)} files, none ending in {', '.join(_ENDINGS)}): "
            "fill it, or remove the class"
        )
    return images


def _decode(path: Path, size: int, key: int | None) -> np.ndarray:
    """An image file -> a crop of it, resized to uint8 (3, size, size)."""
    try:
        from PIL import Image
    except ImportError:
        raise ShoestringError(
            f"image folders need Pillow, which is not installed: {how_to_install('images')}"
        ) from None
    try:
        with Image.open(need_file(path), formats=_FORMATS) as image:
            width, height = image.size
            if width * height > _MOST_PIXELS:
                raise ValueError(f"{width} x {height} pixels, and {_MOST_PIXELS:,} is the limit")
            left, top, right, bottom = _middle(width, height) if key is None else _random_part(width, height, key)
            # A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size: no more pixels than the crop needs.
            zoom = max(size / (right - left), size / (bottom - top))
            image.draft("RGB", (int(width * zoom), int(height * zoom)))
            if image.size[0] * image.size[1] > _MOST_DECODED:
                raise ValueError(f"{width} x {height} pixels decoded at once, and {_MOST_DECODED:,} is the limit")
            across, down = image.size[0] / width, image.size[1] / height
            box = (left * across, top * down, right * across, bottom * down)
            small = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR, box=box)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ShoestringError(f"{path} cannot be decoded ({error}): replace or remove it") from error
    return np.array(small).transpose(2, 0, 1)


def _middle(width: int, height: int) -> tuple[float, float, float, float]:
    """The central square whose side is 7/8 of the shorter side: left, top, right, bottom."""
    side = min(width, height) * 7 / 8
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _random_part(width: int, height: int, key: int) -> tuple[float, float, float, float]:
    """A random crop of 8% to 100% of the area, with a shape of 3:4 to 4:3: left, top, right, bottom."""
    area, shape, across, down = (float(mix(key, use)[0]) / 2**64 for use in range(4))
    area = (0.08 + 0.92 * area) * width * height
    ratio = (3 / 4) ** (1 - 2 * shape)
    part_width, part_height = min(width, (area * ratio) ** 0.5), min(height, (area / ratio) ** 0.5)
    left, top = across * (width - part_width), down * (height - part_height)
    return left, top, left + part_width, top + part_height
