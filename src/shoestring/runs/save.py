"""Saves: `saves/update-0000000120/` holds safetensors files and a manifest with the SHA-256 of each.

A save is a training checkpoint. It is written to a hidden folder beside the others, synced to disk, and renamed: it is
complete or not there at all. It is checked to the last byte before any of it is used. Nothing in it can be executed.
"""

import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..distributed import Lending
from ..errors import DamagedSave, NotWritten, ShoestringError
from ..records import seal, unseal
from ..task import Task
from ..units import format_bytes
from .manifest import check_fields, check_packed
from .state import ModelState, Parts, Stateful, find_stateful, fingerprint, model_tensors, pack, unpack
from .tensorfile import MOST_HEADER, HashedFile, TensorFile, Written, checksum, in_order, require_regular, write_tensors

Whole = Callable[[Tensor], Tensor]
VERSION = 1
MANIFEST = "manifest.json"
_NAME = re.compile(r"update-(\d{10})")


class NotSaved(NotWritten):
    """A save could not be written, for example on a full disk; earlier ones are still there."""


@dataclass(frozen=True)
class Save:
    """A complete, checked save. `values` is the plain part of each group's state, by the group's name."""

    path: Path
    update: int
    fingerprint: str
    values: dict[str, Any]
    files: dict[str, Written]
    run_id: str = ""

    def restore(self, group: str, part: Stateful, in_place: bool = False) -> None:
        """Restores a part's state; `in_place` reads into the tensors that the part has now."""
        if group not in self.values:
            raise DamagedSave(f"{self.path} is damaged: its {MANIFEST} has no key 'values.{group}'")
        live = part.state() if in_place else None
        part.restore(unpack(self.values[group], self.tensors(group), live))

    def check_model(self, fingerprint: str) -> None:
        """Refuses a save whose model had tensors of other names, types or shapes before training."""
        if self.fingerprint != fingerprint:
            raise ShoestringError(
                f"{self.path} is of a model with other tensor names or shapes: build the model as it was, "
                "or choose another folder"
            )

    def tensors(self, group: str) -> TensorFile | None:
        name = f"{group}.safetensors"
        return TensorFile(self.path / name) if name in self.files else None


