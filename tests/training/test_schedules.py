import dataclasses

import pytest

from shoestring.errors import ShoestringError
from shoestring.training.schedules import SCHEDULES, Cosine, schedule


def test_the_papers_schedule_is_as_printed():
    lr = schedule("paper", 100_000)  # 500 updates an epoch
    printed = {1: 0.100, 60: 0.100, 61: 0.020, 120: 0.020, 121: 0.040, 160: 0.040, 161: 0.008, 200: 0.008}
    for epoch, value in printed.items():
        first, last = (epoch - 1) * 500 + 1, epoch * 500
        assert 0.1 * lr(first) == pytest.approx(value) and 0.1 * lr(last) == pytest.approx(value)


def test_the_schedule_of_mostafa_and_wang_divides_by_five_at_each_step():
    lr = schedule("mostafa-wang", 200)
    assert [0.1 * lr(n) for n in (60, 120, 160, 200)] == pytest.approx([0.1, 0.02, 0.004, 0.0008])


@pytest.mark.parametrize("update", [1, 1999, 4000, 4001, 50_000])
def test_the_transformers_schedule_is_the_papers_formula(update):
    rise = 1e-7 + (5e-4 - 1e-7) * update / 4000
    expected = rise if update <= 4000 else 5e-4 * (4000 / update) ** 0.5
    assert 5e-4 * schedule("inverse-sqrt", 50_000)(update) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["paper", "mostafa-wang", "inverse-sqrt"])
def test_a_schedule_is_stretched_to_the_length_of_the_run(name):
    short, long = schedule(name, 1000), schedule(name, 100_000)
    assert [short(n) for n in range(10, 1001, 10)] == pytest.approx(
        [long(100 * n) for n in range(10, 1001, 10)], rel=0.02
    )


def test_the_cosine_rises_falls_and_ends_at_its_floor():
    lr = Cosine(100, warmup=0.1, floor=0.05)
    assert lr(5) == 0.5 and lr(11) == 1 and lr(56) == pytest.approx(0.525)
    assert lr(100) == pytest.approx(0.05, abs=0.001) and lr(1000) == pytest.approx(0.05)
    assert all(a >= b for a, b in zip(map(lr, range(10, 100)), map(lr, range(11, 101)), strict=True))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("updates", [1, 2, 7])
def test_even_the_shortest_run_has_a_positive_factor_of_at_most_one(name, updates):
    assert all(0 < schedule(name, updates)(n) <= 1 for n in range(1, updates + 1))


def test_a_schedule_is_data():
    assert schedule("paper", 10) == schedule("paper", 10)
    assert dataclasses.asdict(schedule("inverse-sqrt", 10))["updates"] == 10


def test_unknown_schedules_and_runs_without_updates_are_refused():
    with pytest.raises(ShoestringError, match="'linear': use one of paper"):
        schedule("linear", 10)
    with pytest.raises(ShoestringError, match="0 updates"):
        schedule("paper", 0)
