"""The search: a budget in bytes -> the cheapest plan that fits it.

Exact plans come first, then neutral ones, then approximate ones, up to the risk that the user allows, and within a risk
the mildest first. Among equals the least predicted time wins. This order does not depend on the budget, so a lower
budget never gets a higher peak. Whether a plan fits is decided by tracing the task after `apply`, with the scratch that
its operators need on this machine; an estimate (estimate.py) only skips what is far from fitting, and is corrected by
each trace. An option's time is bounded from below before it is traced (`Search.time_bound`): most are never traced.
"""

import heapq
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from math import inf, prod
from typing import Any

from ..errors import NoPlanFits, OverBudget, ShoestringError
from ..profiling import Profile
from ..rates import NOMINAL, Rates
from ..task import Task
from ..techniques.plain import check_plain
from ..techniques.registry import REGISTRY, sized
from ..techniques.technique import Effect, Risk
from ..units import format_bytes, parse_bytes, share_of
from . import explain
from .options import PLAIN, Candidates, LeftOut, Option, Settings, scalar, settings_of, words_for
from .plan import Plan
from .rehearsal import rehearse, why_not_rehearsed
from .timing import seconds_of, sent_bytes
from .traces import TRACED, BaseTrace, Calibrate, Progress, Table, Traces

UNLIMITED = 2**60
DOUBT, DOUBT_AFTER_TRACE = 0.95, 0.97  # the share of an estimate that a plan surely needs