@dataclass(frozen=True)
class Saves:
    """The saves of one run in a folder. `warn` is called with what was damaged and skipped; a save that names another
    run than `run_id` was put there, and counts as damaged. Without an id, any run's are taken."""

    folder: Path
    warn: Callable[[str], None] = warnings.warn
    run_id: str = ""

    def updates(self) -> list[int]:
        """The updates after which a save was made, in order; damaged ones included."""
        try:
            names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        except OSError as error:
            raise NotSaved(f"{self.folder} cannot be read: {error.strerror}; mend it and resume") from error
        return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))

    def path(self, update: int) -> Path:
        return self.folder / f"update-{update:010d}"

    def write(
        self, update: int, fingerprint: str, groups: Mapping[str, Stateful], whole: Whole = lambda tensor: tensor
    ) -> Path:
        """Saves the state of each group; at most one chunk of a tensor is copied in memory, or of one in shards what
        `whole` makes of it."""
        final, hidden = self.path(update), self.folder / f".writing-{self.path(update).name}"
        try:
            self.sweep()
            hidden.mkdir(parents=True)
            _write_files(hidden, Head(update, fingerprint, self.run_id), groups, whole)
            if final.exists():  # a damaged one, or one from before the run was set back
                final.rename(self.folder / f".replaced-{final.name}")
            hidden.rename(final)
            _sync_folder(self.folder)
            self.sweep()
        except OSError as error:
            shutil.rmtree(hidden, ignore_errors=True)
            raise self._not_saved(update, error) from error
        return final

    def sweep(self) -> None:
        """Removes what a killed run left half written or half removed."""
        for path in self.folder.glob(".*-update-*"):
            self._remove(path)

    def keep(self, updates: Iterable[int | None]) -> None:
        """Removes all saves except these; each is hidden first, so that no partial save is ever visible."""
        try:
            self.sweep()
        except OSError as error:
            return self.warn(
                f"old saves in {self.folder} were not looked for ({error.strerror}): the next save does it"
            )
        for update in set(self.updates()) - set(updates):
            self._remove(self.path(update), self.folder / f".removing-{self.path(update).name}")

    def _remove(self, path: Path, hidden: Path | None = None) -> None:
        """Removes a folder, hidden under another name first. What cannot be removed harms no save: it is told."""
        try:
            shutil.rmtree(path.rename(hidden) if hidden else path)
        except OSError as error:
            self.warn(
                f"{path} could not be removed ({error.strerror}): the newer saves are whole, training goes on, and the "
                "next save tries again"
            )

    def newest(self) -> Save | None:
        """The newest undamaged save, checked to the last byte; None if none was ever made."""
        damage = ""
        for update in reversed(self.updates()):
            try:
                save = self.check(update)
            except DamagedSave as error:
                damage = str(error)
                continue
            if damage:
                self.warn(f"{damage}; continuing from update {update:,}, the newest undamaged save")
            return save
        if damage:
            raise DamagedSave(f"{damage}, and no other save is undamaged: start over in another folder")
        return None

    def check(self, update: int) -> Save:
        save = check(self.path(update))
        if self.run_id and save.run_id != self.run_id:
            raise DamagedSave(
                f"{save.path} is of another run (its id is {save.run_id[:8] or 'none'}, not {self.run_id[:8]}): move "
                "the run's own save back"
            )
        return save

    def _not_saved(self, update: int, error: OSError) -> NotSaved:
        place = next(folder for folder in (self.folder, *self.folder.parents) if folder.exists())
        free = format_bytes(shutil.disk_usage(place).free)
        last = self.updates()
        safe = f"the save of update {last[-1]:,} is complete" if last else "there is no earlier save"
        return NotSaved(
            f"update {update:,} could not be saved in {self.folder}: {error.strerror or error} ({free} "
            f"free); {safe}: make room and resume"
        )


def check(path: Path) -> Save:
    """The folder of a save -> the save, if every byte is as it was written."""
    record = _read_manifest(path)
    try:
        files = check_fields(record)
    except ValueError as error:
        raise DamagedSave(f"{path} is damaged: in its {MANIFEST} {error}") from error
    for name, written in files.items():
        _check_file(path / name, written)
    save = Save(path, record["update"], record["fingerprint"], record["values"], files, record.get("run", ""))
    if (named := _NAME.fullmatch(path.name)) and int(named[1]) != save.update:
        raise DamagedSave(
            f"{path} is the save of update {save.update:,}, so it was renamed: call it update-{save.update:010d} again"
        )
    for group, value in save.values.items():
        file = save.tensors(group)
        try:
            check_packed(value, f"values.{group}", file.entries if file else {})
        except ValueError as error:
            raise DamagedSave(f"{path} is damaged: in its {MANIFEST} {error}") from error
    return save


class Head(NamedTuple):
    """What a save is of: sealed in its manifest, so that one with another's name or in another run's folder is seen."""

    update: int
    fingerprint: str
    run: str


def lent(groups: Mapping[str, Stateful]) -> Lending:
    """What the processes of a sharded model lend to the one that writes a save of it, in the order of writing."""
    parts = (pack(part.state())[1] for part in groups.values())
    return Lending(tensors[name] for tensors in parts for name in in_order(tensors))


def _write_files(folder: Path, head: Head, groups: Mapping[str, Stateful], whole: Whole) -> None:
    """Writes the files of a save and, last, its manifest; all are on disk when this returns."""
    files: dict[str, Written] = {}
    values = {}
    for group, part in groups.items():
        values[group], tensors = pack(part.state())
        if tensors:
            name = f"{group}.safetensors"
            with (folder / name).open("xb", buffering=0) as file:
                files[name] = write_tensors(file, tensors, _maker(tensors, whole))
                os.fsync(file.fileno())
    record = {"version": VERSION, **head._asdict(), "values": values}
    record["files"] = {name: asdict(written) for name, written in files.items()}
    with (folder / MANIFEST).open("xb", buffering=0) as file:
        HashedFile(file).write(seal(record))
        os.fsync(file.fileno())
    _sync_folder(folder)


