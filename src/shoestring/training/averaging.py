"""The mean of the weights of several saves, one tensor at a time."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..errors import ShoestringError
from .save import Save
from .state import model_tensors
from .tensorfile import TensorFile


def average_saves(model: nn.Module, saves: Sequence[Save]) -> None:
    """Fills the model with the mean weights of saves, which were checked."""
    average_into(model_tensors(model), [TensorFile(save.path / "model.safetensors") for save in saves])


def average_into(tensors: Mapping[str, Tensor], files: Sequence[TensorFile]) -> None:
    """Fills each tensor with the mean of the tensors of its name in the files.

    Counters are those of the last file. Masks and other integers must be the same in all, for values at
    different places have no mean.
    """
    with torch.no_grad():
        for name, tensor in tensors.items():
            shapes = {file.entries[name].shape for file in files}
            if shapes != {tuple(tensor.shape)}:
                raise _changed(name)
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.copy_(_mean(name, files))
            else:
                _take_last(name, tensor, files)


def _mean(name: str, files: Sequence[TensorFile]) -> Tensor:
    first = files[0].read(name)
    total = first.to(torch.promote_types(first.dtype, torch.float32))
    for file in files[1:]:
        total += file.read(name)
    return total.div_(len(files))


def _take_last(name: str, tensor: Tensor, files: Sequence[TensorFile]) -> None:
    files[-1].read_into(name, tensor)
    if tensor.dim() and not all(torch.equal(tensor, file.read(name).to(tensor.device)) for file in files):
        raise _changed(name)


def _changed(name: str) -> ShoestringError:
    return ShoestringError(
        f"the saves cannot be averaged: {name} changed between them, so their weights lie at "
        "different places; average fewer, from after its last change"
    )
