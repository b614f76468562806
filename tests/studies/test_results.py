"""Means, intervals and verdicts."""

import math

import pytest

from shoestring import Plan
from shoestring.paper import paper_profile
from shoestring.studies.memory import memory
from shoestring.studies.results import CONFIRMED, NOT_CONFIRMED, NOT_TESTABLE, Estimate, judge


def row(label, values=(), **more):
    estimate = Estimate.of(list(values))
    quality = {"accuracy": estimate.value, "interval": estimate.interval} if estimate else {}
    return {"label": label, "quality": quality, "seeds": list(range(len(values))), "paper": {}} | more


def test_an_interval_is_1_96_standard_errors():
    found = Estimate.of([1.0, 2.0, 3.0])
    assert (found.value, found.count) == (2.0, 3)
    assert found.interval == pytest.approx(1.96 * 1.0 / math.sqrt(3))
    assert Estimate.of([1.0]).interval is None
    assert Estimate.of([]) is None


def test_the_interval_of_a_difference_has_both_spreads():
    difference = Estimate(5.0, 0.3, 3).minus(Estimate(4.0, 0.4, 3))
    assert (difference.value, difference.interval) == (1.0, pytest.approx(0.5))


CLAIM = {"claim": "c", "metric": "accuracy", "row": "b", "minus": "a", "at_least": -1.0}


@pytest.mark.parametrize(
    ("values", "verdict", "note"),
    [
        ((89.9, 90.0, 90.1), CONFIRMED, ""),
        ((88.0, 88.1, 87.9), NOT_CONFIRMED, ""),
        ((88.5, 89.2, 90.0), NOT_CONFIRMED, "the bound holds for the mean, but not at the interval's end"),
        ((90.0,), NOT_CONFIRMED, "it holds for a single seed, which has no interval"),
        ((80.0,), NOT_CONFIRMED, "it does not hold for a single seed, which has no interval"),
        ((), NOT_TESTABLE, ""),
    ],
)
def test_a_difference_is_confirmed_only_if_the_worse_end_of_its_interval_is(values, verdict, note):
    found = judge(CLAIM, [row("a", (90.0, 90.1, 89.9)), row("b", values)])
    assert (found["verdict"], found["note"]) == (verdict, note)


def test_bytes_are_compared_to_the_printed_digit_in_percent_or_in_every_row():
    rows = [row("b", rules_bytes=6_672_000, measured_bytes=6_600_000) | {"paper": {"memory_mb": 6.7}}]
    digits = {"claim": "c", "metric": "rules_mb", "row": "b", "paper": 6.7, "digits": 1}
    assert judge(digits, rows)["verdict"] == CONFIRMED
    assert judge(digits | {"paper": 6.6}, rows)["verdict"] == NOT_CONFIRMED
    assert judge(digits | {"percent": 0.1} | {"digits": 1}, rows)["verdict"] == CONFIRMED
    every = {"claim": "c", "metric": "measured_mb", "every": True, "at_most": 1.0}
    assert judge(every, rows)["verdict"] == CONFIRMED
    assert judge(every, [rows[0] | {"measured_bytes": 6_800_000}])["verdict"] == NOT_CONFIRMED
    unmeasured = judge(every, [rows[0] | {"measured_bytes": None}])
    assert (unmeasured["verdict"], unmeasured["note"]) == (NOT_TESTABLE, "a row of it is not measured yet")
    close = every | {"at_least": 0.99, "at_most": 1.01}
    assert judge(close, [rows[0] | {"measured_bytes": 6_690_000}])["verdict"] == CONFIRMED
    far = [rows[0] | {"measured_bytes": 6_690_000}, rows[0] | {"measured_bytes": 6_000_000}]
    assert judge(close, far)["verdict"] == NOT_CONFIRMED  # one of them is far below
    assert judge(every, rows, smaller=True)["verdict"] == NOT_TESTABLE  # bytes of other images than the paper's
    assert judge(digits, rows, smaller=True)["verdict"] == CONFIRMED  # the paper's own rules


def test_the_papers_rules_count_the_network_of_the_row_not_the_usual_one():
    small = memory("wrn-10-1", {"batch": 2, "image": 16}, {}, Plan())
    usual = paper_profile("wrn-10-1", batch=2).peak_bytes
    assert small["rules_bytes"] == paper_profile("wrn-10-1", batch=2, image=16).peak_bytes < 0.6 * usual
    narrow, wide = (paper_profile("dynamicconv-iwslt", tokens=40, **shape) for shape in ({"width": 128}, {}))
    assert narrow.peak_bytes < 0.5 * wide.peak_bytes
