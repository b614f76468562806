"""Data files with changed bytes: each reader reads them, or refuses them in one line."""

import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from damaged_files import mutated, require_one_line
from layouts import write_cifar_binary, write_cifar_python, write_idx, write_image_folder

from shoestring import ShoestringError
from shoestring.data import open_images, open_pairs


def write_pairs(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for split in ("train", "valid", "test"):
        for side in ("de", "en"):
            lines = [f"{side} word{n} word{n % 3} ." for n in range(8)]
            (folder / f"{split}.{side}").write_text("\n".join(lines) + "\n")
    return folder


def read_images(folder: Path) -> Any:
    images = open_images(folder, channels=3)
    return [split.read(np.arange(len(split))) for split in (images.train, images.test)]


def read_pairs(folder: Path) -> Any:
    return len(open_pairs(folder, vocabulary=30).train.source)


READERS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
    "CIFAR binary": (write_cifar_binary, read_images),
    "CIFAR pickles": (write_cifar_python, read_images),
    "IDX": (write_idx, read_images),
    "image folders": (write_image_folder, read_images),
    "sentence pairs": (write_pairs, read_pairs),
}


def check(name: str, count: int, seed: int, folder: Path) -> tuple[Counter, list[str]]:
    """So many damaged data sets of a kind -> how many were read and refused, and those that did something else."""
    write, read = READERS[name]
    draw, found, bad, place = random.Random(f"{name} {seed}"), Counter(), [], folder / "data"
    write(place)
    files = {path: path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}
    for _ in range(count):
        path = draw.choice(sorted(files))
        path.write_bytes(mutated(files[path], draw))
        try:
            read(place)
            found["read"] += 1
        except ShoestringError as error:
            require_one_line(error)
            found["refused"] += 1
        except Exception as error:
            bad.append(f"{path.name}: {type(error).__name__}: {error}")
        path.write_bytes(files[path])
    shutil.rmtree(place)
    return found, bad
