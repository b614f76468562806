"""A plan in words: what it does, why, what it is predicted to cost, and what else there is."""

import shlex

from rich.console import Console
from rich.table import Table

from ..planning.plan import Plan
from ..techniques.words import described, in_words
from ..units import format_bytes


def show_plan(console: Console, plan: Plan, explain: bool = False) -> None:
    """Prints a plan that the planner made; with `explain`, also what was left out and why."""
    flags = " ".join(f"--{name} {shlex.quote(in_words(value))}" for name, value in plan.techniques().items())
    peak, budget = plan.predicted_peak_bytes or 0, plan.budget_bytes or 0
    console.print(f"{plan.task}: {flags or 'no technique is needed'}", highlight=False)
    console.print(
        f"  predicted peak {format_bytes(peak)} of {format_bytes(budget)}, "
        f"time {plan.predicted_time_ratio or 1:.2f}x plain training",
        highlight=False,
    )
    for reason in plan.reasons:
        console.print(f"  - {reason}", highlight=False)
    if plan.alternatives:
        console.print(_alternatives(plan))
    for line in left_out(plan) if explain else ():
        console.print(line, highlight=False, markup=False)


def _alternatives(plan: Plan) -> Table:
    table = Table(title="Pareto-optimal plans", title_justify="left", box=None, pad_edge=False)
    for name, justify in (("peak", "right"), ("time", "right"), ("risk", "left"), ("settings", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for row in plan.alternatives:
        words = described(row["settings"].items()) or "none"
        ratio = f"{row['predicted_time_ratio']:.2f}x"
        about = "~" if row.get("estimated") else ""
        table.add_row(f"{about}{format_bytes(row['predicted_peak_bytes'])}", ratio, row["risk"], words)
    return table


def left_out(plan: Plan) -> list[str]:
    """What the planner left out and why, one line per reason."""
    if not plan.left_out:
        return ["nothing was left out"]
    return ["left out:", *(f"  - {'; '.join(row['options'])}: {row['reason']}" for row in plan.left_out)]
