"""What takes least memory is offered too, and traced only if nothing cheaper fits."""

import pytest

import shoestring
from shoestring.planning.search import Search, plan
from shoestring.profiling import profile
from shoestring.rates import Rates
from shoestring.techniques.registry import REGISTRY, apply_settings

RATES = Rates(1e11, 8e10, 1e10, 1e-5)


def task():
    return shoestring.builtin("wrn-16-1", batch=32, image=16, device="meta")


@pytest.fixture(scope="module")
def peaks():
    """What checkpointing needs, all samples at once and a few at a time."""
    return {
        strategy: profile(apply_settings(task(), {"checkpoint": strategy}), brief=True).needed_bytes
        for strategy in ("residual-2*", "residual-2**")
    }


def planned(budget, risk):
    traced = []
    found = plan(task(), budget, risk, RATES, progress=traced.append)
    return found, traced


def test_sweeps_need_less_and_are_taken_by_name_only(peaks):
    """They are slow, and an evaluation, which is not swept, may need more than such a step."""
    assert peaks["residual-2**"] < peaks["residual-2*"]
    offers = Search(task(), peaks["residual-2**"], RATES).candidates.offers["checkpoint"]
    assert [strategy for strategy, _ in offers if "**" in strategy] == []


@pytest.mark.slow
def test_the_least_that_works_takes_8_bit_sums():
    with pytest.raises(shoestring.NoPlanFits, match=r"the least that works is .*8bit-gradient"):
        plan(shoestring.builtin("wrn-10-1", batch=8, image=16, device="meta"), 20_000, "approximate", RATES)


def test_the_evidence_of_8_bit_sums_is_told():
    technique = REGISTRY["optimizer"]
    assert "0.9995" in technique.evidence(task(), "8bit+8bit-gradient")
    assert technique.risk(task(), "8bit+8bit-gradient").name == "APPROXIMATE"
