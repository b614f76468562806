"""A run's saved weights as plain PyTorch has them: dense, by the names of the plain model's state_dict().

They are made one tensor at a time, so that a sparse model is never dense in memory as a whole.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import DamagedSave, ShoestringError
from ..techniques.plain import is_lean
from ..techniques.sparsity.layer import dense_weight
from .averaging import Mean
from .folder import RunFolder
from .record import read_record
from .save import Save, write_weights
from .state import unpack
from .tensorfile import TensorFile

Warn = Callable[[str], None]
WEIGHTS = ("best", "last", "averaged")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "stored": None}


def export(run: Path, path: Path, weights: str = "best", dtype: str = "fp32", warn: Warn | None = None) -> int:
    """The folder of a run -> a safetensors file of its weights, sealed; the number of its tensors is returned.

    Floating tensors are written as `dtype`: fp32, fp16, bf16, or as they are stored.
    """
    found = plain_tensors(run, weights, warn)
    kind = DTYPES[dtype]
    likes = {name: _as(mean.like, kind) for name, mean in found.items()}
    write_weights(path, likes, lambda name: _as(found[name].make(), kind))
    return len(found)


def _as(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def plain_tensors(run: Path, weights: str = "best", warn: Warn | None = None) -> dict[str, Mean]:
    """The folder of a run -> its weights by their names in the plain model, each made when it is asked for."""
    folder = RunFolder(run, warn) if warn else RunFolder(run)
    record = folder.record()
    if weights == "averaged":
        file = averaged_file(folder)
        found = {name: _entry(file, name) for name in file.entries}
    else:
        found = _of_save(chosen_save(folder, weights))
    for name in record.unsaved:
        found.pop(name, None)
    return found | {name: found[first] for name, first in record.tied.items() if first in found}


def chosen_save(folder: RunFolder, weights: str) -> Save:
    """The newest save of a run, or the one that was evaluated best."""
    record = read_record(folder.record_path)
    folder = folder.of(record)
    best = record.best_update if weights == "best" else None
    if best in folder.saves.updates():
        with _advising("take the newest good ones by --weights last"):
            return folder.saves.check(best)
    if (newest := folder.saves.newest()) is None:
        if lost := folder.lost_saves(record):
            raise DamagedSave(f"{lost}: put them back, or train it again by `shoestring train --resume --start-over`")
        raise ShoestringError(f"{folder.path} holds no save yet: go on with `shoestring train --resume` first")
    if best is not None:
        raise DamagedSave(f"the save of update {best:,}, the best, is gone from {folder.path}: take --weights last")
    return newest


def averaged_file(folder: RunFolder) -> TensorFile:
    """The averaged weights of a run, compared with their checksum."""
    if not folder.averaged_path.exists():
        raise ShoestringError(f"{folder.path} holds no averaged weights: train with --average N")
    file = TensorFile(folder.averaged_path)
    with _advising("take other weights by --weights best or last"):
        sealed = file.verify()
    if not sealed:
        folder.warn(f"{file.path} has no checksum, as an earlier version wrote it: a change to it cannot be seen")
    return file


@contextmanager
def _advising(then: str) -> Iterator[None]:
    """Says what to do about weights that are damaged."""
    try:
        yield
    except DamagedSave as error:
        raise DamagedSave(f"{error}: {then}") from None


def _of_save(save: Save) -> dict[str, Mean]:
    file = save.tensors("model")
    assert file is not None, "a model has tensors"
    found: dict[str, Mean] = {}
    sparse = _sparse_shapes(save, file)
    for name, entry in file.entries.items():
        home, _, own = name.rpartition(".")
        if home in sparse and own == "values":
            like = torch.empty(sparse[home], dtype=entry.dtype, device="meta")
            found[f"{home}.weight".lstrip(".")] = Mean(like, partial(_dense, file, name, sparse[home]))
        elif not (home in sparse and own == "index"):
            found[name] = _entry(file, name)
    return found


def _entry(file: TensorFile, name: str) -> Mean:
    entry = file.entries[name]
    return Mean(torch.empty(entry.shape, dtype=entry.dtype, device="meta"), partial(file.read, name))


def _dense(file: TensorFile, name: str, shape: tuple[int, ...]) -> Tensor:
    return dense_weight(file.read(name), file.read(f"{name.removesuffix('values')}index"), shape)


def _sparse_shapes(save: Save, file: TensorFile) -> dict[str, tuple[int, ...]]:
    """The paths of sparse layers -> the shape of each one's weight, which its extra state begins with."""
    shapes = {}
    for key, state in unpack(save.values.get("parts", {}), save.tensors("parts")).items():
        path = key.removeprefix("extra ")
        own = {f"{path}.{name}".lstrip(".") for name in ("values", "index")}
        if key != path and isinstance(state, Tensor) and own <= set(file.entries):
            shapes[path] = tuple(state.tolist()[:-1])
    return shapes


@torch.no_grad()
def fill(model: nn.Module, found: Mapping[str, Mean], where: object) -> None:
    """Reads weights into a plain model, one tensor at a time; refuses one of other names or shapes."""
    if is_lean(model):
        raise ShoestringError("the model is lean: pass the plain one, before any plan is applied to it")
    check_fits(model, found, where)
    for name, tensor in model.state_dict().items():
        tensor.copy_(found[name].make())


def check_fits(model: nn.Module, found: Mapping[str, Mean], where: object) -> None:
    """Refuses weights of other names or shapes than the model's."""
    tensors = model.state_dict()
    for name in [*tensors, *found]:
        here = tuple(tensors[name].shape) if name in tensors else None
        there = tuple(found[name].like.shape) if name in found else None
        if here != there:
            raise ShoestringError(
                f"the weights of {where} are not of this model: {name} is {_shape(here)} in the model and "
                f"{_shape(there)} in the run; build the model as it was trained"
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"of shape {shape}"
