"""Image folders in ImageNet's layout, train/CLASS/*.jpg and val/CLASS/*.jpg, decoded by Pillow when read."""

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Condition

import numpy as np
import torch
from torch import Tensor

from ..ambient import Ambient
from ..errors import ShoestringError, how_to_install
from ..units import format_bytes
from .draws import mix
from .files import Rows, need_file
from .splits import WHOLE

# ImageNet's training set's, as published.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
_FORMATS = ("JPEG", "PNG", "BMP", "WEBP")  # whatever the name says: Pillow runs programs for some other formats
_MOST_PIXELS = 2**26  # in one file
_RGB = 4  # bytes in which Pillow holds a pixel
_MOST_DECODED = 2**24  # pixels that are decoded of it: 67 MB; of a JPEG, no more than the crop needs
_MOST_WHOLE = 2**30  # bytes of a split that are read to tell it from others; of a larger one, the ends of its files
_END = 2**12
_TEST_NAMES = ("val", "validation", "test")


@dataclass(frozen=True)
class FolderSplit:
    """Images of `size` x `size` from one folder per class. Their names are in a mapped file, not in memory.

    Besides the batch, a read takes the memory of one decoded image per thread of torch; within a budget, of as many at
    once as it leaves room for.
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

    def fingerprint(self) -> str:
        """A digest of every file: of its name, size and bytes; of large sets, of both ends of each file only."""
        paths = [self.path(index) for index in range(len(self))]
        sizes = [path.stat().st_size for path in paths]
        most = 2 * _END if sum(sizes) > _MOST_WHOLE else None
        digest = hashlib.sha256()
        for path, size in zip(paths, sizes, strict=True):
            digest.update(f"{path.parent.name}/{path.name} {size} ".encode("utf-8", "surrogateescape"))
            for chunk in _chunks(path, size, most):
                digest.update(chunk)
        return WHOLE + digest.hexdigest()[:16]

    def read(self, indices: np.ndarray, keys: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        """Indices -> images and labels: a random crop of each image with `keys`, its centre without."""
        images = torch.empty((len(indices), 3, self.size, self.size), dtype=torch.uint8)
        left = Ambient.now().room
        room = Room(None if left is None else left() - images.nbytes)

        def decode(place: int) -> None:
            key = None if keys is None else int(keys[place])
            images[place] = torch.from_numpy(_decode(self.path(indices[place]), self.size, key, room))

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


def _chunks(path: Path, size: int, most: int | None) -> Iterator[bytes]:
    """The bytes of a file, or, of one with over `most`, those of both its ends."""
    with path.open("rb") as file:
        if most is None or size <= most:
            while chunk := file.read(1 << 16):
                yield chunk
        else:
            yield file.read(most // 2)
            file.seek(-(most // 2), os.SEEK_END)
            yield file.read(most // 2)


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


class Room:
    """The bytes that threads may take together; None: any number."""

    def __init__(self, most_bytes: int | None) -> None:
        self.most_bytes, self.taken_bytes, self.freed = most_bytes, 0, Condition()

    @contextmanager
    def taken(self, size: int) -> Iterator[None]:
        """Waits until others have left enough; ValueError says that there will never be."""
        if self.most_bytes is not None and size > self.most_bytes:
            left = format_bytes(max(0, self.most_bytes))
            raise ValueError(f"it takes {format_bytes(size)} decoded, and the budget leaves {left}")
        with self.freed:
            self.freed.wait_for(lambda: self.most_bytes is None or self.taken_bytes + size <= self.most_bytes)
            self.taken_bytes += size
        try:
            yield
        finally:
            with self.freed:
                self.taken_bytes -= size
                self.freed.notify_all()


def _decode(path: Path, size: int, key: int | None, room: Room) -> np.ndarray:
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
            with room.taken(image.size[0] * image.size[1] * (_RGB if image.mode == "RGB" else 2 * _RGB)):
                whole = image if image.mode == "RGB" else image.convert("RGB")  # which copies, whatever it is
                small = whole.resize((size, size), Image.Resampling.BILINEAR, box=box)
                del whole
                image.close()
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
