"""The budget is kept: plans for many models, budgets and risks, each really stepped under the meter."""

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import zoo
from metering import measured
from shoestring import Adam, Plan, Task, apply, builtin
from shoestring.errors import NoPlanFits
from shoestring.measuring import calibrate, heap, measure_heap
from shoestring.planning.options import Option
from shoestring.planning.search import Search, plan
from shoestring.planning.traces import object_bytes
from shoestring.rates import Rates
from shoestring.techniques.technique import Risk

sys.path.insert(0, str(Path(__file__).parent / "training"))
import small

RATES = Rates(1e11, 8e10, 1e10, 1e-5)  # fixed, so that no timing decides a test
SHARES = (0.95, 0.8, 0.65, 0.5, 0.4)  # of what plain training takes
MODELS: dict[str, Callable[[], Task]] = {
    "wrn-10-0.5": lambda: builtin("wrn-10-0.5", batch=12),
    "small net": lambda: small.task().with_(batch=small.Noise(size=96).read(0, 0)),
    "small net, Adam": lambda: small.task(Adam()).with_(batch=small.Noise(size=96).read(0, 0)),
    "mlp": zoo.mlp,
    "mlp, Adam": lambda: zoo.mlp().with_(optimizer=Adam()),
    "branches": lambda: zoo.branches(batch=8),
}
LARGER: dict[str, Callable[[], Task]] = {
    "wrn-16-1": lambda: builtin("wrn-16-1", batch=20),
    "resnet18": lambda: builtin("resnet18", batch=4),
    "vit-tiny": lambda: builtin("vit-tiny", batch=4),
    "dynamicconv": lambda: builtin("dynamicconv-iwslt", tokens=120),
    "lstm": zoo.lstm,
    "tied": lambda: zoo.tied(batch=4),
    "vit": lambda: zoo.vit(batch=4),
    "unet": zoo.unet,
    "bert": zoo.bert,
    "gpt": zoo.gpt,
}


@cache
def search(model: str) -> Search:
    """All plans of a model share its traces."""
    return Search((MODELS | LARGER)[model](), 0, RATES, calibrate=calibrate)


@cache
def measured_peak(model: str, settings: tuple) -> int:
    return measured(apply((MODELS | LARGER)[model](), Plan(**dict(settings))).task).peak_bytes


def kept(model: str) -> int:
    """Plans for all shares and risks that some plan fits -> how many; each is really run."""
    plain = measured_peak(model, ())
    count = 0
    for share in SHARES:
        shared = search(model)
        shared.budget = round(share * plain)
        for risk in Risk:
            levels = (shared.best(level) for level in Risk if level <= risk)
            found = next((option for option in levels if option is not None), None)
            if found is not None:
                assert measured_peak(model, found.settings) <= shared.budget, (share, risk, str(found))
                count += 1
    return count


COUNTS: dict[str, int] = {}


@pytest.mark.parametrize("model", MODELS)
def test_no_step_takes_more_than_the_budget_that_it_was_planned_for(model):
    COUNTS[model] = kept(model)
    assert COUNTS[model] > 0


def test_these_are_at_least_60_cases():
    if len(COUNTS) == len(MODELS):
        assert sum(COUNTS.values()) >= 60, COUNTS


@pytest.mark.slow
@pytest.mark.parametrize("model", LARGER)
def test_no_step_of_a_larger_model_takes_more_than_its_budget(model):
    assert kept(model) > 0


def attention(settings: dict) -> object:
    """The heap meter's target: a small language model under a plan, two steps; their peak counts."""
    lean = apply(zoo.gpt(), Plan(**settings))
    if heap.is_preloaded():
        heap.reset()
    for _ in range(2):
        lean.step(lean.task.batch)
    return lean


@pytest.mark.parametrize("settings", [{}, {"optimizer": "no-gradient", "activations": "offload"}], ids=str)
def test_the_heap_has_no_more_than_the_tensors_and_the_room_for_their_objects(settings):
    traced = Search(zoo.gpt(), 0, RATES, calibrate=calibrate).peak(Option(tuple(settings.items()), Risk.EXACT))
    peak = measure_heap(f"{__file__}:attention", [settings]).peak_bytes
    assert traced.peak_bytes < peak <= traced.peak_bytes + object_bytes(traced)


def test_what_no_plan_fits_is_refused_with_what_fills_it():
    with pytest.raises(NoPlanFits, match="filled by"):
        plan(MODELS["mlp"](), "10KB", risk="approximate", rates=RATES, calibrate=calibrate)
