"""What a technique's record tells the planner before a trace, beside the trace: effects, bounds, and reasons."""

from functools import cache

import pytest
from table import PLANS, task

from shoestring.planning.search import DOUBT, Search
from shoestring.rates import Rates
from shoestring.techniques import WORDS
from shoestring.techniques.registry import REGISTRY

MODELS = ("wrn", "gpt", "mlp")
LOWEST = 0.8  # of the peak: an estimate that is too low costs the planner a trace, one that is too high the plan


@cache
def search(model):
    return Search(task(model), 10**12, Rates(1e11, 8e10, 1e10, 1e-5))


def traced(model, name):
    """The mildest and the strongest value that a technique offers, each with its trace, if it has one."""
    offers = [value for value, _ in search(model).candidates.offers[name]]
    options = [search(model).candidates.option(((name, value),)) for value in dict.fromkeys(offers[:1] + offers[-1:])]
    return [(option, profile) for option in options if (profile := search(model).traces.of(option.settings))]


CELLS = [(model, name) for model in MODELS for name in REGISTRY]


@pytest.mark.parametrize(("model", "name"), CELLS)
def test_a_technique_is_offered_or_says_why_not(model, name):
    offers = search(model).candidates.offers[name]
    reasons = [one.reason for one in search(model).left_out if one.settings == ((name, ""),)]
    assert bool(offers) != bool(reasons)
    tried = {option.settings[0] for option, _ in traced(model, name)}
    refused = {one.settings[0] for one in search(model).left_out if len(one.settings) == 1 and one.reason}
    ends = {(name, value) for value, _ in offers[:1] + offers[-1:]}
    assert ends <= tried | refused


@pytest.mark.parametrize(("model", "name"), CELLS)
def test_the_peak_that_is_estimated_from_another_trace_is_near_the_traced_one(model, name):
    for option, profile in traced(model, name):
        about, _ = search(model).estimate(option)
        assert DOUBT * about <= profile.peak_bytes, option
        # An effect scales sums over all layers: it does not see the gradient of the largest one, alive in its update.
        largest = max(parameter.nbytes for parameter in task(model).model.parameters())
        assert LOWEST * profile.peak_bytes <= about + 2 * largest, option


@pytest.mark.parametrize(("model", "name"), CELLS)
def test_an_option_needs_no_less_memory_and_time_than_its_bounds(model, name):
    for option, profile in traced(model, name):
        assert search(model).lower_bound(option) <= profile.needed_bytes, option
        unseen = Search(task(model), profile.peak_bytes, Rates(1e11, 8e10, 1e10, 1e-5))
        unseen.traces.base(())
        assert unseen.time_bound(option) <= 1.001 * unseen.seconds(option), option


def test_every_technique_has_a_row_in_the_contract():
    of_one = {word.name for word in WORDS if not word.of_several}  # the others' rows are in tests/distributed
    assert {name for _, plan in PLANS.values() for name in plan.techniques()} == of_one
