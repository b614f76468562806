"""Tiny data sets in each layout, written byte by byte."""

import gzip
import struct
from pathlib import Path

import numpy as np

CIFAR_NAMES = [f"data_batch_{n}" for n in range(1, 6)] + ["test_batch"]


def pictures(count: int, seed: int, shape=(3, 32, 32)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def labels(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed + 1000).integers(0, 10, count, dtype=np.uint8)


def write_cifar_binary(folder: Path, count: int = 4) -> Path:
    folder.mkdir(exist_ok=True)
    for seed, name in enumerate(CIFAR_NAMES):
        rows = np.column_stack([labels(count, seed), pictures(count, seed).reshape(count, -1)])
        (folder / f"{name}.bin").write_bytes(rows.tobytes())
    return folder


def short_string(text: str) -> bytes:
    return b"U" + bytes([len(text)]) + text.encode()


class Numbered:
    """Writes `put` instructions with rising numbers, as cPickle does (it counts from 1)."""

    def __init__(self) -> None:
        self.last = 0

    def __call__(self) -> bytes:
        self.last += 1
        return b"q" + bytes([self.last]) if self.last < 256 else b"r" + struct.pack("<I", self.last)


def cifar_pickle(images: np.ndarray, numbers: np.ndarray) -> bytes:
    """The instructions of one of CIFAR-10's python files, in the order in which Python 2 wrote them."""
    put = Numbered()
    parts = [b"\x80\x02}", put(), b"(", short_string("batch_label"), put(), short_string("batch"), put()]
    parts += [short_string("labels"), put(), b"]", put()]
    for start in range(0, len(numbers), 1000):
        parts += [b"(", *(b"K" + bytes([n]) for n in numbers[start : start + 1000]), b"e"]
    parts += [short_string("data"), put(), b"cnumpy.core.multiarray\n_reconstruct\n", put()]
    parts += [b"cnumpy\nndarray\n", put(), b"K\x00\x85", short_string("b"), b"\x87R", put()]
    parts += [b"(K\x01", b"M", struct.pack("<H", len(images)), b"M", struct.pack("<H", 3072), b"\x86"]
    parts += [b"cnumpy\ndtype\n", put(), short_string("u1"), b"K\x00K\x01\x87R", put()]
    parts += [b"(K\x03", short_string("|"), b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"]
    parts += [b"T", struct.pack("<I", images.size), images.tobytes(), b"tb"]
    parts += [short_string("filenames"), put(), b"]", put(), b"("]
    parts += [part for n in range(len(numbers)) for part in (short_string(f"picture_{n}.png"), put())]
    return b"".join([*parts, b"eu."])


def write_cifar_python(folder: Path, count: int = 4) -> Path:
    folder.mkdir(exist_ok=True)
    for seed, name in enumerate(CIFAR_NAMES):
        (folder / name).write_bytes(cifar_pickle(pictures(count, seed), labels(count, seed)))
    return folder


def idx_bytes(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_idx(folder: Path, count: int = 6, zipped: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    for seed, split in enumerate(("train", "t10k")):
        arrays = {"images-idx3": pictures(count, seed, (28, 28)), "labels-idx1": labels(count, seed)}
        for kind, array in arrays.items():
            path = folder / f"{split}-{kind}-ubyte{'.gz' if zipped else ''}"
            path.write_bytes(gzip.compress(idx_bytes(array)) if zipped else idx_bytes(array))
    return folder


def write_image_folder(folder: Path, count: int = 3) -> Path:
    from PIL import Image

    for split in ("train", "val"):
        for label, name in enumerate(("cat", "dog")):
            (folder / split / name).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                colour = (250 * label, 20 * number, 100)  # the class is the red channel
                Image.new("RGB", (40 + 8 * number, 32), colour).save(folder / split / name / f"{number}.png")
    return folder
