"""The budget is kept: plans for many models, budgets and risks, each really stepped under the meter."""

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

import zoo
from metering import measured
from shoestring import Adam, Plan, Task, apply, builtin
from shoestring.errors import NoPlanFits
from shoestring.ledger import Phase
from shoestring.measuring import calibrate, heap, measure_heap
from shoestring.planning.search import Search, plan
from shoestring.profiling import Profile
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


def many_layers(last: int = 64) -> Task:
    """Adam's update needs most bytes of tensors, but little more than the pass before it, whose graph is still there;
    with a large last layer it needs so much more that it is the peak of all."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(150)), torch.nn.Linear(64, last))
    return Task(model, lambda model, batch: model(batch).square().mean(), torch.ones(1, 64), Adam())


HEAPED: dict[str, Callable[[], Task]] = {
    "gpt": zoo.gpt,
    "many layers": many_layers,
    "a large layer": lambda: many_layers(20_000),
    "a recorded network": lambda: builtin("wrn-28-2", batch=10),
}


def steps(model: str, settings: dict) -> object:
    """The heap meter's target: a small model under a plan, two steps; their peak counts."""
    lean = apply(HEAPED[model](), Plan(**settings))
    if heap.is_preloaded():
        heap.reset()
    for _ in range(2):
        lean.step(lean.task.batch)
    return lean


def predicted(model: str, settings: dict) -> Profile:
    """The trace of a plan with the scratch of its operators, as a search that has room for it sees it."""
    traced = Search(HEAPED[model](), 0, RATES, calibrate=calibrate).traces.settled(tuple(settings.items()))
    assert traced is not None
    return traced


@pytest.mark.parametrize(
    "model, settings",
    [
        ("gpt", {}),
        ("gpt", {"optimizer": "no-gradient", "activations": "offload"}),
        ("many layers", {}),
        ("a large layer", {}),
        ("a large layer", {"optimizer": "adafactor+no-gradient"}),  # updated while there is a graph
    ],
    ids=str,
)
def test_the_heap_has_no_more_than_the_tensors_and_the_room_for_their_objects(model, settings):
    traced = predicted(model, settings)
    assert (traced.peak.phase == Phase.UPDATE) == (model != "gpt")
    assert (traced.fullest.nodes == 0) == (model == "a large layer" and not settings)
    peak = measure_heap(f"{__file__}:steps", [model, settings]).peak_bytes
    assert traced.peak_bytes < peak <= traced.needed_bytes


@pytest.mark.parametrize("settings", [{}, {"checkpoint": "no-bn"}], ids=str)
def test_there_is_room_for_the_tape_of_a_pass_while_it_is_written(settings):
    model = "a recorded network"
    traced = predicted(model, settings)
    assert traced.is_recorded
    assert measure_heap(f"{__file__}:steps", [model, settings]).peak_bytes <= traced.needed_bytes


def test_what_no_plan_fits_is_refused_with_what_fills_it():
    with pytest.raises(NoPlanFits, match="filled by"):
        plan(MODELS["mlp"](), "10KB", risk="approximate", rates=RATES, calibrate=calibrate)
