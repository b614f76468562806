"""The planner finds what trying everything would find, spends exactness first, and says why."""

import sys
from pathlib import Path

import pytest

from shoestring import Plan, ShoestringError, apply, plan, profile
from shoestring.errors import NoPlanFits
from shoestring.planning.search import Option, Representative, Search
from shoestring.planning.timing import Rates
from shoestring.techniques.risk import Risk

sys.path.insert(0, str(Path(__file__).parent.parent))
import zoo

RATES = Rates(1e11, 8e10, 1e10, 1e-5)  # fixed, so that no timing decides a test


def traced_peak(task, settings):
    lean = apply(task, Plan(**settings)).task
    return profile(lean.with_(split=Representative(lean.split))).peak_bytes


@pytest.fixture(scope="module")
def gpt():
    return zoo.gpt()


def test_where_plain_training_fits_it_is_left_as_it_is(gpt):
    assert plan(gpt, "1GB", rates=RATES).techniques() == {}


def test_the_plan_is_what_trying_everything_finds(gpt):
    budget = 21_000_000
    search = Search(gpt, budget, RATES, None, lambda words: None)
    fitting = []
    for option in search.options(Risk.EXACT):
        seconds = search.seconds(option)
        if seconds is not None and (traced := search._trace(option.settings)) and traced.peak_bytes <= budget:
            fitting.append((seconds, option.settings))
    found = plan(gpt, budget, risk="exact", rates=RATES)
    assert found.techniques() == dict(min(fitting)[1])
    assert found.predicted_peak_bytes == traced_peak(zoo.gpt(), found.techniques()) <= budget


def test_a_lower_budget_never_yields_a_higher_peak(gpt):
    peaks = [plan(gpt, budget, rates=RATES).predicted_peak_bytes for budget in (40_000_000, 25_000_000, 21_000_000)]
    assert peaks == sorted(peaks, reverse=True)


def test_every_setting_has_its_reason_and_the_alternatives_are_a_front(gpt):
    found = plan(gpt, 21_000_000, rates=RATES)
    for name in found.techniques():
        assert any(reason.startswith(name) for reason in found.reasons)
    by_memory = sorted(found.alternatives, key=lambda row: row["predicted_peak_bytes"])
    exact = [row["predicted_time_ratio"] for row in by_memory if row["risk"] == "exact"]
    assert exact == sorted(exact, reverse=True)


def test_what_does_not_fit_is_told_with_the_smallest_peak_and_what_fills_it(gpt):
    with pytest.raises(NoPlanFits, match=r"smallest peak found is .* filled by .* try"):
        plan(gpt, "1MB", risk="exact", rates=RATES)


@pytest.mark.parametrize("budget", ["lots", "-3MB", "0"])
def test_a_budget_of_nonsense_is_refused(gpt, budget):
    with pytest.raises(ShoestringError, match=budget):
        plan(gpt, budget)


def test_a_risk_that_does_not_exist_is_refused(gpt):
    with pytest.raises(ShoestringError, match="exact, neutral or approximate"):
        plan(gpt, "1GB", risk="some")


def test_planning_leaves_the_model_as_it_was(gpt):
    before = {name: (p.dtype, p.device, p.shape) for name, p in gpt.model.named_parameters()}
    plan(gpt, 21_000_000, rates=RATES)
    assert {name: (p.dtype, p.device, p.shape) for name, p in gpt.model.named_parameters()} == before


def test_a_plan_survives_its_file():
    made = Plan(checkpoint="residual-2*", microbatch=10, reasons=("because",), budget_bytes=7)
    assert Plan.from_json(made.to_json()) == made


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 99}', '{"version": 1, "nonsense": 2}'])
def test_a_damaged_plan_is_refused(text):
    with pytest.raises(ShoestringError):
        Plan.from_json(text)


def test_an_option_without_a_setting_is_smaller():
    option = Option((("checkpoint", "no-bn"), ("microbatch", 2)), Risk.EXACT)
    assert option.without("microbatch").settings == (("checkpoint", "no-bn"),)
