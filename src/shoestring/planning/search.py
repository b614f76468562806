"""The search: from a budget in bytes to the plan that keeps it at least cost.

Exactness is spent first: plans that compute the same numbers, then those whose effect was found not to matter, then
approximate ones, up to the risk that the user allows. Within a risk the least predicted time wins. Whether a plan fits
is decided by tracing the task after `apply`, never by a formula; a formula only orders the candidates and skips those
that cannot fit: activations of a microbatch are at least their share of the whole batch's.
"""

import copy
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import NoPlanFits, ShoestringError
from ..profiling import Profile, profile
from ..task import Task
from ..techniques import REGISTRY, Technique
from ..techniques.microbatch import units
from ..techniques.risk import Risk
from ..units import format_bytes, parse_bytes
from .plan import Plan
from .timing import Rates, device_rates, seconds_of

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Option:
    """A combination of settings, its risk, and what is known of it so far."""

    settings: tuple[tuple[str, Any], ...]
    risk: Risk

    def without(self, name: str) -> "Option":
        return Option(tuple(pair for pair in self.settings if pair[0] != name), self.risk)


def plan(
    task: Task,
    budget: str | int,
    risk: str = "neutral",
    rates: Rates | None = None,
    workspace: dict | None = None,
    progress: Progress = lambda message: None,
) -> Plan:
    """A task and a budget -> the plan with the least predicted time that fits it, at the least risk that does.

    `workspace` is the calibrated scratch of operators, as for `profile`.
    """
    search = Search(task, parse_bytes(budget), rates or device_rates(torch.get_num_threads()), workspace, progress)
    allowed = Risk.named(risk)
    for level in Risk:
        if level <= allowed and (found := search.best(level)):
            return search.finish(found, level)
    raise search.nothing_fits(allowed)


