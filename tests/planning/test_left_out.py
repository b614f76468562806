"""What the planner leaves out it tells, and what fails on one model ends no search; nothing of ours hides in it."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoestring import Adam, NoPlanFits, ShoestringError, Task
from shoestring.planning import explain
from shoestring.planning.search import Search, plan
from shoestring.planning.shown import needed_bytes
from shoestring.profiling import profile
from shoestring.rates import Rates
from shoestring.reporting.plans import left_out
from shoestring.techniques.optimizer.factored import SM3
from shoestring.techniques.registry import REGISTRY
from shoestring.techniques.technique import Risk
from shoestring.units import format_bytes

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
import small

RATES = Rates(1e11, 8e10, 1e10, 1e-5)


class ReadsItsWeight(nn.Module):
    """Looks at a layer's `weight.dtype` before it calls it, as some published models do."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), nn.Linear(64, 8)

    def forward(self, x):
        return self.head(self.inner(x.to(self.inner[0].weight.dtype)))


class TiedByCall(nn.Module):
    """Uses the weight of an embedding as that of its last layer, by a function call."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Embedding(300, 64), nn.Linear(64, 64)

    def forward(self, ids):
        return F.linear(torch.tanh(self.mix(self.embed(ids))), self.embed.weight)


def squares(model, batch):
    return model(batch).square().mean()


def images():
    return small.task().with_(batch=small.Noise(size=160).read(0, 0))


MODELS = {
    "reads a weight": lambda: Task(ReadsItsWeight(), squares, torch.randn(256, 64), Adam()),
    "tied by a call": lambda: Task(TiedByCall(), squares, torch.randint(300, (16, 16)), Adam()),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("share", [0.5, pytest.param(0.05, marks=pytest.mark.slow)])
def test_a_technique_that_fails_on_a_model_does_not_end_the_search(model, share):
    task = MODELS[model]()
    try:
        found = plan(task, round(share * profile(task).peak_bytes), "approximate", RATES, warn=lambda line: None)
    except NoPlanFits as error:
        assert "the least that works is" in str(error)
    else:
        assert found.predicted_peak_bytes <= share * profile(task).peak_bytes


def failing(technique, error, names=("apply",)):
    """The technique, whose functions raise."""

    def fail(*args):
        raise error

    return technique._replace(**dict.fromkeys(names, fail))


@pytest.fixture
def broken(monkeypatch):
    """(name, error, functions) -> that technique fails from now on, in every module of the planner."""

    def break_it(name, error, functions=("apply",)):
        monkeypatch.setitem(REGISTRY, name, failing(REGISTRY[name], error, functions))

    return break_it


@pytest.mark.parametrize(
    "name, function",
    [("checkpoint", "apply"), ("checkpoint", "options"), ("activations", "risk"), ("optimizer", "effect")],
)
def test_an_error_that_is_no_refusal_is_a_warning_with_the_options_name(broken, name, function):
    broken(name, ZeroDivisionError("by nothing"), (function,))
    lines, task = [], images()
    found = plan(task, 6 * profile(task).peak_bytes // 10, "neutral", RATES, warn=lines.append)
    assert name not in found.techniques()
    assert any(name in line and "ZeroDivisionError: by nothing" in line for line in lines)
    assert any(row["kind"] == "error" and name in str(row["options"]) for row in found.left_out)


def test_a_refusal_is_told_in_the_plan_and_is_no_warning(broken):
    broken("checkpoint", ShoestringError("it does not suit"))
    lines, task = [], images()
    found = plan(task, 6 * profile(task).peak_bytes // 10, "neutral", RATES, warn=lines.append)
    reasons = {row["reason"]: row for row in found.left_out}
    assert "checkpoint no-bn" in reasons["it does not suit"]["options"] and lines == []
    assert type(found).from_json(found.to_json()) == found


class Scale(nn.Module):
    """Has no layer: one parameter, used directly."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x):
        return x * self.scale


