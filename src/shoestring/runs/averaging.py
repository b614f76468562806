"""Averages the weights of several saves, one tensor at a time, into a file of their own.

Sparse layers are rewired between saves, and the mean of weights at different positions is dense (the paper's footnote
6): the file holds the dense model's weights, zeros included, whatever was sparse in training.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import ShoestringError
from ..techniques.sparsity.conversion import convert_to_dense
from ..techniques.sparsity.layer import SparseLayer, dense_weight
from .save import Save, load_weights, write_weights
from .state import ModelState, model_tensors
from .tensorfile import TensorFile


class NoMean(ShoestringError):
    """Saves that cannot be averaged."""


@dataclass(frozen=True)
class Mean:
    """A tensor that is computed on demand, and one with the shape and type that it will have."""

    like: Tensor
    make: Callable[[], Tensor]


def average_saves(model: nn.Module, saves: Sequence[Save], path: Path) -> None:
    """A model and checked saves of it -> a file of their mean weights; the model is not touched."""
    write_means(path, means(model, [TensorFile(save.path / "model.safetensors") for save in saves]))


def write_means(path: Path, found: Mapping[str, Mean]) -> None:
    write_weights(path, {name: mean.like for name, mean in found.items()}, lambda name: found[name].make())


def means(model: nn.Module, files: Sequence[TensorFile]) -> dict[str, Mean]:
    """A model and files of its tensors -> the mean of each, by its name in the dense model.

    Counters are those of the last file. Masks and other integers must be the same in all files: values at different
    positions have no mean.
    """
    sparse = {f"{path}." if path else "": m for path, m in model.named_modules() if isinstance(m, SparseLayer)}
    found: dict[str, Mean] = {}
    for name, tensor in model_tensors(model).items():
        home, own = name[: name.rfind(".") + 1], name[name.rfind(".") + 1 :]
        if home in sparse and own == "values":
            like = torch.empty(sparse[home].shape, dtype=tensor.dtype, device="meta")
            read = partial(_read_dense, home, like.shape)
            found[f"{home}weight"] = Mean(like, partial(_mean, read, files, like.dtype))
        elif not (home in sparse and own == "index"):
            found[name] = Mean(tensor, _maker(name, tensor, files))
    return found


def _maker(name: str, tensor: Tensor, files: Sequence[TensorFile]) -> Callable[[], Tensor]:
    if {file.entries[name].shape for file in files} != {tuple(tensor.shape)}:
        raise _changed(name)
    if tensor.is_floating_point() or tensor.is_complex():
        return partial(_mean, lambda file: file.read(name), files, tensor.dtype)
    return partial(_last, name, files)


def _mean(read: Callable[[TensorFile], Tensor], files: Sequence[TensorFile], dtype: torch.dtype) -> Tensor:
    first = read(files[0])
    total = first.to(torch.promote_types(first.dtype, torch.float32))
    for file in files[1:]:
        total += read(file)
    return total.div_(len(files)).to(dtype)


def _read_dense(home: str, shape: torch.Size, file: TensorFile) -> Tensor:
    return dense_weight(file.read(f"{home}values"), file.read(f"{home}index"), shape)


def _last(name: str, files: Sequence[TensorFile]) -> Tensor:
    last = files[-1].read(name)
    if last.dim() and not all(torch.equal(last, file.read(name)) for file in files[:-1]):
        raise _changed(name)
    return last


def _changed(name: str) -> NoMean:
    return NoMean(
        f"the saves cannot be averaged: {name} changed between them, so their weights are at "
        "different positions; average fewer, from after its last change"
    )


@contextmanager
def averaged(model: nn.Module, path: Path, last: Save) -> Iterator[nn.Module]:
    """The model with averaged weights inside the context; afterwards with its own, from the save `last`.

    For a sparse model it is a dense copy, which takes the memory of the dense model's weights.
    """
    if any(isinstance(module, SparseLayer) for module in model.modules()):
        dense = convert_to_dense(model)
        load_weights(dense, path)
        yield dense
        return
    try:
        load_weights(model, path)
        yield model
    finally:
        last.restore("model", ModelState(model), in_place=True)
