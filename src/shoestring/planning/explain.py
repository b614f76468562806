"""Explains a search: the reasons for a plan, its alternatives, what was left out, and why nothing fits."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from ..errors import NoPlanFits
from ..profiling import Profile
from ..techniques.registry import REGISTRY
from ..techniques.technique import ADDS, MEANING, Risk
from ..techniques.words import in_words
from ..units import format_bytes
from .options import PLAIN, LeftOut, Option, Settings, scalar, words_for
from .plan import Alternative, LeftOutRow, Plan

if TYPE_CHECKING:
    from .search import Search

ALTERNATIVES = 3  # estimated plans of a risk, shown beside the traced ones


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
        object_bytes=traced.object_bytes,
        reasons=tuple(_reasons(search, option, plain)),
        alternatives=tuple(alternatives(search, option, (option.risk,))),
        left_out=tuple(grouped(search.left_out)),
    )


def tradeoffs_of(search: "Search", allowed: Risk) -> Plan:
    """A search without a budget -> the fastest plan of the lowest risk, the trade-offs up to the risk that is allowed,
    and the least budget that works."""
    smallest = search.candidates.option(search.smallest(allowed))
    fastest = search.best(Risk.EXACT) or PLAIN
    traced = search.traces.settled(smallest.settings)
    assert traced is not None, "it was the smallest of those that were traced"
    least = traced.needed_bytes
    plan = plan_of(search, fastest)
    words = f"the least budget that works at risk {allowed.name.lower()} is {budget_words(least)} ({smallest})"
    levels = tuple(level for level in Risk if level <= allowed)
    return plan.with_(
        budget_bytes=None,
        least_budget_bytes=least,
        reasons=(*(reason for reason in plan.reasons if "budget is" not in reason), words),
        alternatives=tuple(alternatives(search, fastest, levels)),
    )


def budget_words(size: int) -> str:
    """Bytes -> the budget of three digits that they fit into, as the command line takes it."""
    unit = 10 ** max(0, len(str(size)) - 3)
    return format_bytes(-(-size // unit) * unit, 3).replace(" ", "")


def _reasons(search: "Search", option: Option, plain: Profile) -> Iterator[str]:
    yield f"plain training needs {format_bytes(plain.needed_bytes)}, the budget is {format_bytes(search.budget)}"
    if option.risk > Risk.EXACT:
        lower = " or ".join(level.name.lower() for level in Risk if level < option.risk)
        yield f"no {lower} plan fits: this one is {option.risk.name.lower()} ({MEANING[option.risk]})"
    elif option.settings and search.has_room(plain):
        yield "plain training fits too, and is predicted to be slower"
    for name, value in option.settings:
        less = option.without(name)
        if traced := search.traces.profiles.get(less.settings):
            over = f" > {format_bytes(search.budget)}"
            if search.has_room(traced):  # then it is there for its time
                ratio = search.time_ratio(less)
                over = f", and {ratio:.2f}x the time" if ratio and ratio > (search.time_ratio(option) or 0) else ""
            objects = (
                f"{format_bytes(traced.peak_bytes)} of tensors + {format_bytes(traced.object_bytes, 2)} of objects"
            )
            yield f"{name} {in_words(value)}: without it {objects} = {format_bytes(traced.needed_bytes)}{over}"
        elif not search.traces.known_base(less.settings) and (least := search.lower_bound(less)) > search.budget:
            yield f"{name} {in_words(value)}: without it at least {format_bytes(least, 2)}"
        elif search.traces.base(search.traces.key(less.settings)) is not None:
            about = search.estimate(less)[0] + search.objects(less)  # objects included, as in every figure
            yield f"{name} {in_words(value)}: without it about {format_bytes(about, 2)}"
    yield from _evidence(search, option.settings)
    if (more := Risk(min(option.risk + 1, max(Risk)))) > option.risk:
        name = more.name.lower()
        if more <= search.allowed:
            yield f"a smaller budget may need a plan of risk {name} ({ADDS[more]})"
        else:
            yield f'less memory, or less time, may need --risk {name}, in Python risk="{name}" ({ADDS[more]})'
    if option.settings and search.not_rehearsed and search.wants_rehearsal:
        yield f"not rehearsed: {search.not_rehearsed}"


def _evidence(search: "Search", settings: Settings) -> list[str]:
    told = ((name, REGISTRY[name].evidence(search.task, scalar(value))) for name, value in settings)
    return [f"{name}: {words}" for name, words in told if words]


# -- what else there is -------------------------------------------------------------------------------------------
def alternatives(search: "Search", chosen: Option, levels: tuple[Risk, ...]) -> list[Alternative]:
    """The Pareto-optimal options in memory, time and risk, least memory first: of those that were traced, with the
    scratch of their operators, and a few more of these risks, which are marked `estimated`; and the chosen one."""
    estimated = [row for level in levels for row in _estimated(search, level)]
    settled: set[Settings] = set()
    while True:
        rows = _traced(search)
        front = _front([*rows, *estimated])
        new = {row.settings for row in front if not row.estimated} - settled
        if not new:
            break
        for settings in new:
            search.traces.settled(settings)
        settled |= new
    shown = {row.settings: row for row in rows if row.settings == chosen.settings} | {
        row.settings: row for row in front
    }
    return [row.to_json(chosen) for row in sorted(shown.values(), key=lambda row: row[:4])]


class Row(NamedTuple):
    """A plan in the table: what it needs, objects included, its predicted time beside plain training, and its risk."""

    needed: int
    ratio: float
    risk: Risk
    estimated: bool
    settings: Settings
    objects: int

    def to_json(self, chosen: Option) -> Alternative:
        return {
            "settings": dict(self.settings),
            "predicted_peak_bytes": self.needed - self.objects,
            "object_bytes": self.objects,
            "predicted_time_ratio": self.ratio,
            "risk": self.risk.name.lower(),
            "estimated": self.estimated,
            "chosen": self.settings == chosen.settings,
        }


def _traced(search: "Search") -> list[Row]:
    found = []
    for settings, traced in search.traces.profiles.items():
        if traced is not None:
            option = search.candidates.option(settings)
            ratio, objects = search.time_ratio(option), traced.object_bytes
            found.append(Row(traced.needed_bytes, ratio, option.risk, False, settings, objects))
    return found


def _estimated(search: "Search", risk: Risk) -> list[Row]:
    """A few options, spread over the Pareto front of the estimates."""
    known = [option for option in search.candidates.at(risk) if option.settings not in search.traces.profiles
             and search.traces.known_base(option.settings)]  # fmt: skip
    rows = []
    for option in known:
        objects = search.objects(option)
        needs = round(search.estimate(option)[0]) + objects
        rows.append(Row(needs, search.time_ratio(option), risk, True, option.settings, objects))
    front = sorted(_front(rows), key=lambda row: row[:2])
    return front[:: max(1, -(-len(front) // ALTERNATIVES))]


def _front(rows: list[Row]) -> list[Row]:
    """Rows that begin with bytes, time and risk -> the Pareto-optimal ones."""
    kept: list[Row] = []
    for row in sorted(rows, key=lambda row: (*row[:3], len(row.settings))):  # a row that dominates another comes first
        if not any(_dominates(other, row) for other in kept):
            kept.append(row)
    return kept


def _dominates(other: Row, row: Row) -> bool:
    """Whether a row that came first is as good in everything; of equals, the one with fewer techniques came first."""
    return all(a <= b for a, b in zip(other[:3], row[:3], strict=True))


# -- what was left out --------------------------------------------------------------------------------------------
def grouped(left_out: Iterable[LeftOut]) -> list[LeftOutRow]:
    """Options that were left out -> one row per reason."""
    rows: dict[str, LeftOutRow] = {}
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
    tensors, objects = format_bytes(traced.peak_bytes), format_bytes(traced.object_bytes, 2)
    more = _more_risk(search, allowed) or "or try a smaller batch or model"
    words = [
        f"no plan of risk {allowed.name.lower()} fits {format_bytes(search.budget)}: the least that works is "
        f"{budget_words(traced.needed_bytes)}, {tensors} of tensors and {objects} of Python objects "
        f"({words_for(settings)}), filled by {fills}",
        *_missing(search),
        f"use --budget {budget_words(traced.needed_bytes)}",
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
            risky = tuple(pair for pair in option.settings if search.candidates.risk(*pair) == level)
            costs = "".join(f" ({words})" for words in _evidence(search, risky))
            return (
                f"risk {level.name.lower()} would fit: {option}, {format_bytes(traced.needed_bytes)}, "
                f"{search.time_ratio(option):.2f}x the time{costs}: add --risk {level.name.lower()}"
            )
    if allowed < max(Risk):
        return "no higher risk would fit either: try a smaller batch or model"
    return ""
