"""Starting from weights that users have: a safetensors file, a state dict of PyTorch's, a Hugging Face folder.

Names and shapes are compared with the model's before a value is read. Then tensors are read one at a time, into the
form that the model has: another precision, or sparse layers, which take the largest weights.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ShoestringError
from ..records import file_bytes, read_object
from ..techniques.precision import check_range
from ..techniques.sparsity.layer import SparseLayer
from .tensorfile import TensorFile

INDEX, WHOLE, PICKLED = "model.safetensors.index.json", "model.safetensors", "pytorch_model.bin"
INSIDE = ("state_dict", "model_state_dict", "model")  # where checkpoints of trainers keep the weights
SHOWN = 4  # names of a kind in a message
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Source:
    """Weights in a file or folder: their shapes by name, and a function that reads one."""

    path: Path
    shapes: Shapes
    read: Callable[[str], Tensor]


@dataclass(frozen=True)
class Target:
    """Where a model keeps the weight of a plain name: a tensor, or a sparse layer that keeps only some of it."""

    shape: tuple[int, ...]
    tensor: Tensor
    layer: SparseLayer | None = None

    @torch.no_grad()
    def take(self, name: str, values: Tensor) -> None:
        if values.is_floating_point() != self.tensor.is_floating_point():
            raise ShoestringError(f"{name} is {values.dtype} in the file, and {self.tensor.dtype} in the model")
        if values.is_floating_point():
            check_range(name, values, self.tensor.dtype)
        if self.layer is not None:
            self.layer.take_largest(values)
        else:
            self.tensor.copy_(values)


@dataclass(frozen=True)
class Fit:
    """What a file's names and shapes have in common with a model's, and what not."""

    common: list[str]
    missing: list[str]
    unexpected: list[str]
    other_shapes: list[str]

    @property
    def is_whole(self) -> bool:
        return not (self.missing or self.unexpected or self.other_shapes)

    def __str__(self) -> str:
        told = {
            "missing": [_near(name, self.unexpected) for name in self.missing],
            "unexpected": self.unexpected,
            "of other shapes": self.other_shapes,
        }
        return "; ".join(f"{len(names):,} {kind} ({_some(names)})" for kind, names in told.items() if names)


def start_from(model: nn.Module, path: str | Path, partial: bool = False) -> Fit:
    """Reads the weights of a file or folder into a model: all of them, or with `partial` those that fit -> the fit."""
    source = open_weights(Path(path))
    targets = dict(_targets(model))
    fit = compare(source.shapes, targets)
    if not fit.common or not (fit.is_whole or partial):
        then = "use the model that it is of" + (", or --partial to take what fits" if fit.common else "")
        raise ShoestringError(f"{path} does not fit the model: {fit}; {then}")
    for name in fit.common:
        targets[name].take(name, source.read(name))
    return fit


# -- the model ----------------------------------------------------------------------------------------------------
def _targets(model: nn.Module) -> Iterator[tuple[str, Target]]:
    """The entries that the plain model's state_dict() would have, and where their values go."""
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        sparse = module if isinstance(module, SparseLayer) else None
        for name, tensor in module._parameters.items():
            if tensor is not None and sparse is not None and name in sparse.dense_parameters:
                plain, shape = sparse.dense_parameters[name]
                yield prefix + plain, Target(tuple(shape), tensor, sparse)
            elif tensor is not None:
                yield prefix + name, Target(tuple(tensor.shape), tensor)
        for name, tensor in module._buffers.items():
            if tensor is not None and name not in module._non_persistent_buffers_set and sparse is None:
                yield prefix + name, Target(tuple(tensor.shape), tensor)


def compare(found: Mapping[str, tuple[int, ...]], targets: Mapping[str, Target]) -> Fit:
    """Names and shapes of a file beside a model's. Of names that share a tensor, a file may have one only."""
    common = [name for name in targets if name in found and found[name] == targets[name].shape]
    had = {id(targets[name].tensor) for name in common}
    return Fit(
        common,
        [name for name in targets if name not in found and id(targets[name].tensor) not in had],
        [name for name in found if name not in targets],
        [
            f"{name}: {targets[name].shape} in the model, {found[name]} in the file"
            for name in targets
            if name in found and found[name] != targets[name].shape
        ],
    )


def _near(name: str, others: list[str]) -> str:
    """A name, and the one of the others that may be meant: with another prefix, or nearly alike."""
    ends = [other for other in others if other.endswith(f".{name}") or name.endswith(f".{other}")]
    close = ends or difflib.get_close_matches(name, others, n=1, cutoff=0.75)
    return f"{name}, did you mean {close[0]}?" if close else name


def _some(names: list[str]) -> str:
    more = f", and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


# -- the file -----------------------------------------------------------------------------------------------------
def open_weights(path: Path) -> Source:
    """A file or folder of weights -> what is in it; no value is read yet, and no code is run."""
    if path.is_dir():
        return _folder(path)
    if not path.is_file():
        what = "is not a regular file" if path.exists() else "does not exist"
        raise ShoestringError(f"{path} {what}: name a file of weights, or a folder of save_pretrained()")
    return _safetensors(path) if path.suffix == ".safetensors" else _pickled(path)


def _folder(path: Path) -> Source:
    if (path / INDEX).is_file():
        return _shards(path)
    for name, opened in ((WHOLE, _safetensors), (PICKLED, _pickled)):
        if (path / name).is_file():
            return opened(path / name)
    raise ShoestringError(
        f"{path} holds no weights ({WHOLE}, {INDEX} or {PICKLED}): name a file, or a folder of save_pretrained()"
    )


def _safetensors(path: Path) -> Source:
    file = TensorFile(path)
    file.verify()
    return Source(path, {name: entry.shape for name, entry in file.entries.items()}, file.read)


def _shards(folder: Path) -> Source:
    """A model in several files: the index says which tensor is in which; only files of this folder are opened."""
    try:
        homes = read_object(file_bytes(folder / INDEX))["weight_map"]
        if not all(isinstance(home, str) and Path(home).name == home for home in homes.values()):
            raise ValueError("a file outside of the folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ShoestringError(f"{folder / INDEX} cannot be read: {error}") from error
    files = {home: TensorFile(folder / home) for home in sorted(set(homes.values()))}
    shapes = {name: files[home].entries[name].shape for name, home in homes.items() if name in files[home].entries}
    return Source(folder, shapes, lambda name: files[homes[name]].read(name))


def _pickled(path: Path) -> Source:
    """A state dict of torch.save, or a checkpoint that has one inside; values stay on disk until they are read."""
    if not path.stat().st_size:
        raise ShoestringError(f"{path} is empty (0 bytes): save the weights again")
    try:
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # of many kinds, for a file that may be anything
        reason = (str(error).splitlines() or [""])[0]
        raise ShoestringError(
            f"{path} cannot be read as weights alone ({reason}): save a state_dict() with torch.save, or as safetensors"
        ) from error
    for name in INSIDE:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(name), Mapping):
            loaded = loaded[name]
            break
    tensors = {name: value for name, value in _items(loaded) if isinstance(name, str) and isinstance(value, Tensor)}
    if not tensors:
        raise ShoestringError(f"{path} holds no weights by name: save a state_dict()")
    return Source(path, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, tensors.__getitem__)


def _items(loaded: Any) -> Iterator[tuple[Any, Any]]:
    yield from loaded.items() if isinstance(loaded, Mapping) else ()
