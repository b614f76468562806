"""RunRecord: what a run was asked to do, what was predicted, and the outcome (record.json)."""

import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..errors import DamagedSave, ShoestringError
from ..records import checked, file_bytes, read_sealed

VERSION = 1


@dataclass(frozen=True)
class RunRecord:
    """The outcome of a run. `settings` determine the result: a run can only be resumed with the same ones. None means
    not known (yet).

    `measured` is the meter's reading at the step with the highest peak since the run was last replanned. `seconds` are
    those of training and evaluation, over all restarts of the run.
    """

    task: str
    settings: dict[str, Any]
    environment: dict[str, Any]
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    predicted_bytes: dict[str, int] = field(default_factory=dict)
    measured_peak_bytes: int | None = None
    measured: dict[str, Any] = field(default_factory=dict)
    measured_beside: dict[str, int] = field(default_factory=dict)  # peaks between steps: evaluation, save, averaging
    measured_peaks: list[list[int]] = field(default_factory=list)  # [update, bytes] where the measured peak changed
    updates: int = 0
    seconds: float = 0.0
    quality_name: str = ""
    quality: float | None = None  # after the last update
    best_quality: float | None = None
    best_update: int | None = None
    averaged_quality: float | None = None
    finished: bool = False
    skipped: int = 0  # updates that the loss scale, or a loss that was not finite, skipped
    over_budget: list[list[int]] = field(default_factory=list)  # [update, bytes] where a step took more than that
    out_of_memory: list[list[int]] = field(
        default_factory=list
    )  # [update, bytes] where the system had less than needed
    command: dict[str, Any] = field(default_factory=dict)  # the arguments of `shoestring train`, for later commands
    data_fingerprint: str = ""  # of the content of the data, if it can tell
    tied: dict[str, str] = field(default_factory=dict)  # names of the plain model's weights that are those of another
    unsaved: list[str] = field(default_factory=list)  # buffers that the plain model's state_dict() leaves out
    run_id: str = ""  # SHA-256 of what the run began with; its saves name it

    def with_(self, **changes: Any) -> "RunRecord":
        return replace(self, **changes)

    def anew(self) -> "RunRecord":
        """The record of the same run before its first update."""
        nothing: dict[str, Any] = dict.fromkeys(("quality", "best_quality", "best_update", "averaged_quality"))
        return replace(self, updates=0, skipped=0, finished=False, measured_peaks=[], **nothing)

    def to_json(self) -> dict[str, Any]:
        return {"version": VERSION, **asdict(self)}


def read_record(path: Path, warn: Callable[[str], None] | None = None) -> RunRecord:
    """`record.json` -> the record; refuses what is damaged or of another version, and tells where it cannot know."""
    try:
        record, is_sealed = read_sealed(file_bytes(path))
        version = record.pop("version")
        if version == VERSION:
            found = RunRecord(**checked(RunRecord, record))
            if warn is not None and not is_sealed:
                warn(f"{path} has no checksum, as an earlier version wrote it: a change to it cannot be seen")
            return found
    except FileNotFoundError:
        raise ShoestringError(f"{path.parent} holds no run: name the folder that `shoestring train` wrote") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedSave(f"{path} is not the record of a run ({error}): choose another folder") from error
    raise ShoestringError(f"{path} has version {version}, this Shoestring reads {VERSION}: use the one that wrote it")


def environment() -> dict[str, Any]:
    """-> what a run's numbers may depend on besides its settings."""
    return {
        "shoestring": version("shoestring"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "core": os.environ.get("SHOESTRING_CORE", ""),
    }


def describe(thing: Any) -> str:
    """A schedule, an optimizer or a function -> text that is the same for the same settings."""
    if is_dataclass(thing) and not isinstance(thing, type):
        return repr(thing)
    if isinstance(thing, torch.optim.Optimizer):
        settings = [f"{key}={value}" for key, value in thing.defaults.items()]
        return f"{type(thing).__name__}({', '.join([*settings, *_groups(thing)])})"
    return getattr(thing, "__qualname__", type(thing).__qualname__)


def _groups(optimizer: torch.optim.Optimizer) -> list[str]:
    """The settings in which each group of parameters differs from the defaults, if there are several groups."""
    if len(optimizer.param_groups) == 1:
        return []
    told = [group | {"lr": group.get("initial_lr", group.get("lr"))} for group in optimizer.param_groups]
    own = [{k: group[k] for k, v in optimizer.defaults.items() if group[k] != v} for group in told]
    return [f"{len(group['params'])} with {settings}" for group, settings in zip(told, own, strict=True)]


def differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Two settings -> the entries that differ, in words; empty if none does."""
    old, new = _flat(before), _flat(json.loads(json.dumps(now)))  # as it is when it comes from a file
    changed = [key for key in old | new if old.get(key) != new.get(key)]
    return ", ".join(f"{key} was {old.get(key)} and is now {new.get(key)}" for key in changed)


def why_not_resumed(before: RunRecord, now: RunRecord, stretched: str) -> str:
    """Why a run cannot go on with these settings; "" if it can. All must be as they were, except for its length if
    nothing is `stretched` over the whole run."""
    if _other(before.data_fingerprint, now.data_fingerprint):
        return "its data have changed: there are as many, but their content is not what the run was trained on"
    length: dict[str, Any] = {name: r.settings.get("updates") for name, r in (("old", before), ("new", now))}
    changed = differences(before.settings, now.settings)
    if length["old"] == length["new"] or not changed:
        return f"other settings are given: {changed}" if changed else ""
    if differences(*(_without(record.settings, "updates", "schedule") for record in (before, now))):
        return f"other settings are given: {changed}"
    if before.settings.get("schedule") != now.settings.get("schedule"):
        stretched = "the schedule of the learning rate"
    if stretched:
        return (
            f"it was started for {length['old']:,} updates and {length['new']:,} are asked for, and {stretched} is "
            "stretched over the whole run: what was trained so far would have been trained otherwise"
        )
    if length["new"] < before.updates:
        return f"{before.updates:,} updates are done already, and {length['new']:,} are asked for"
    return ""


def _other(before: str, now: str) -> bool:
    """Whether two fingerprints of data differ; those that are missing, or were made in another way, tell nothing."""
    alike = before.rpartition("-")[0] == now.rpartition("-")[0]
    return bool(before and now) and alike and before != now


def _without(settings: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names}


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Nested settings -> one level, each with its whole name.

    >>> _flat({"seed": 0, "techniques": {"microbatch": {"size": 10, "by": "tokens"}, "precision": "fp16"}})
    {'seed': 0, 'techniques microbatch': 10, 'techniques microbatch by': 'tokens', 'techniques precision': 'fp16'}
    """
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        for name, part in value.items() if isinstance(value, dict) else [("", value)]:
            # The first setting of a technique is the one that its value alone stands for.
            first, *rest = part.items() if isinstance(part, dict) and part else [("", part)]
            flat |= {f"{key} {name}".strip(): first[1]} | {f"{key} {name} {inner}": value for inner, value in rest}
    return flat