def plan(
    task: Task,
    budget: str | int | None,
    risk: str = "neutral",
    rates: Rates = NOMINAL,
    workspace: Table | None = None,
    calibrate: Calibrate | None = None,
    progress: Progress = lambda message: None,
    rehearse: bool = False,
    warn: Callable[[str], None] = warnings.warn,
    **techniques: Any,
) -> Plan:
    """A task and a budget -> the fastest plan, by prediction, of the lowest risk that fits it.

    `rates` are those of the device (`measuring.rates`), `workspace` is the known scratch of operators, as for
    `profile`; `calibrate` measures the unknown scratch of a plan that would fit. Without both, scratch inside PyTorch's
    operators is not counted. With `rehearse`, one microbatch runs forward and backward under a plan, on a copy of the
    model, before the plan is returned; a plan that fails is left out. `warn` is called for options that were left out
    because of an error that is not a refusal of Shoestring's.
    A budget may be a share of what plain training needs ("50%"); without one (None), the fastest plan is returned, with
    the trade-offs that were found and the least budget that works.
    With `techniques`, in a plan's words, these are the plan and nothing is searched; a value that asks for a budget
    (`activations="adaptive"`) is made for this one.
    """
    share, allowed = share_of(budget), Risk.named(risk)
    limit = UNLIMITED if budget is None or share is not None else parse_bytes(budget)
    check_plain(task)
    search = Search(task, limit, rates, workspace, calibrate, progress, rehearse, allowed)
    try:
        if budget is None:
            return explain.tradeoffs_of(search, allowed)
        if share is not None:
            search.budget = round(share * search.traces.plain().needed_bytes)
        if techniques:
            return search.finish(search.named(techniques))
        for level in Risk:
            if level <= allowed and (found := search.best(level)):
                return search.finish(found)
        raise search.nothing_fits(allowed)
    finally:
        for line in explain.warnings_of(search.left_out):
            warn(line)


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
        rehearse: bool = False,
        allowed: Risk = Risk.NEUTRAL,
    ) -> None:
        self.task, self.budget, self.rates, self.progress = task, budget, rates, progress
        self.allowed = allowed
        self.candidates = Candidates(task)
        self.traces = Traces(task, self.candidates, dict(workspace or {}), calibrate, progress)
        self.wants_rehearsal, self.not_rehearsed = rehearse, why_not_rehearsed(task) if rehearse else ""
        self._rehearsed: dict[Settings, bool] = {(): True}  # plain training needs none
        self._lower_bounds: dict[Settings, tuple[float, float, float]] = {}
        self._effects: dict[tuple, Effect | None] = {}
        self._misses: dict[tuple, tuple[float, float, int]] = {}  # correction key -> share, bytes missed, objects

    @property
    def left_out(self) -> list[LeftOut]:
        return list(self.candidates.left_out.values())

    # -- the choice ---------------------------------------------------------------------------------------------
    def best(self, level: Risk) -> Option | None:
        """The fastest combination of this risk that fits, among the least rough; plain training is one of the exact."""
        roughness = self.candidates.roughness
        small = [option for option in self.candidates.at(level) if self.lower_bound(option) <= self.budget]
        for _, group in itertools.groupby(sorted(small, key=roughness), key=roughness):
            for option in self._from_the_fastest(list(group)):
                if self.could_fit(option) and self.fits(option):
                    return option
        return None

    def named(self, techniques: Mapping[str, Any]) -> Option:
        """The option that a user named, made for the budget where it asks for one; refused if it does not fit."""

        def fits(values: Mapping[str, Any]) -> bool:
            return self.fits(self.candidates.option(settings_of(values)))

        task = self.traces.task(())
        assert task is not None
        option = self.candidates.option(settings_of(sized(task, Plan(**techniques).techniques(), fits)))
        traced = self.peak(option)
        if traced is None:
            reasons = [str(one.reason) for one in self.left_out]
            raise ShoestringError(f"{option} cannot be applied: {reasons[-1] if reasons else 'it failed'}")
        if not self.has_room(traced):
            raise OverBudget(
                f"with {option} a step would need {format_bytes(traced.needed_bytes)}, predicted, objects included, "
                f"and the budget is {format_bytes(self.budget)}: name further techniques, or "
                "name none to have them chosen"
            )
        return option

    def _from_the_fastest(self, options: list[Option]) -> Iterator[Option]:
        """Options by predicted time; one whose time is only bounded is traced once its bound is the lowest."""
        heap = [(self.time_bound(option), len(option.settings), n, option) for n, option in enumerate(options)]
        heapq.heapify(heap)
        while heap:
            bound, length, number, option = heapq.heappop(heap)
            key = self.traces.key(option.settings)
            if self.traces.has_base(key) and self.traces.base(key) is None:
                continue
            if bound == self.time_bound(option):  # no trace since has raised it
                if self.traces.has_base(key):
                    yield option
                    continue
                instead = self._instead(key)[0]
                self.traces.base(key if self.traces.has_base(instead) else instead)
            heapq.heappush(heap, (self.time_bound(option), length, number, option))

    def time_bound(self, option: Option) -> float:
        """The predicted seconds of a step; a lower bound if the option has no base trace yet.

        A strategy is slower than a milder one, the more so the more bytes it must save over it to fit the budget: each
        byte is recomputed, or goes to disk, in every microbatch.
        """
        key = self.traces.key(option.settings)
        if self.traces.has_base(key):
            return self.seconds(option) or 0.0
        instead, medium = self._instead(key)
        if instead == key or not self.traces.has_base(instead) or self.traces.base(instead) is None:
            return 0.0
        milder = Option(_replaced(option.settings, instead), option.risk)
        excess = max(0.0, DOUBT * self.estimate(milder)[0] - self.budget)
        price = self._pieces(milder) * excess * self.rates.seconds_per_byte(medium)
        return (self.seconds(milder) or 0.0) + price

    def _instead(self, key: Settings) -> tuple[Settings, str]:
        """Settings that need a trace -> milder ones that are surely faster, and the cheapest medium of saved bytes."""
        milder, media = [], list[str]()
        for name, value in key:
            price = self.candidates.bounds(name, value).price
            if price:
                media.append(price.medium)
            kept = price.instead if price else value
            if kept is not None:
                milder.append((name, kept))
        return tuple(milder), min(media, key=self.rates.seconds_per_byte, default="memory")

    def lower_bound(self, option: Option) -> float:
        """A lower bound of an option's bytes, from the trace of plain training alone."""
        bounds = [self.candidates.bounds(*pair) for pair in option.settings if pair[0] in TRACED]
        known = tuple(pair for pair in option.settings if pair[0] not in TRACED)
        if known not in self._lower_bounds:
            effects, plain = self.effects(option, ()), self._base(PLAIN).footprint
            known_all = len(effects) == len(known)  # else one failed, and is left out
            found = plain.fixed(effects), plain.gradients(effects), _share(effects) * plain.moving
            self._lower_bounds[known] = found if known_all else (inf, inf, inf)
        fixed, gradients, moving = self._lower_bounds[known]
        share = prod(one.lasting for one in bounds)
        # All gradients are there before an update, and whatever grows with the batch before them.
        return share * fixed + DOUBT * max(share * gradients, moving * prod(one.moving for one in bounds))

    def seconds(self, option: Option) -> float | None:
        """The predicted seconds of a step; None if its techniques cannot be applied.

        From the trace of the whole batch: microbatches make more calls, and sparse layers compute their nonzeros only.
        """
        key = self.traces.key(option.settings)
        base = self.traces.base(key)
        if base is None:
            return None
        effects = self.effects(option, key)
        density = min(effect.flops for effect in (*effects, Effect()))
        pieces = self._pieces(option)
        if base.task.sharded:
            sent: float = pieces * base.work.sent_bytes
        else:
            sent = sent_bytes(base.footprint.gradients(effects), self.task.devices)
        work = base.work._replace(static=base.work.static and all(effect.static for effect in effects))
        return seconds_of(work, self.rates, pieces, density, bool(key), sent)

    def effects(self, option: Option, key: Settings) -> list[Effect]:
        """The effects of an option's techniques that need no trace, on the base trace of `key`."""
        found = (self._effect(key, *pair) for pair in option.settings if pair[0] not in TRACED)
        return [effect for effect in found if effect is not None]

    def _effect(self, key: Settings, name: str, value: object) -> Effect | None:
        if (key, name, value) not in self._effects:
            base, effect = self.traces.base(key), REGISTRY[name].effect
            assert base is not None and effect is not None
            found = self.candidates.guarded(((name, value),), lambda: effect(base.task, scalar(value)))
            self._effects[key, name, value] = found
        return self._effects[key, name, value]

    def _pieces(self, option: Option) -> int:
        return max((effect.pieces for effect in self.effects(option, ())), default=1)

    def _base(self, option: Option) -> BaseTrace:
        base = self.traces.base(self.traces.key(option.settings))
        assert base is not None, "it has a time, so it has a base"
        return base

    # -- whether it fits ----------------------------------------------------------------------------------------
    def estimate(self, option: Option) -> tuple[float, bool]:
        """An option -> its estimated peak in bytes, and whether a similar option's trace has corrected it."""
        effects = self.effects(option, self.traces.key(option.settings))
        rough = self._base(option).footprint.peak(effects)
        if (key := self._correction_key(option)) not in self._misses:
            return rough, False
        share_then, missed, _ = self._misses[key]
        return rough + missed * min(1.0, _share(effects) / share_then), True

    def _correction_key(self, option: Option) -> tuple:
        """Options with the same key have similar errors in their estimates."""
        key = self.traces.key(option.settings)
        effects = self.effects(option, key)
        return key, any(effect.layers for effect in effects), any(effect.gradients == 0 for effect in effects)

    def surely(self, option: Option) -> float:
        """Bytes that an option needs for sure, by its estimate, including the objects around its tensors."""
        about, corrected = self.estimate(option)
        return (about + self.objects(option)) * (DOUBT_AFTER_TRACE if corrected else DOUBT)

    def objects(self, option: Option) -> int:
        """Bytes of the objects around an option's tensors, by the trace of a similar one."""
        *_, objects = self._misses.get(self._correction_key(option), (self._base(option).objects,))
        return objects

    def could_fit(self, option: Option) -> bool:
        """False if the estimate is far over the budget."""
        return self.surely(option) <= self.budget

    def fits(self, option: Option) -> bool:
        """Whether the option's traced peak, with the scratch of its operators, fits the budget, and it runs."""
        traced = self.peak(option)
        return traced is not None and self.has_room(traced) and self._runs(option)

    def peak(self, option: Option) -> Profile | None:
        """The trace of an option, with the scratch of its operators if it fits without; it corrects the estimates."""
        settings = option.settings
        traced = self.traces.of(settings)
        while traced is not None and self.has_room(traced) and self.traces.calibrated(traced):
            # A calibration may need another: an output whose size was unknown is an argument of the next call.
            traced = self.traces.again(settings)
        if traced is not None and self.traces.base(self.traces.key(settings)) is not None:
            effects = self.effects(option, self.traces.key(settings))
            missed = traced.peak_bytes - self._base(option).footprint.peak(effects)
            self._misses[self._correction_key(option)] = _share(effects), missed, traced.object_bytes
        return traced

    def has_room(self, traced: Profile) -> bool:
        """Whether a traced step fits, with room for objects that no trace sees."""
        return traced.needed_bytes <= self.budget

    def _runs(self, option: Option) -> bool:
        """Whether the option survives its rehearsal; True if there is none."""
        if not self.wants_rehearsal or self.not_rehearsed or self._rehearsed_well(option.settings):
            return True
        for pair in option.settings if len(option.settings) > 1 else ():
            self._rehearsed_well((pair,))  # if it fails alone, no combination with it is tried
        return False

    def _rehearsed_well(self, settings: Settings) -> bool:
        if settings not in self._rehearsed:
            self.progress(f"a rehearsal of {words_for(settings)}")
            self._rehearsed[settings] = True
            try:
                rehearse(self.task, settings)
            except Exception as error:  # anything that a trace does not see
                self._rehearsed[settings] = False
                self.traces.drop(settings, error)
        return self._rehearsed[settings]

    # -- answers ------------------------------------------------------------------------------------------------
    def finish(self, option: Option) -> Plan:
        return explain.plan_of(self, option)

    def nothing_fits(self, allowed: Risk) -> NoPlanFits:
        return explain.nothing_fits(self, allowed)

    def time_ratio(self, option: Option) -> float:
        return (self.seconds(option) or 0.0) / (self.seconds(PLAIN) or 1.0)

    def smallest(self, allowed: Risk) -> Settings:
        """The allowed settings with the smallest traced peak; of equals, the fastest.

        Options are traced by their estimates, the smallest first, until no other could need less than the best found.
        """
        options = [option for level in Risk if level <= allowed for option in self.candidates.at(level)]
        option_of = self.candidates.option
        self.traces.of(())
        traced = {s: p.needed_bytes for s, p in self.traces.profiles.items()
                  if p is not None and option_of(s).risk <= allowed}  # fmt: skip
        heap = [(self.lower_bound(option), number, option) for number, option in enumerate(options)]
        heapq.heapify(heap)
        while True:
            smallest = min(traced, key=lambda settings: (traced[settings], self.time_ratio(option_of(settings))))
            if heap and heap[0][0] < traced[smallest]:
                self._look_for_less(heap, traced)
            elif (found := self.traces.of(smallest)) is not None and self.traces.calibrated(found):
                if (found := self.traces.again(smallest)) is not None:
                    traced[smallest] = found.needed_bytes
            else:
                return smallest

    def _look_for_less(self, heap: list, traced: dict[Settings, int]) -> None:
        """Takes the option with the lowest bound and gives it a tighter bound, or its trace."""
        _, number, option = heapq.heappop(heap)
        if option.settings in traced or self.traces.base(self.traces.key(option.settings)) is None:
            return
        bound = self.surely(option)
        if heap and bound > heap[0][0]:
            heapq.heappush(heap, (bound, number, option))
        elif (found := self.peak(option)) is not None:
            traced[option.settings] = found.needed_bytes


def _share(effects: list[Effect]) -> float:
    return min((effect.share for effect in effects), default=1.0)


def _replaced(settings: Settings, milder: Settings) -> Settings:
    """Replaces the settings that need a trace by milder ones."""
    values = {name: value for name, value in settings if name not in TRACED} | dict(milder)
    return tuple((name, values[name]) for name in REGISTRY if name in values)
