"""Explains a search: the reasons for a plan, its alternatives, what was left out, and why nothing fits."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ..errors import NoPlanFits
from ..profiling import Profile
from ..techniques.registry import REGISTRY
from ..techniques.technique import Risk
from ..units import format_bytes
from .options import LeftOut, Option, Settings, words_for
from .plan import Plan
from .traces import object_bytes

if TYPE_CHECKING:
    from .search import Search

ALTERNATIVES = 3  # estimated plans, shown beside the traced ones


def plan_of(search: "Search", option: Option) -> Plan:
    """An option that fits -> the plan, with its predictions, reasons and alternatives."""
    traced, plain = search.traces.of(option.settings), search.traces.plain()
    assert traced is not None
    return Plan(
        **dict(option.settings),
        task=traced.task,
        budget_bytes=search.budget,
        predicted_peak_bytes=traced.peak_bytes,
        predicted_bytes=traced.bytes_by_category,
        predicted_time_ratio=search.time_ratio(option),
        reasons=tuple(_reasons(search, option, plain)),
        alternatives=tuple(alternatives(search, option)),
        left_out=tuple(grouped(search.left_out)),
    )


def _reasons(search: "Search", option: Option, plain: Profile) -> Iterator[str]:
    yield f"plain training needs {format_bytes(plain.peak_bytes)}, the budget is {format_bytes(search.budget)}"
    if option.risk > Risk.EXACT:
        yield f"no plan of lower risk fits: this one is {option.risk.name.lower()}"
    for name, value in option.settings:
        less = option.without(name)
        if traced := search.traces.profiles.get(less.settings):
            objects = f" and {format_bytes(object_bytes(traced), 2)} of Python's objects"
            near = traced.peak_bytes <= search.budget < traced.peak_bytes + object_bytes(traced)
            yield f"{name} {value}: without it {format_bytes(traced.peak_bytes)}{objects if near else ''}"
        elif not search.traces.known_base(less.settings) and (least := search.lower_bound(less)) > search.budget:
            yield f"{name} {value}: without it at least {format_bytes(least, 2)}"
        elif search.traces.base(search.traces.key(less.settings)) is not None:
            yield f"{name} {value}: without it about {format_bytes(search.estimate(less)[0], 2)}"
    yield from _warnings(search, option.settings)
    if option.settings and search.not_rehearsed and search.wants_rehearsal:
        yield f"not rehearsed: {search.not_rehearsed}"


def _warnings(search: "Search", settings: Settings) -> list[str]:
    told = ((name, REGISTRY[name].warning(search.task, value)) for name, value in settings)
    return [f"{name}: {words}" for name, words in told if words]


# -- what else there is -------------------------------------------------------------------------------------------
def alternatives(search: "Search", chosen: Option) -> list[dict[str, Any]]:
    """The Pareto-optimal options in memory, time and risk, least memory first: of those that were traced, and a few
    more of the chosen risk, which are marked `estimated`."""
    rows = [
        (traced.peak_bytes, search.time_ratio(option), option.risk, False, settings)
        for settings, traced in search.traces.profiles.items()
        if traced is not None and (option := search.candidates.option(settings))
    ]
    front = _front([*rows, *_estimated(search, chosen.risk)])
    return [
        {"settings": dict(settings), "predicted_peak_bytes": peak, "predicted_time_ratio": ratio,
         "risk": risk.name.lower(), "estimated": estimated}
        for peak, ratio, risk, estimated, settings in sorted(front, key=lambda row: row[:4])
    ]  # fmt: skip


def _estimated(search: "Search", risk: Risk) -> list[tuple]:
    """A few options, spread over the Pareto front of the estimates."""
    known = [option for option in search.candidates.at(risk) if option.settings not in search.traces.profiles
             and search.traces.known_base(option.settings)]  # fmt: skip
    rows = [(round(search.estimate(option)[0]), search.time_ratio(option), risk, True, option.settings)
            for option in known]  # fmt: skip
    front = sorted(_front(rows), key=lambda row: row[:2])
    return front[:: max(1, -(-len(front) // ALTERNATIVES))]


def _front(rows: list[tuple]) -> list[tuple]:
    """Rows that begin with bytes, time and risk -> the Pareto-optimal ones."""
    kept: list[tuple] = []
    for row in sorted(rows, key=lambda row: row[:3]):  # a row that dominates another comes first
        if not any(_dominates(other, row) for other in kept):
            kept.append(row)
    return kept


def _dominates(other: tuple, row: tuple) -> bool:
    return all(a <= b for a, b in zip(other[:3], row[:3], strict=True)) and other[:3] != row[:3]


# -- what was left out --------------------------------------------------------------------------------------------
def grouped(left_out: Iterable[LeftOut]) -> list[dict[str, Any]]:
    """Options that were left out -> one row per reason."""
    rows: dict[str, dict[str, Any]] = {}
    for one in left_out:
        row = rows.setdefault(one.reason, {"options": [], "reason": one.reason, "kind": one.kind})
        row["options"].append(str(one))
    return list(rows.values())


def warnings_of(left_out: Iterable[LeftOut]) -> list[str]:
    """One line per error that is not a refusal of ours: it may be a bug."""
    rows = [row for row in grouped(left_out) if row["kind"] == "error"]
    return [f"{'; '.join(row['options'])}: left out of the search, for it raised {row['reason']}" for row in rows]


# -- nothing fits -------------------------------------------------------------------------------------------------
def nothing_fits(search: "Search", allowed: Risk) -> NoPlanFits:
    """The error for a budget that no plan fits: the smallest plan, its largest parts, and what would help."""
    settings = search.smallest(allowed)
    traced = search.traces.of(settings)
    assert traced is not None
    parts = sorted(traced.bytes_by_category.items(), key=lambda part: -part[1])[:3]
    fills = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in parts)
    tensors, objects = format_bytes(traced.peak_bytes), format_bytes(object_bytes(traced))
    more = _more_risk(search, allowed) or "try a smaller batch or model, or a larger budget"
    words = [
        f"no plan of risk {allowed.name.lower()} fits {format_bytes(search.budget)}: the smallest peak is {tensors} "
        f"and {objects} of Python's objects ({words_for(settings)}), filled by {fills}",
        *_missing(search),
        more,
    ]
    return NoPlanFits("; ".join(words))


def _missing(search: "Search") -> Iterator[str]:
    """Options that were left out and might have helped: not those without effect, or without effect beside another."""
    alone = [one for one in search.left_out if one.kind in ("refused", "error") and len(one.settings) == 1]
    yield from (f"left out: {', '.join(row['options'])}, for {row['reason']}" for row in grouped(alone))


def _more_risk(search: "Search", allowed: Risk) -> str:
    """The plan that a higher risk would allow, and its cost, if there is one."""
    for level in Risk:
        if level > allowed and (option := search.best(level)):
            traced = search.traces.of(option.settings)
            assert traced is not None
            costs = "".join(f" ({warning})" for warning in _warnings(search, option.settings))
            return (
                f"risk {level.name.lower()} would fit: {option}, {format_bytes(traced.peak_bytes)}, "
                f"{search.time_ratio(option):.2f}x the time{costs}: add --risk {level.name.lower()}"
            )
    if allowed < max(Risk):
        return "no higher risk would fit either: try a smaller batch or model, or a larger budget"
    return ""
