"""The plan that `train` follows: from a file, named, of the resumed run, or made for the budget; and its prediction."""

import argparse
from typing import TYPE_CHECKING, Any

from ..errors import OverBudget, ShoestringError
from ..units import format_bytes, share_of
from .options import techniques_of
from .recorded import plan_of

if TYPE_CHECKING:
    from ..distributed import World
    from ..planning.plan import Plan
    from ..runs.folder import RunFolder
    from ..task import Task
    from ..training.apply import LeanTask
    from ..training.job import Job


def plan_for(args: argparse.Namespace, job: "Job", folder: "RunFolder") -> "Plan":
    """The plan: from a file, from the techniques named, from the resumed run, or made for the budget."""
    from ..planning.plan import Plan
    from ..techniques.registry import is_open
    from .job import read_plan
    from .plan import make_plan

    techniques = techniques_of(args)
    if args.plan and techniques:
        raise ShoestringError(f"--plan and --{min(techniques)} both say what to do: give one of them")
    if args.plan:
        return read_plan(args.plan, job.task)
    if args.resume and not techniques:
        return plan_of(folder, job.task)
    if techniques and share_of(args.budget) is not None and not is_open(techniques):
        raise ShoestringError(
            f"a budget of {args.budget} is planned for: leave --{min(techniques)} out, or name a size"
        )
    if args.budget and (not techniques or is_open(techniques)):
        return job.plan_in_tokens(make_plan(job.task, args, rehearse=True))
    return Plan(**techniques)


def plain_step(task: "Task", plan: "Plan") -> dict[str, Any]:
    """The step without techniques, for the page, with the scratch known of this machine; none without a plan."""
    from ..measuring.calibration import load_cache
    from ..profiling import profile
    from ..reporting.page import step_data

    if not plan.techniques():
        return {}
    try:
        return {"plain": step_data(profile(task, load_cache(), brief=True))}
    except ShoestringError:
        return {}  # the lean step may still be traceable


def plan_in_use(folder: "RunFolder", begun: "Plan", risk: str) -> str:
    """The plan at the end of a run, in words: it may have been replanned since it was begun."""
    from ..planning.plan import Plan
    from ..reporting.run_words import plan_words

    plan = Plan.from_json(folder.plan_path.read_text("utf-8"))
    if plan.techniques() != begun.techniques():
        risk = f"{risk} before it was replanned; smaller microbatches are approximate with batch norm"
    return plan_words(plan, risk)


def predicted(
    lean: "LeanTask", budget_bytes: int | None, steps: dict[str, Any], world: "World", replan: bool
) -> "LeanTask":
    """The lean task with its predicted memory in its plan; its step is added to `steps`."""
    from ..training.apply import LeanTask
    from ..training.processes import planned_by_first

    plan = planned_by_first(world, lambda: _prediction(lean, budget_bytes, steps, replan))
    return LeanTask(lean.task.with_(batch=None), plan)


def _prediction(lean: "LeanTask", budget_bytes: int | None, steps: dict[str, Any], replan: bool) -> "Plan":
    """The plan with what it needs; refused if that is over the budget, unless the run may be replanned."""
    from ..measuring import calibrated
    from ..profiling import profile
    from ..reporting.page import step_data, stored_data
    from ..reporting.progress import progress

    task, limit = lean.task, budget_bytes or lean.plan.budget_bytes
    title, before = "calibrating the step's operators, once for this machine", f"tracing the step of {task.name}"
    with progress(title, before) as advance:
        result = calibrated(lambda table: profile(task, table, brief=True), advance)
    if limit is not None and result.needed_bytes > limit and not replan:
        objects = format_bytes(result.object_bytes, 2)
        raise OverBudget(
            f"a step would need {format_bytes(result.peak_bytes)} of tensors and {objects} of Python objects, "
            f"predicted, and the budget is {format_bytes(limit)}: leave the techniques out and let --budget choose "
            "them, add some, or raise it"
        )
    step = steps["lean" if lean.plan.techniques() else "plain"] = step_data(result, len(list(task.split(task.batch))))
    step["stored"] = stored_data(task)
    return lean.plan.with_(
        task=task.name,
        budget_bytes=limit,
        predicted_peak_bytes=result.peak_bytes,
        object_bytes=result.object_bytes,
        predicted_bytes=result.bytes_by_category,
    )
