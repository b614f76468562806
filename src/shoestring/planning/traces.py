"""Every trace of one search: settings -> the profile of the task under them, made once; failures are recorded."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..ambient import Ambient
from ..profiling import Profile, Updates, profile
from ..signature import Signature
from ..task import Task
from ..techniques.registry import REGISTRY, apply_settings
from .estimate import Footprint
from .options import Candidates, Settings, words_for
from .timing import Work, work_of

Progress = Callable[[str], None]
Table = dict[str, int | None]
Calibrate = Callable[[list[Signature]], Table]  # operator calls -> their scratch on this machine
TRACED = tuple(name for name, technique in REGISTRY.items() if technique.effect is None)


class BaseTrace(NamedTuple):
    """The task under settings that need a trace, and what its trace says about adding those that do not."""

    task: Task
    footprint: Footprint
    work: Work
    objects: int  # bytes


class Traces:
    """The traces made so far. A trace that fails is None, and the candidates record why."""

    def __init__(
        self, task: Task, candidates: Candidates, workspace: Table, calibrate: Calibrate | None, progress: Progress
    ) -> None:
        self.candidates, self.workspace, self.calibrate, self.progress = candidates, workspace, calibrate, progress
        self.profiles: dict[Settings, Profile | None] = {}
        self._tasks: dict[Settings, Task | None] = {(): task.with_(model=blank(task.model))}
        self._bases: dict[Settings, BaseTrace | None] = {}
        self._offloaded: dict[Settings, int] = {}
        self._updates = Updates()
        self._broken: set[Settings] = set()  # settings that fail in any combination

    def of(self, settings: Settings) -> Profile | None:
        """Settings -> their trace; None if a technique does not work with this task or with the others."""
        if settings not in self.profiles:
            self.profiles[settings] = self._traced(settings)
        return self.profiles[settings]

    def again(self, settings: Settings) -> Profile | None:
        """The settings' trace with the scratch calibrated since."""
        traced = self.profiles[settings]
        self.profiles[settings] = (traced and traced.with_scratch(self.workspace)) or self._traced(settings)
        return self.profiles[settings]

    def _traced(self, settings: Settings) -> Profile | None:
        task = self.task(settings)
        if task is None:
            return None
        self.progress(words_for(settings))
        offloaded: list[int] = []
        with Ambient.during(offloaded_bytes=offloaded):
            if not settings:
                traced = self._profile(task)  # an error is the caller's
            else:
                traced = self._guarded(settings, lambda: self._profile(task))
        self._offloaded[settings] = sum(offloaded)
        if traced is None and len(settings) > 1:
            for pair in settings:
                self.of((pair,))  # if it fails alone, no combination with it is tried
        return traced

    def _profile(self, task: Task) -> Profile:
        return profile(task, self.workspace, brief=True, updates=self._updates)

    def task(self, settings: Settings) -> Task | None:
        """The task under settings; settings with a common prefix share the work of applying it."""
        if any((pair,) in self._broken for pair in settings):
            return None
        if settings not in self._tasks:
            before = self.task(settings[:-1])
            name, value = settings[-1]
            self._tasks[settings] = before and self._guarded(settings, lambda: apply_settings(before, {name: value}))
        return self._tasks[settings]

    def _guarded(self, settings: Settings, act: Callable[[], Any]) -> Any:
        result = self.candidates.guarded(settings, act)
        if result is None:
            self._broken.add(settings)
        return result

    def drop(self, settings: Settings, error: Exception) -> None:
        """Removes settings that turned out not to work."""
        self.candidates.leave_out(settings, error)
        self.profiles[settings] = None
        self._broken.add(settings)

    # -- traces that others share -----------------------------------------------------------------------------------
    def key(self, settings: Settings) -> Settings:
        """Settings -> the settings whose trace of the whole batch serves for them."""
        own = tuple(pair for pair in settings if pair[0] in TRACED)
        traced = tuple((name, self.candidates.bounds(name, value).traced_as or value) for name, value in own)
        return own if self._bases.get(traced, True) is None else traced

    def has_base(self, key: Settings) -> bool:
        return key in self._bases

    def known_base(self, settings: Settings) -> BaseTrace | None:
        """The base trace of any settings, if it was made already."""
        return self._bases.get(self.key(settings))

    def base(self, key: Settings) -> BaseTrace | None:
        """Settings that need a trace -> their trace of the whole batch; None if they do not work with the task."""
        if key not in self._bases:
            traced, task = self.of(key), self.task(key)
            self._bases[key] = None
            if traced is not None and task is not None:
                work = work_of(traced, task, self._offloaded[key])
                self._bases[key] = BaseTrace(task, Footprint(traced), work, traced.object_bytes)
        return self._bases[key]

    # -- scratch ----------------------------------------------------------------------------------------------------
    def calibrated(self, traced: Profile) -> bool:
        """Calibrates the operators whose scratch is unknown -> whether more is known now than the trace counted."""
        unknown = [call for call in traced.signatures if str(call) not in self.workspace]
        if self.calibrate is not None and unknown:
            self.workspace |= dict.fromkeys(map(str, unknown)) | self.calibrate(unknown)
        # Scratch found for another trace since then counts too.
        return sum(self.workspace.get(str(call)) or 0 for call in traced.signatures) > traced.scratch_bytes

    def settled(self, settings: Settings) -> Profile | None:
        """The trace of settings with the scratch of all its operators."""
        traced = self.of(settings)
        while traced is not None and self.calibrated(traced):
            traced = self.again(settings)
        return traced

    def plain(self) -> Profile:
        """Plain training with the scratch of its operators: the baseline of all savings."""
        traced = self.settled(())
        assert traced is not None, "its errors are raised"
        return traced


def blank(model: torch.nn.Module) -> torch.nn.Module:
    """A model -> a copy on the meta device, which techniques may change without touching the real one."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for home in (module._parameters, module._buffers):
            for tensor in home.values():
                if tensor is not None and id(tensor) not in memo:
                    twin = torch.empty_like(tensor, device="meta")
                    parameter = isinstance(tensor, torch.nn.Parameter)
                    memo[id(tensor)] = torch.nn.Parameter(twin, tensor.requires_grad) if parameter else twin
    return copy.deepcopy(model, memo)
