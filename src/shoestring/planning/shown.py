"""A plan as text, for a terminal, a file or print(), and as HTML for notebooks."""

import html
import shlex
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..techniques.words import described, in_words
from ..units import format_bytes

if TYPE_CHECKING:
    from .plan import Alternative, Plan

TITLE = "Trade-offs found (memory against time); * = chosen, ~ = estimated"
HEADERS = ("needs", "time", "risk", "techniques")


def needed_bytes(plan: "Plan") -> int:
    """What a plan was chosen by: the predicted tensors and the Python objects around them."""
    return (plan.predicted_peak_bytes or 0) + (plan.object_bytes or 0)


def plan_lines(plan: "Plan", width: int | None = None) -> Iterator[str]:
    """The plan, its cost, its reasons and the other plans, line by line; with a width, long lines are wrapped."""
    yield from _wrapped(f"{plan.task or 'plan'}: {flags(plan) or 'no technique is needed'}", width, 2)
    if plan.predicted_peak_bytes is not None:
        yield from _wrapped(f"  {cost(plan)}", width, 2)
    for reason in plan.reasons:
        yield from _wrapped(f"  - {reason}", width, 4)
    if plan.alternatives:
        yield TITLE
        yield from _table(plan, width)


def flags(plan: "Plan") -> str:
    """A plan's techniques as options of the command line."""
    return " ".join(f"--{name} {shlex.quote(in_words(value))}" for name, value in plan.techniques().items())


def cost(plan: "Plan") -> str:
    """Predicted memory and time, in words."""
    tensors = f"predicted {format_bytes(plan.predicted_peak_bytes or 0)} of tensors"
    if plan.object_bytes is not None:
        objects = f" + {format_bytes(plan.object_bytes, 2)} of Python objects"
        tensors += f"{objects} = {format_bytes(needed_bytes(plan))}"
    budget = f" of {format_bytes(plan.budget_bytes)}" if plan.budget_bytes else ""
    time = f", {plan.predicted_time_ratio:.2f}x the time of plain training" if plan.predicted_time_ratio else ""
    return tensors + budget + time


def cells(row: "Alternative") -> tuple[str, str, str, str]:
    """An alternative -> what the table says of it."""
    mark = "*" if row.get("chosen") else "~" if row.get("estimated") else ""
    needs = format_bytes(row["predicted_peak_bytes"] + row.get("object_bytes", 0))
    words = described(row["settings"].items()) or "none"
    return f"{mark}{needs}", f"{row['predicted_time_ratio']:.2f}x", row["risk"], words


def _table(plan: "Plan", width: int | None) -> Iterator[str]:
    rows = [HEADERS, *map(cells, plan.alternatives)]
    wide = [max(len(row[place]) for row in rows) for place in range(3)]
    start = sum(wide) + 6
    for needs, time, risk, words in rows:
        line = f"{needs:>{wide[0]}}  {time:>{wide[1]}}  {risk:<{wide[2]}}  {words}"
        yield from _wrapped(line, width, start)


def _wrapped(line: str, width: int | None, indent: int) -> list[str]:
    if width is None or len(line) <= width:
        return [line.rstrip()]
    return textwrap.wrap(line, max(width, indent + 20), subsequent_indent=" " * indent, break_on_hyphens=False,
                         break_long_words=False, drop_whitespace=True)  # fmt: skip


def plan_html(plan: "Plan") -> str:
    """The same for a notebook."""
    head = html.escape(f"{plan.task or 'plan'}: {described(plan.techniques().items()) or 'no technique'}")
    parts = [f"<b>{head}</b>"]
    if plan.predicted_peak_bytes is not None:
        parts.append(f"<div>{html.escape(cost(plan))}</div>")
    parts += [f"<div>- {html.escape(reason)}</div>" for reason in plan.reasons]
    if plan.alternatives:
        rows = "".join(_html_row(cells(row), "td", bool(row.get("chosen"))) for row in plan.alternatives)
        parts.append(f"<table><caption>{TITLE}</caption>{_html_row(HEADERS, 'th', False)}{rows}</table>")
    return "".join(parts)


def _html_row(texts: tuple[str, ...], tag: str, bold: bool) -> str:
    cells = "".join(f"<{tag} style='text-align:left'>{html.escape(text)}</{tag}>" for text in texts)
    return f"<tr{' style=font-weight:bold' if bold else ''}>{cells}</tr>"
