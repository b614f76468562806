"""The settings of a study's row -> a plan and a model: translates the words of studies into those of plans."""

from collections.abc import Mapping
from typing import Any

from ..models.tuned import learning_rate_multiplier
from ..planning.plan import Plan
from ..techniques import WORDS
from .study import Row, Scale, Study


def model_of(study: Study, row: Row) -> str:
    return row.settings.get("model", study.model)


def size_of(study: Study, scale: Scale | None = None) -> dict[str, int]:
    """The batch, or the tokens, of a step."""
    batch = (scale and scale.batch) or study.batch
    tokens = (scale and scale.tokens) or study.tokens
    return {"tokens": tokens} if tokens is not None else {"batch": batch or 100}


def plan_of(settings: Mapping[str, Any], size: int) -> Plan:
    """A row's settings and the size of the batch -> the plan; values that ask for nothing are left out of it."""
    values: dict[str, Any] = {word.name: settings[word.name] for word in WORDS if word.asks(settings.get(word.name))}
    if "nonzero" in values:
        values["nonzero"] = _sparsity(settings)
    if values.get("microbatch", size) >= size:
        values.pop("microbatch", None)
    elif settings.get("simulated"):
        values["microbatch"] = {"size": settings["microbatch"], "simulated": True}
    return Plan(**values)


def _sparsity(settings: Mapping[str, Any]) -> Any:
    words = {"method": "method", "rewire_fraction": "fraction_multiplier", "rewire_frequency": "frequency_multiplier"}
    more = {words[key]: settings[key] for key in words if key in settings}
    return {"nonzero": settings["nonzero"], **more} if more else settings["nonzero"]


def lr_multiplier(job: Mapping[str, Any]) -> float:
    """The row's own, or the one that was found best for that network, its sparsity and its width (Tables 6 and 7). It
    is a part of the job, so that a trial at another rate is another trial."""
    settings = job["settings"]
    if "lr_multiplier" in settings:
        return float(settings["lr_multiplier"])
    return learning_rate_multiplier(job["model"], settings.get("nonzero", 100), job["sizes"].get("width"))
