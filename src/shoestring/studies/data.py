"""Finds the data of studies: folders by their usual names below one that the user gives, and their fingerprints."""

import hashlib
import os
from functools import lru_cache
from pathlib import Path

from ..errors import ShoestringError

VARIABLE = "SHOESTRING_DATA"
FOLDERS = {
    "cifar-10": ("cifar-10-batches-bin", "cifar-10-batches-py"),
    "multi30k": ("multi30k.de-en",),
    "iwslt14": ("iwslt14.de-en", "iwslt14.tokenized.de-en"),
}


def find_data(name: str, root: str | None = None) -> Path:
    """The name of a data set -> its folder, below `root` or what SHOESTRING_DATA names."""
    if name not in FOLDERS:
        raise ShoestringError(f"there is no data set {name!r} for studies: use {', '.join(FOLDERS)}")
    place = root or os.environ.get(VARIABLE)
    if not place:
        raise ShoestringError(
            f"a study that trains on {name} needs its data: name the folder that holds {FOLDERS[name][0]} with --data"
        )
    for folder in (Path(place), *(Path(place) / known for known in FOLDERS[name])):
        if folder.name in FOLDERS[name] and folder.is_dir():
            return folder
    raise ShoestringError(f"{place} holds no {' or '.join(FOLDERS[name])}: name its parent with --data")


@lru_cache(maxsize=8)
def fingerprint(folder: Path) -> str:
    """A folder of data -> 16 hexadecimal digits of its files' names and bytes."""
    total = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.name.startswith("."):
            total.update(f"{path.name} {path.stat().st_size}\n".encode())
            with path.open("rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()[:16]
