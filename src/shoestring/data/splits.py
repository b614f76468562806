"""A split of an image data set: `len(split)` images, and `read(indices)` for some of them as uint8.

`Split` is the protocol; `MappedSplit` reads images that are stored in files as plain bytes.
"""

import hashlib
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .draws import shuffled

# Before a fingerprint of all the content: earlier versions looked at a sample, which cannot be compared with it.
WHOLE = "whole-"


class Split(Protocol):
    """The source of batches. `keys`, one 64-bit number per image, determine any randomness of decoding."""

    def __len__(self) -> int: ...

    def read(self, indices: np.ndarray, keys: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        """Indices -> uint8 images (n, channels, height, width) and int64 labels (n)."""
        ...

    def fingerprint(self) -> str:
        """A digest of the whole content, however it is stored."""
        ...


@dataclass(frozen=True)
class Part:
    """One file's images (n, channels, height, width) and labels (n), both mapped bytes."""

    images: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class MappedSplit:
    """Parts one after another; each image is centred in a black image of `shape` (channels, height, width)."""

    parts: tuple[Part, ...]
    shape: tuple[int, int, int]

    def __len__(self) -> int:
        return sum(len(part.labels) for part in self.parts)

    def read(self, indices: np.ndarray, keys: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        images = torch.zeros((len(indices), *self.shape), dtype=torch.uint8)
        labels = torch.empty(len(indices), dtype=torch.int64)
        middle, numbers = self._middle(images.numpy()), labels.numpy()
        ends = np.cumsum([len(part.labels) for part in self.parts])
        # One image at a time: indexing with the whole array would make a second copy of the batch.
        for place, index in enumerate(indices):
            which = np.searchsorted(ends, index, side="right")
            part = self.parts[which]
            row = index - ends[which] + len(part.labels)
            middle[place], numbers[place] = part.images[row], part.labels[row]
        return images, labels

    def fingerprint(self) -> str:
        """A digest of every pixel and label, a few images at a time."""
        digest = hashlib.sha256(f"{len(self)} {self.shape}".encode())
        for part in self.parts:
            for start in range(0, len(part.labels), 256):
                for stored in (part.images, part.labels):
                    digest.update(np.ascontiguousarray(stored[start : start + 256]).data)
        return WHOLE + digest.hexdigest()[:16]

    def _middle(self, images: np.ndarray) -> np.ndarray:
        height, width = self.parts[0].images.shape[2:]
        top, left = (self.shape[1] - height) // 2, (self.shape[2] - width) // 2
        return images[:, :, top : top + height, left : left + width]


@dataclass(frozen=True)
class Picked:
    """Some images of a split: those at `places`."""

    split: Split
    places: np.ndarray

    def __len__(self) -> int:
        return len(self.places)

    def read(self, indices: np.ndarray, keys: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        return self.split.read(self.places[indices], keys)

    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.split.fingerprint().encode() + self.places.tobytes())
        return WHOLE + digest.hexdigest()[:16]


def held_out(split: Split, count: int, seed: int = 0) -> tuple[Picked, Picked]:
    """A split -> two: all but `count` randomly chosen images, and those `count`."""
    order = shuffled(np.arange(len(split)), len(split), seed)
    return Picked(split, np.sort(order[count:])), Picked(split, np.sort(order[:count]))


def mean_and_std(split: MappedSplit) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """A split -> mean and standard deviation per channel of its images as they are read, 1 = white."""
    channels, height, width = split.shape
    counts = np.zeros((split.parts[0].images.shape[1], 256), np.int64)
    for part in split.parts:
        for start in range(0, len(part.images), 256):
            for channel, count in enumerate(counts):
                count += np.bincount(part.images[start : start + 256, channel].ravel(), minlength=256)
    values = np.arange(256) / 255
    total = len(split) * height * width
    counts[:, 0] += total - counts.sum(-1)  # the black border
    mean = counts @ values / total
    variance = counts @ values**2 / total - mean**2
    std = np.sqrt(np.where(counts.max(-1) < total, variance, 1))  # a channel of one value alone stays finite
    return tuple(np.broadcast_to(mean, channels).tolist()), tuple(np.broadcast_to(std, channels).tolist())
