import json

import pytest
from hypothesis import given
from hypothesis import strategies as some

from shoestring.ledger import Category, Ledger, Phase, sum_bytes


def step() -> Ledger:
    """A weight that stays, a hidden map, its gradient born while the map lives, and both gone."""
    ledger = Ledger()
    ledger.birth(400, Category.MODEL, "fc", "parameter")
    hidden = ledger.birth(100, Category.ACTIVATION, "fc", "addmm", Phase.FORWARD)
    gradient = ledger.birth(50, Category.ACTIVATION_GRADIENT, "relu", "threshold_backward", Phase.BACKWARD)
    ledger.death(hidden)
    ledger.birth(20, Category.GRADIENT, "fc", "mm", Phase.BACKWARD)
    ledger.death(gradient)
    return ledger


def test_the_timeline_has_the_live_bytes_after_each_event():
    assert step().timeline() == [400, 500, 550, 450, 470, 420]


def test_the_peak_is_one_moment_and_not_a_sum_of_maxima():
    peak = step().peak()
    assert (peak.bytes, peak.time) == (550, 2)
    assert peak.bytes < 400 + 100 + 50 + 20


def test_the_peak_tells_what_was_born_at_it():
    peak = step().peak()
    assert (peak.phase, peak.module, peak.operation) == (Phase.BACKWARD, "relu", "threshold_backward")


def test_the_first_of_two_equal_peaks_is_the_peak():
    ledger = Ledger()
    ledger.death(ledger.birth(10, Category.ACTIVATION, "first"))
    ledger.birth(10, Category.ACTIVATION, "second")
    assert ledger.peak().module == "first"


def test_a_ledger_without_storages_has_a_peak_of_nothing():
    assert Ledger().peak().bytes == 0
    assert Ledger().timeline() == []


def test_bytes_at_the_peak_are_summed_by_any_key_largest_first():
    ledger = step()
    assert ledger.bytes_by(lambda e: str(e.category)) == {
        "model": 400,
        "activation": 100,
        "activation_gradient": 50,
    }
    assert list(ledger.bytes_by(lambda e: e.module).items()) == [("fc", 500), ("relu", 50)]
    assert ledger.bytes_by(lambda e: e.operation, time=4)["mm"] == 20


def test_categories_stack_up_to_the_timeline():
    ledger = step()
    parts = ledger.stacked_timeline()
    assert set(parts) == set(Category) - {Category.OPTIMIZER, Category.INPUT, Category.WORKSPACE}
    assert [sum(column) for column in zip(*parts.values(), strict=True)] == ledger.timeline()


def test_some_categories_alone_have_their_own_peak():
    ledger = step()
    assert ledger.only(Category.ACTIVATION, Category.ACTIVATION_GRADIENT).peak().bytes == 150
    assert ledger.only(Category.GRADIENT).peak().time == 4
    assert ledger.only(Category.WORKSPACE).peak().bytes == 0


def test_a_storage_that_changes_its_size_keeps_what_it_was_for():
    ledger = Ledger()
    number = ledger.birth(10, Category.MODEL, "table", "parameter")
    number = ledger.resize(number, 30)
    assert ledger.live_bytes == ledger.peak().bytes == 30
    assert ledger.entries[number].module == "table"


def test_no_storage_dies_twice():
    ledger = Ledger()
    number = ledger.birth(1, Category.MODEL)
    ledger.death(number)
    with pytest.raises(AssertionError):
        ledger.death(number)


def test_a_saved_ledger_is_the_same_ledger():
    ledger = step()
    again = Ledger.from_json(ledger.to_json())
    assert again.entries == ledger.entries
    assert (again.time, again.live_bytes, again.peak()) == (ledger.time, ledger.live_bytes, ledger.peak())
    again.birth(7, Category.MODEL)  # and goes on where it was
    assert again.live_bytes == ledger.live_bytes + 7 and again.time == ledger.time + 1


def test_the_saved_form_is_plain_json():
    record = json.loads(step().to_json())
    assert record["entries"][1] == {
        "bytes": 100,
        "category": "activation",
        "module": "fc",
        "operation": "addmm",
        "phase": "forward",
        "born": 1,
        "died": 3,
    }


@given(some.lists(some.tuples(some.integers(0, 10**12), some.integers(0, 30)), max_size=40))
def test_the_timeline_agrees_with_live_bytes_kept_event_by_event(plan):
    """Each pair is a birth of so many bytes, and how many births later it dies."""
    ledger, live, deaths = Ledger(), [], {}
    for turn, (size, later) in enumerate(plan):
        deaths.setdefault(turn + later, []).append(ledger.birth(size, Category.ACTIVATION))
        live.append(ledger.live_bytes)
        for number in deaths.pop(turn, []):
            ledger.death(number)
            live.append(ledger.live_bytes)
    assert ledger.timeline() == live
    assert ledger.peak().bytes == max(live, default=0)
    assert all(sum(e.bytes for e in ledger.live_at(t)) == size for t, size in enumerate(live))


def test_sums_of_nothing_are_nothing():
    assert sum_bytes([], lambda e: e.module) == {}