def _maker(tensors: Mapping[str, Tensor], whole: Whole) -> Callable[[str], Tensor]:
    return lambda name: whole(tensors[name])


def _read_manifest(path: Path) -> dict[str, Any]:
    manifest = path / MANIFEST
    _require_own(manifest)
    try:
        if manifest.stat().st_size > MOST_HEADER:
            raise ValueError(f"it has over {MOST_HEADER:,} bytes")
        record = unseal(manifest.read_bytes())
    except FileNotFoundError as error:
        raise DamagedSave(f"{path} is damaged: it has no {MANIFEST}") from error
    except (OSError, ValueError) as error:
        raise DamagedSave(f"{path} is damaged: its {MANIFEST} is not as it was written ({error})") from error
    if type(record.get("version")) is int and record["version"] != VERSION:
        raise ShoestringError(
            f"{path} has version {record['version']}, this Shoestring reads {VERSION}: "
            "resume with the one that saved it"
        )
    return record


def _check_file(path: Path, written: Written) -> None:
    _require_own(path)
    try:
        size = path.stat().st_size
        found = checksum(path) if size == written.bytes else Written(size, "")
    except OSError as error:
        raise DamagedSave(f"{path.parent} is damaged: {path.name} cannot be read ({error.strerror})") from error
    if found.bytes != written.bytes:
        raise DamagedSave(
            f"{path.parent} is damaged: {path.name} has {found.bytes:,} bytes, and {written.bytes:,} were written"
        )
    if found != written:
        raise DamagedSave(f"{path.parent} is damaged: the SHA-256 of {path.name} is not that of what was written")


def _require_own(path: Path) -> None:
    """Refuses what is not a file of the save's own folder."""
    require_regular(path)
    if path.is_symlink():
        raise DamagedSave(f"{path} is a link, so it is not part of a save: put the file itself there")


def _sync_folder(folder: Path) -> None:
    """Syncs the names in a folder to disk, which fsync of a file does not ensure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_weights(path: Path, tensors: Mapping[str, Tensor], make: Callable[[str], Tensor] | None = None) -> None:
    """Writes tensors (made one by one, if `make` is given: see `write_tensors`) to a sealed file, atomically."""
    hidden = path.with_name(f".writing-{path.name}")
    try:
        with hidden.open("wb", buffering=0) as file:
            write_tensors(file, tensors, make, sealed=True)
            os.fsync(file.fileno())
        hidden.replace(path)
    except OSError as error:
        raise NotSaved.because(path, error) from error
    finally:
        hidden.unlink(missing_ok=True)


def restore_task(task: Task, save: Save) -> None:
    """Restores the weights of a task's model from a save, and the state of its techniques, such as masks."""
    save.check_model(fingerprint(task.model))
    save.restore("model", ModelState(task.model), in_place=True)
    save.restore("parts", Parts(find_stateful(task)))


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Reads a save's folder, or a file such as averaged.safetensors, into a model, tensor by tensor.

    What has a checksum (a save; a file that `export` or averaging wrote) is compared with it first.
    """
    where = Path(path)
    if where.is_dir():
        check(where)
        where = where / "model.safetensors"
    file, tensors = TensorFile(where), model_tensors(model)
    file.verify()
    for name, tensor in tensors.items():
        entry = file.entries.get(name)
        if entry is None or (entry.dtype, entry.shape) != (tensor.dtype, tuple(tensor.shape)):
            found = f"{entry.dtype} of shape {entry.shape}" if entry else "nothing"
            raise ShoestringError(
                f"{where} does not fit the model: {name} is {tensor.dtype} of shape {tuple(tensor.shape)}, "
                f"and the file has {found}; build the model as it was trained"
            )
    for name, tensor in tensors.items():
        file.read_into(name, tensor)