class Search:
    """One search: remembers every trace that it made."""

    def __init__(self, task: Task, budget: int, rates: Rates, workspace: dict | None, progress: Progress) -> None:
        self.task, self.budget, self.rates = task, budget, rates
        self.workspace, self.progress = workspace, progress
        self.profiles: dict[tuple, Profile | None] = {}
        plain = self._trace(())
        assert plain is not None
        self.plain, self.plain_seconds = plain, seconds_of(plain, rates)

    # -- candidates ---------------------------------------------------------------------------------------------
    def options(self, level: Risk) -> list[Option]:
        """Every combination whose largest risk is `level`."""
        choices = [self._values(technique, level) for technique in REGISTRY]
        combinations = []
        for values in itertools.product(*choices):
            chosen = [(name, value, risk) for name, value, risk in values if value is not None]
            risk = max((risk for *_, risk in chosen), default=Risk.EXACT)
            if risk == level:
                combinations.append(Option(tuple((name, value) for name, value, _ in chosen), risk))
        return combinations

    def _values(self, technique: Technique, level: Risk) -> list[tuple[str, Any, Risk]]:
        offered = [(technique.name, value, technique.risk(self.task, value)) for value in technique.options(self.task)]
        return [(technique.name, None, Risk.EXACT), *(offer for offer in offered if offer[2] <= level)]

    def best(self, level: Risk) -> Option | None:
        """The fastest combination of this risk that fits; combinations are tried from the fastest on.

        Where plain training fits, it is left as it is.
        """
        if level == Risk.EXACT and self._fits(Option((), level)):
            return Option((), level)
        timed = [(seconds, number, option) for number, option in enumerate(self.options(level))
                 if (seconds := self.seconds(option)) is not None]  # fmt: skip
        for _, _, option in sorted(timed):
            if self._could_fit(option) and self._fits(option):
                return option
        return None

    def seconds(self, option: Option) -> float | None:
        """The predicted seconds of a step; None where its checkpointing cannot be applied.

        From the trace of the whole batch in FP32 with the same checkpointing: what is stored in fewer bits or bytes
        costs the same arithmetic, and of sparse layers only the nonzeros are computed.
        """
        settings = dict(option.settings)
        whole = self._checkpointed(settings)
        if whole is None:
            return None
        pieces, density = self._pieces(settings.get("microbatch")), settings.get("nonzero", 100) / 100
        return seconds_of(whole, self.rates, pieces, density)

    def _checkpointed(self, settings: dict[str, Any]) -> Profile | None:
        return self._trace((("checkpoint", settings["checkpoint"]),) if "checkpoint" in settings else ())

    def _pieces(self, size: int | None) -> int:
        return -(-units(self.task) // size) if size else 1

    def _could_fit(self, option: Option) -> bool:
        """False only where the plan cannot fit: a bound from below, from what each technique can save at most."""
        settings = dict(option.settings)
        whole = self._checkpointed(settings)
        if whole is None:
            return False
        parts = whole.bytes_by_category
        narrow = 0.45 if "precision" in settings else 1.0
        density = settings.get("nonzero", 100) / 100
        state = 0.2 if "8bit" in str(settings.get("optimizer")) else 1.0
        fixed = narrow * density * (parts["model"] + state * parts["optimizer_state"])
        moving = narrow * (parts["activation"] + parts["activation_gradient"])
        return fixed + 0.5 * moving / self._pieces(settings.get("microbatch")) <= self.budget

    def _fits(self, option: Option) -> bool:
        traced = self._trace(option.settings)
        return traced is not None and traced.peak_bytes <= self.budget

    # -- traces -------------------------------------------------------------------------------------------------
    def _trace(self, settings: tuple) -> Profile | None:
        if settings not in self.profiles:
            words = ", ".join(f"{name} {value}" for name, value in settings) or "no technique"
            self.progress(words)
            self.profiles[settings] = self._profile(settings)
        return self.profiles[settings]

    def _profile(self, settings: tuple) -> Profile | None:
        task = self.task.with_(model=blank(self.task.model)) if settings else self.task
        try:
            for technique in REGISTRY:
                if technique.name in dict(settings):
                    task = technique.apply(task, technique.settings(dict(settings)[technique.name]))
            return profile(task.with_(split=Representative(task.split)), workspace=self.workspace)
        except ShoestringError:
            if not settings:
                raise
            return None  # a technique that does not suit this task or the others, or changes nothing

    # -- answers ------------------------------------------------------------------------------------------------
    def finish(self, option: Option, level: Risk) -> Plan:
        traced = self._trace(option.settings)
        assert traced is not None
        return Plan(
            **dict(option.settings),
            task=self.plain.task,
            budget_bytes=self.budget,
            predicted_peak_bytes=traced.peak_bytes,
            predicted_bytes=traced.bytes_by_category,
            predicted_time_ratio=(self.seconds(option) or 0.0) / self.plain_seconds,
            reasons=tuple(self._reasons(option, level)),
            alternatives=tuple(self.pareto()),
        )

    def _reasons(self, option: Option, level: Risk) -> Iterator[str]:
        yield f"plain training needs {format_bytes(self.plain.peak_bytes)}, the budget is {format_bytes(self.budget)}"
        if level > Risk.EXACT:
            yield f"no plan of lower risk fits: this one is {level.name.lower()}"
        for name, value in option.settings:
            less = self._trace(option.without(name).settings)
            if less is not None:
                yield f"{name} {value}: without it {format_bytes(less.peak_bytes)}"

    def pareto(self) -> list[dict[str, Any]]:
        """Of everything that was traced: what no other beats in memory, time and risk together, least memory first."""
        rows = []
        for settings, traced in self.profiles.items():
            if traced is not None:
                risks = [t.risk(self.task, dict(settings)[t.name]) for t in REGISTRY if t.name in dict(settings)]
                risk = max(risks, default=Risk.EXACT)
                seconds = self.seconds(Option(settings, risk))
                ratio = (seconds or 0.0) / self.plain_seconds
                rows.append((traced.peak_bytes, ratio, risk, settings))
        best = [row for row in rows if not any(_beats(other, row) for other in rows)]
        return [
            {"settings": dict(settings), "predicted_peak_bytes": peak, "predicted_time_ratio": ratio,
             "risk": risk.name.lower()}
            for peak, ratio, risk, settings in sorted(best, key=lambda row: row[:3])
        ]  # fmt: skip

    def nothing_fits(self, allowed: Risk) -> NoPlanFits:
        peak, settings, traced = min(
            ((p.peak_bytes, s, p) for s, p in self.profiles.items() if p is not None), key=lambda row: row[0]
        )
        parts = sorted(traced.bytes_by_category.items(), key=lambda part: -part[1])[:3]
        fills = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in parts)
        words = ", ".join(f"{name} {value}" for name, value in settings) or "no technique"
        more = "a smaller batch or model" if allowed == Risk.APPROXIMATE else f"--risk {Risk(allowed + 1).name.lower()}"
        return NoPlanFits(
            f"no plan fits {format_bytes(self.budget)}: the smallest peak found is {format_bytes(peak)} ({words}), "
            f"filled by {fills}; try {more} or a larger budget"
        )


def _beats(other: tuple, row: tuple) -> bool:
    return other is not row and all(a <= b for a, b in zip(other[:3], row[:3], strict=True)) and other[:3] != row[:3]


def blank(model: torch.nn.Module) -> torch.nn.Module:
    """A model -> the same on the meta device, to be changed by techniques without touching the real one."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for home in (module._parameters, module._buffers):
            for tensor in home.values():
                if tensor is not None and id(tensor) not in memo:
                    twin = torch.empty_like(tensor, device="meta")
                    parameter = isinstance(tensor, torch.nn.Parameter)
                    memo[id(tensor)] = torch.nn.Parameter(twin, tensor.requires_grad) if parameter else twin
    return copy.deepcopy(model, memo)


@dataclass(frozen=True)
class Representative:
    """At most two microbatches of each shape: what comes after them in a step looks the same to a trace."""

    split: Callable[[Any], Iterable[Any]]

    def __call__(self, batch: Any) -> Iterator[Any]:
        seen: dict[tuple, int] = defaultdict(int)
        for piece in self.split(batch):
            shape = tuple(leaf.shape for leaf in pytree.tree_leaves(piece) if isinstance(leaf, Tensor))
            seen[shape] += 1
            if seen[shape] <= 2:
                yield piece