@pytest.mark.parametrize(
    "name, reason",
    [
        ("nonzero", "Scale has no layer to make sparse"),
        ("microbatch", "a batch of one cannot be split"),
        ("optimizer", "SM3 has factored state already"),
    ],
)
def test_a_technique_that_has_nothing_to_offer_says_why_when_the_plan_is_explained(name, reason):
    found = plan(Task(Scale(), squares, torch.randn(1, 64), SM3(0.1)), "1GB", rates=RATES)
    (line,) = [line for line in left_out(found) if line.startswith(f"  - {name}:")]
    assert reason in line


def test_an_error_of_plain_training_is_raised_as_it_is():
    def wrong(model, batch):
        raise KeyError("labels")

    with pytest.raises(KeyError, match="labels"):
        plan(MODELS["reads a weight"]().with_(loss=wrong), "1MB", rates=RATES)


def test_a_value_that_fails_alone_is_tried_in_no_combination(broken):
    broken("checkpoint", RuntimeError("never"))
    traced = []
    search = Search(images(), 10**5, RATES, progress=traced.append)
    search.best(Risk.EXACT)
    assert not any("checkpoint" in words for words in traced)


# -- nothing fits -------------------------------------------------------------------------------------------------
def opaque():
    task = MODELS["reads a weight"]()
    return task.with_(optimizer=lambda parameters: torch.optim.RMSprop(parameters))


def test_an_optimizer_made_by_a_function_is_told_to_stand_in_the_way():
    with pytest.raises(NoPlanFits) as error:
        plan(opaque(), "20KB", rates=RATES, warn=lambda line: None)
    left = next(part for part in str(error.value).split("; ") if part.startswith("left out"))
    assert "optimizer" in left and "precision" in left and "Adam(...)" in left


@pytest.mark.parametrize("make, risk", [(opaque, "exact"), (opaque, "neutral"), (images, "exact")])
def test_the_smallest_peak_that_is_told_is_that_of_all_that_is_allowed(make, risk):
    task, allowed = make(), Risk.named(risk)
    search = Search(task, 1, RATES)
    smallest = search.smallest(allowed)
    every = Search(task, 1, RATES)
    peaks = [
        traced.peak_bytes
        for level in Risk
        if level <= allowed
        for option in every.candidates.at(level)
        if (traced := every.traces.of(option.settings)) is not None
    ]
    assert search.traces.of(smallest).peak_bytes <= 1.02 * min(peaks)


def test_what_a_higher_risk_would_give_and_cost_is_told():
    task = images()
    budget = 50 * profile(task).peak_bytes // 100
    found = plan(task, budget, "neutral", RATES)
    words = ", ".join(f"{name} {value}" for name, value in found.techniques().items())
    with pytest.raises(NoPlanFits) as error:
        plan(task, budget, "exact", RATES)
    told = str(error.value).split("; ")[-1]
    assert told.startswith(f"risk neutral would fit: {words}, ") and told.endswith("--risk neutral")
    assert f", {format_bytes(needed_bytes(found))}, {found.predicted_time_ratio:.2f}x the time" in told


def test_estimates_among_the_reasons_count_objects_as_the_table_does():
    task = images()
    search = Search(task, 1 << 60, RATES)
    option = search.candidates.option((("optimizer", "8bit"), ("microbatch", 4)))
    less = option.without("microbatch")
    search.traces.of(option.settings)
    [told] = [words for words in explain._reasons(search, option, search.traces.plain()) if "microbatch 4" in words]
    assert told.endswith(f"about {format_bytes(search.estimate(less)[0] + search.objects(less), 2)}")
    assert search.objects(less) > 0


def test_a_technique_without_which_a_step_fits_too_says_how_much_longer_that_takes():
    search = Search(images(), 1 << 60, RATES)
    told = {}
    for settings in ((("nonzero", 10),), (("precision", "fp16"),)):
        option = search.candidates.option(settings)
        (told[settings],) = [words for words in search.finish(option).reasons if "without it" in words]
    faster, slower = (search.time_ratio(search.candidates.option(settings)) for settings in told)
    assert faster < 1 < slower
    sparse, narrow = told.values()
    assert sparse.endswith(" MB, and 1.00x the time") and narrow.endswith("MB")
