"""The search: from a budget in bytes to the plan that keeps it at least cost.

Exactness is spent first: plans that compute the same numbers, then those whose effect was found not to matter, then
approximate ones, the mildest of each first, up to the risk that the user allows. Among equals the least predicted time
wins. So plans are in one order that no budget changes, and a lower budget never gets a higher peak. Whether a plan fits
is decided by tracing the task after `apply`, with the scratch that its operators need on this machine; an estimate
(estimate.py) only skips what is far from fitting, and learns from each trace how far it was off.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ..errors import NoPlanFits, ShoestringError
from ..profiling import Profile, profile
from ..signature import Signature
from ..task import Task
from ..techniques import REGISTRY, Technique
from ..techniques.lean_optimizer import USING_UP, lean_update
from ..techniques.microbatch import units
from ..techniques.risk import Risk
from ..techniques.selection import select
from ..units import format_bytes, parse_bytes
from .estimate import Footprint
from .plan import Plan
from .timing import Rates, device_rates, seconds_of

Progress = Callable[[str], None]
Table = dict[str, int | None]
Calibrate = Callable[[list[Signature]], Table]  # operator calls -> their scratch on this machine
SHARED = ("precision", "checkpoint")  # settings of the traces from which the others' effect is estimated
DOUBT, DOUBT_AFTER_TRACE = 0.95, 0.97  # the share of an estimate that a plan surely needs
# Room for what no trace sees, which the heap meter does: the headers of a tensor and its storage, their Python objects,
# autograd's node. Measured (benchmarks/budgets_kept.py): 720 bytes for each storage alive at the peak, at most 870.
OBJECT_BYTES = 900
SPARSER = {50: 1, 40: 1, 30: 1, 20: 2}  # how approximate: steps of about half a point of accuracy (paper, Table 3)
ALTERNATIVES = 2  # that are traced to be shown beside the plan


@dataclass(frozen=True)
class Option:
    """A combination of settings and its risk."""

    settings: tuple[tuple[str, Any], ...]
    risk: Risk

    def without(self, name: str) -> "Option":
        return Option(tuple(pair for pair in self.settings if pair[0] != name), self.risk)

    def only(self, *names: str) -> tuple[tuple[str, Any], ...]:
        return tuple(pair for pair in self.settings if pair[0] in names)

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.settings) or "no technique"


class Base(NamedTuple):
    """One traced step of the whole batch, and what follows from it for other settings."""

    traced: Profile
    footprint: Footprint
    objects: int  # bytes


def plan(
    task: Task,
    budget: str | int,
    risk: str = "neutral",
    rates: Rates | None = None,
    workspace: Table | None = None,
    calibrate: Calibrate | None = None,
    progress: Progress = lambda message: None,
) -> Plan:
    """A task and a budget -> the plan with the least predicted time that fits it, at the least risk that does.

    `workspace` is the known scratch of operators, as for `profile`; `calibrate` is asked for what is not known of a
    plan that would fit. Without both, scratch inside PyTorch's operators is not counted.
    """
    limit, allowed = parse_bytes(budget), Risk.named(risk)
    rates = rates or device_rates(torch.get_num_threads())
    search = Search(task, limit, rates, workspace, calibrate, progress)
    for level in Risk:
        if level <= allowed and (found := search.best(level)):
            return search.finish(found)
    raise search.nothing_fits(allowed)


class Search:
    """One search: remembers every trace that it made."""

    def __init__(
        self,
        task: Task,
        budget: int,
        rates: Rates,
        workspace: Table | None = None,
        calibrate: Calibrate | None = None,
        progress: Progress = lambda message: None,
    ) -> None:
        self.task, self.budget, self.rates = task, budget, rates
        self.workspace, self.calibrate, self.progress = dict(workspace or {}), calibrate, progress
        self.blank = task.with_(model=blank(task.model))
        self.units = units(task)
        self.profiles: dict[tuple, Profile | None] = {}
        self.bases: dict[tuple, Base | None] = {}
        self.misses: dict[tuple, tuple[float, float]] = {}  # kind of option -> share of the batch, bytes missed
        self.objects: dict[tuple, int] = {}  # kind of option -> bytes around its tensors

    # -- candidates ---------------------------------------------------------------------------------------------
    def options(self, level: Risk) -> list[Option]:
        """Every combination whose largest risk is `level`."""
        choices = [self._values(technique, level) for technique in REGISTRY]
        combinations = []
        for values in itertools.product(*choices):
            chosen = [(name, value, risk) for name, value, risk in values if value is not None]
            risk = max((risk for *_, risk in chosen), default=Risk.EXACT)
            option = Option(tuple((name, value) for name, value, _ in chosen), risk)
            if risk == level and self._suits(option):
                combinations.append(option)
        return combinations

    def _values(self, technique: Technique, level: Risk) -> list[tuple[str, Any, Risk]]:
        try:
            values = technique.options(self.task)
        except ShoestringError:  # who applies it by hand is told why
            values = []
        offered = [(technique.name, value, technique.risk(self.task, value)) for value in values]
        return [(technique.name, None, Risk.EXACT), *(offer for offer in offered if offer[2] <= level)]

    def _suits(self, option: Option) -> bool:
        """False where gradients cannot be used up as they are made, which a trace would only find out later."""
        settings = dict(option.settings)
        if USING_UP not in str(settings.get("optimizer")):
            return True
        return settings.get("precision") != "fp16" and ("microbatch" not in settings or self._gathers)

    @cached_property
    def _gathers(self) -> bool:
        return lean_update(self.task).gathers

    # -- the choice ---------------------------------------------------------------------------------------------
    def best(self, level: Risk) -> Option | None:
        """The fastest combination of this risk that fits; combinations are tried from the fastest on.

        Where plain training fits, it is left as it is.
        """
        if level == Risk.EXACT and self.fits(Option((), level)):
            return Option((), level)
        small = [option for option in self.options(level) if self._least(option) <= self.budget]
        for _, group in itertools.groupby(sorted(small, key=self.degree), key=self.degree):
            timed = [(seconds, len(option.settings), number, option) for number, option in enumerate(group)
                     if (seconds := self.seconds(option)) is not None]  # fmt: skip
            for *_, option in sorted(timed, key=lambda row: row[:3]):
                if self.could_fit(option) and self.fits(option):
                    return option
        return None

    def degree(self, option: Option) -> int:
        """How approximate an option is, within its risk."""
        settings = dict(option.settings)
        sparser = SPARSER.get(settings["nonzero"], 4) if "nonzero" in settings else 0
        size = settings.get("microbatch", self.units)
        few = self._risk("microbatch", size) == Risk.APPROXIMATE
        return sparser + (1 + (size < 4) if few else 0)

    def _least(self, option: Option) -> float:
        """Bytes below which an option cannot be: weights and optimizer state, judged from plain training alone."""
        settings, plain = dict(option.settings), self.base(())
        assert plain is not None
        return (0.45 if "precision" in settings else 1.0) * plain.footprint.peak(settings, 0.0)

    def seconds(self, option: Option) -> float | None:
        """The predicted seconds of a step; None where its precision or checkpointing cannot be applied.

        From the trace of the whole batch: microbatches make more calls, and of sparse layers only the nonzeros are
        computed.
        """
        base, settings = self.base(option.only(*SHARED)), dict(option.settings)
        if base is None:
            return None
        density, lean = settings.get("nonzero", 100) / 100, bool(option.only(*SHARED))
        return seconds_of(base.traced, self.rates, self._pieces(settings), density, lean)

    def _pieces(self, settings: dict[str, Any]) -> int:
        return -(-self.units // settings.get("microbatch", self.units))

    def estimate(self, option: Option) -> tuple[float, bool]:
        """An option -> about its peak in bytes, and whether a trace of its kind has corrected that."""
        base, settings = self.base(option.only(*SHARED)), dict(option.settings)
        assert base is not None, "it has a time, so it has a base"
        share = self._share(settings)
        rough = base.footprint.peak(settings, share)
        if (kind := _kind(option)) not in self.misses:
            return rough, False
        share_then, missed = self.misses[kind]
        return rough + missed * min(1.0, share / share_then), True

    def _share(self, settings: dict[str, Any]) -> float:
        return settings.get("microbatch", self.units) / self.units

    def could_fit(self, option: Option) -> bool:
        """False where the estimate is far over the budget."""
        about, corrected = self.estimate(option)
        base = self.base(option.only(*SHARED))
        objects = self.objects.get(_kind(option), base.objects if base else 0)
        return (about + objects) * (DOUBT_AFTER_TRACE if corrected else DOUBT) <= self.budget

    def fits(self, option: Option) -> bool:
        """Whether the option's traced peak, with the scratch of its operators, is within the budget."""
        traced = self.trace(option.settings)
        while traced is not None and self.has_room(traced) and self._calibrate(traced):
            # One table leads to the next: an output of a size that was not known is another call's argument.
            traced = self.profiles[option.settings] = self._profile(option.settings, brief=True)
        if traced is None:
            return False
        base, settings = self.base(option.only(*SHARED)), dict(option.settings)
        if base is not None:
            share = self._share(settings)
            self.misses[_kind(option)] = share, traced.peak_bytes - base.footprint.peak(settings, share)
            self.objects[_kind(option)] = _object_bytes(traced)
        return self.has_room(traced)

    def has_room(self, traced: Profile) -> bool:
        """Whether a traced step fits, with room for what no trace sees."""
        return traced.peak_bytes + _object_bytes(traced) <= self.budget

    def _calibrate(self, traced: Profile) -> bool:
        """Asks for the scratch of operators that is not known -> whether any of them needs some."""
        unknown = [call for call in traced.signatures if str(call) not in self.workspace]
        if self.calibrate is None or not unknown:
            return False
        found = self.calibrate(unknown)
        self.workspace |= dict.fromkeys(map(str, unknown)) | found
        return any(found.values())

    # -- traces -------------------------------------------------------------------------------------------------
    def trace(self, settings: tuple) -> Profile | None:
        """Settings -> the traced task; None where a technique does not suit this task or the others."""
        if settings not in self.profiles:
            self.progress(str(Option(settings, Risk.EXACT)))
            self.profiles[settings] = self._profile(settings, brief=True)
        return self.profiles[settings]

    def base(self, settings: tuple) -> Base | None:
        """A precision and a checkpoint strategy -> the trace of one step of the whole batch, if they suit."""
        if settings not in self.bases:
            self.progress(f"one step with {Option(settings, Risk.EXACT)}")
            traced = self._profile(settings, steps=1)
            item_bytes = 2 if "precision" in dict(settings) else 4
            made = Base(traced, Footprint(traced, self._sparse, item_bytes), _object_bytes(traced)) if traced else None
            self.bases[settings] = made
        return self.bases[settings]

    @cached_property
    def _sparse(self) -> tuple[str, ...]:
        try:
            return tuple(select(self.blank.model))
        except ShoestringError:
            return ()

    def _profile(self, settings: tuple, **how: Any) -> Profile | None:
        task, wanted = self.blank, dict(settings)
        try:
            for technique in REGISTRY:
                if technique.name in wanted:
                    task = technique.apply(task, technique.settings(wanted[technique.name]))
            return profile(task, self.workspace, **how)
        except ShoestringError:
            if not settings:
                raise
            return None

    # -- answers ------------------------------------------------------------------------------------------------
    def finish(self, option: Option) -> Plan:
        traced, plain = self.trace(option.settings), self._plain()
        assert traced is not None
        return Plan(
            **dict(option.settings),
            task=traced.task,
            budget_bytes=self.budget,
            predicted_peak_bytes=traced.peak_bytes,
            predicted_bytes=traced.bytes_by_category,
            predicted_time_ratio=self._time_ratio(option),
            reasons=tuple(self._reasons(option, plain)),
            alternatives=tuple(self.pareto(option)),
        )

    def _plain(self) -> Profile:
        """Plain training, with the scratch of its operators: what all savings are told against."""
        traced = self.trace(())
        assert traced is not None
        while self._calibrate(traced):
            traced = self.profiles[()] = profile(self.task, self.workspace, brief=True)
        return traced

    def _time_ratio(self, option: Option) -> float:
        return (self.seconds(option) or 0.0) / (self.seconds(Option((), Risk.EXACT)) or 1.0)

    def _reasons(self, option: Option, plain: Profile) -> Iterator[str]:
        yield f"plain training needs {format_bytes(plain.peak_bytes)}, the budget is {format_bytes(self.budget)}"
        if option.risk > Risk.EXACT:
            yield f"no plan of lower risk fits: this one is {option.risk.name.lower()}"
        for name, value in option.settings:
            less = option.without(name)
            if traced := self.profiles.get(less.settings):
                objects = f" and {format_bytes(_object_bytes(traced), 2)} of Python's objects"
                near = traced.peak_bytes <= self.budget < traced.peak_bytes + _object_bytes(traced)
                yield f"{name} {value}: without it {format_bytes(traced.peak_bytes)}{objects if near else ''}"
            elif self.base(less.only(*SHARED)) is not None:
                yield f"{name} {value}: without it about {format_bytes(self.estimate(less)[0], 2)}"
        chosen = {name for name, _ in option.settings}
        yield from (f"{t.name}: {t.warning}" for t in REGISTRY if t.warning and t.name in chosen)

    def pareto(self, chosen: Option) -> list[dict[str, Any]]:
        """Of what was traced: what no other beats in memory, time and risk together, least memory first.

        To what the search traced, a few more of the chosen risk are added: those that the estimates have in front.
        """
        for option in self._worth_tracing(chosen.risk):
            self.trace(option.settings)
        rows = []
        for settings, traced in self.profiles.items():
            if traced is not None:
                option = self._option(settings)
                rows.append((traced.peak_bytes, self._time_ratio(option), option.risk, settings))
        return [
            {"settings": dict(settings), "predicted_peak_bytes": peak, "predicted_time_ratio": ratio,
             "risk": risk.name.lower()}
            for peak, ratio, risk, settings in sorted(_front(rows), key=lambda row: row[:3])
        ]  # fmt: skip

    def _worth_tracing(self, risk: Risk) -> list[Option]:
        """A few options on the front of the estimates, spread over it."""
        rows = [(self.estimate(option)[0], self._time_ratio(option), risk, option) for option in self.options(risk)
                if self.bases.get(option.only(*SHARED))]  # fmt: skip
        front = [option for *_, option in sorted(_front(rows), key=lambda row: row[:2])]
        step = max(1, -(-len(front) // ALTERNATIVES))
        return front[::step]

    def _option(self, settings: tuple) -> Option:
        return Option(settings, max((self._risk(*pair) for pair in settings), default=Risk.EXACT))

    def _risk(self, name: str, value: Any) -> Risk:
        return next(technique for technique in REGISTRY if technique.name == name).risk(self.task, value)

    def nothing_fits(self, allowed: Risk) -> NoPlanFits:
        """The error for a budget that no plan fits, after a trace of what needs least by the estimates."""
        options = [o for level in Risk if level <= allowed for o in self.options(level)]
        precision = min(options, key=self._least).only("precision")
        alike = [o for o in options if o.only("precision") == precision and self.base(o.only(*SHARED))]
        for option in sorted(alike, key=lambda o: self.estimate(o)[0])[:ALTERNATIVES]:
            self.fits(option)
        known = [(p.peak_bytes + _object_bytes(p), s, p) for s, p in self.profiles.items() if p is not None]
        _, settings, traced = min(known, key=lambda row: row[0])
        parts = sorted(traced.bytes_by_category.items(), key=lambda part: -part[1])[:3]
        fills = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in parts)
        more = "a smaller batch or model" if allowed == Risk.APPROXIMATE else f"--risk {Risk(allowed + 1).name.lower()}"
        tensors, objects = format_bytes(traced.peak_bytes), format_bytes(_object_bytes(traced))
        return NoPlanFits(
            f"no plan fits {format_bytes(self.budget)}: the smallest peak found is {tensors} and {objects} of Python's "
            f"objects ({self._option(settings)}), filled by {fills}; try {more} or a larger budget"
        )


def _object_bytes(traced: Profile) -> int:
    return OBJECT_BYTES * len(traced.ledger.live_at(traced.ledger.peak().time))


def _kind(option: Option) -> tuple:
    """Options whose estimates are off in the same way."""
    settings = dict(option.settings)
    sparse, using_up = "nonzero" in settings, USING_UP in str(settings.get("optimizer"))
    return *option.only(*SHARED), sparse, using_up


def _front(rows: list[tuple]) -> list[tuple]:
    """Rows that begin with bytes, time and risk -> those that no other beats in all three."""
    return [row for row in rows if not any(_beats(other, row) for other in rows)]


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
