"""The memory of a row, counted three ways: by the paper's rules, predicted, and measured on the heap."""

from collections.abc import Mapping
from typing import Any

from ..errors import ShoestringError
from ..ledger import Category
from ..measuring import calibrated, measure_heap
from ..models import builtin, materialise
from ..paper import paper_profile
from ..planning.plan import Plan
from ..profiling import profile
from ..task import Task
from ..training.apply import LeanTask, apply

RULES = ("nonzero", "precision", "checkpoint", "microbatch")  # what the paper's rules know
_KINDS = {Category.MODEL: "model", Category.GRADIENT: "optimizer", Category.OPTIMIZER: "optimizer"}

_batches: dict[str, Any] = {}


def memory(model: str, sizes: dict[str, int], settings: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """A built-in model, the sizes of its batch, a row's settings and plan -> bytes at the peak of a step.

    `measured_bytes` is the heap's, building the model included, the batch not; `predicted_bytes` counts the same
    except Python's objects. `rules_bytes` is None if the paper has no rule, with the reason in `notes`.
    """
    found: dict[str, Any] = {"notes": {}}
    try:
        found |= _rules(model, sizes, settings, plan)
    except ShoestringError as error:
        found |= {"rules_bytes": None, "notes": {"rules_bytes": str(error)}}
    return found | _predicted(model, sizes, settings, plan) | _measured(model, sizes, settings, plan)


def _rules(model: str, sizes: dict[str, int], settings: dict[str, Any], plan: Plan) -> dict[str, Any]:
    unknown = sorted(set(settings) - {*RULES, "model", "lr_multiplier", "method", "simulated"})
    if [key for key in unknown if not key.startswith("rewire_")] or settings.get("precision") == "bf16":
        raise ShoestringError(f"the paper's rules do not know {', '.join(unknown) or 'bf16'}")
    known: dict[str, Any] = sizes | _only(settings, *RULES)
    counted = paper_profile(model, **known)
    found = {"rules_bytes": counted.peak_bytes, "rules_flops_ratio": counted.flops["ratio"]}
    return found | {"rules_parts": _parts(counted.bytes_by_category)}


def _predicted(model: str, sizes: dict[str, int], settings: dict[str, Any], plan: Plan) -> dict[str, Any]:
    task = apply(builtin(model, device="meta", **sizes), plan).task
    traced = calibrated(lambda table: profile(task, table))
    own = traced.ledger.only(*(set(Category) - {Category.INPUT}))
    parts = _parts(own.bytes_by(lambda entry: entry.category))
    return {"predicted_bytes": own.peak().bytes, "flops_ratio": traced.flops["ratio"], "predicted_parts": parts}


def _parts(by_category: Mapping[Any, int]) -> dict[str, int]:
    """Bytes by category -> those of the paper's three kinds, gradients of weights being the optimizer's."""
    found = {"model": 0, "optimizer": 0, "activations": 0}
    for category, size in by_category.items():
        found[_KINDS.get(Category(category), "activations")] += size
    return found


def _measured(model: str, sizes: dict[str, int], settings: dict[str, Any], plan: Plan) -> dict[str, Any]:
    reading = measure_heap(f"{__name__}:steps", [model, sizes, plan.techniques()])
    return {"measured_bytes": reading.peak_bytes}


def _only(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def steps(model: str, sizes: dict[str, int], techniques: dict[str, Any], count: int = 2) -> LeanTask:
    """Builds a model straight into its lean form and runs `count` updates: what the heap meter measures.

    In FP16 it continues until an update was made: the first ones may be skipped, and leave no optimizer state.
    """
    task = builtin(model, device="meta", **sizes)
    # The batch is made in the warm-up and stays: data is not the training's memory.
    batch = _batches.setdefault(f"{model} {sizes}", task.batch)
    lean = built(task.with_(batch=batch), Plan(**techniques))
    del task  # nor is the description of the dense model
    for _ in range(count):
        lean.step(batch)
    while not lean.stepper.optimizer.state and lean.task.scaling is not None:
        lean.step(batch)
    return lean


def built(task: Task, plan: Plan) -> LeanTask:
    """A task on the meta device -> the task under the plan, its weights made straight in their lean form."""
    lean = apply(task, plan)
    materialise(lean.model)
    return lean
