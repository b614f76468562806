"""A plan in words: what it does, why, what it is predicted to cost, and what else there is."""

import shlex

from rich.console import Console
from rich.table import Table

from ..planning.plan import Plan
from ..units import format_bytes


def show_plan(console: Console, plan: Plan) -> None:
    """Prints a plan that the planner made."""
    flags = " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in plan.techniques().items())
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


def _alternatives(plan: Plan) -> Table:
    table = Table(title="what no other plan beats", title_justify="left", box=None, pad_edge=False)
    for name, justify in (("peak", "right"), ("time", "right"), ("risk", "left"), ("settings", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for row in plan.alternatives:
        words = ", ".join(f"{name} {value}" for name, value in row["settings"].items()) or "none"
        ratio = f"{row['predicted_time_ratio']:.2f}x"
        table.add_row(format_bytes(row["predicted_peak_bytes"]), ratio, row["risk"], words)
    return table
