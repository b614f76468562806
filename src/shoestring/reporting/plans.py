"""A plan in words: what it does, why, what it is predicted to cost, and what else there is."""

from rich.console import Console

from ..planning.plan import Plan
from ..planning.shown import plan_lines


def show_plan(console: Console, plan: Plan, explain: bool = False) -> None:
    """Prints a plan that the planner made; with `explain`, also what was left out and why."""
    width = console.width if console.is_terminal else None  # what is piped is not wrapped
    for line in plan_lines(plan, width):
        console.print(line, soft_wrap=True)
    for line in left_out(plan) if explain else ():
        console.print(line, soft_wrap=True)


def left_out(plan: Plan) -> list[str]:
    """What the planner left out and why, one line per reason."""
    if not plan.left_out:
        return ["nothing was left out"]
    return ["left out:", *(f"  - {'; '.join(row['options'])}: {row['reason']}" for row in plan.left_out)]
