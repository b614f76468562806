"""Regions are chosen so that least is computed again within a budget: as good as trying everything."""

import itertools
import math

import pytest

from shoestring import ShoestringError
from shoestring.techniques.checkpoint.segments import BlockCost, choose_segments, least_bytes


def chain(*blocks):
    return [BlockCost(f"block{i}", a, s, f) for i, (a, s, f) in enumerate(blocks)]


CHAINS = [
    chain((10, 30, 1), (10, 30, 1), (10, 30, 1), (10, 30, 1)),
    chain((40, 100, 5), (20, 10, 1), (5, 80, 9), (30, 30, 2), (10, 60, 4)),
    chain((1, 1, 1), (100, 1, 1), (1, 100, 1), (50, 50, 7)),
]


def every_choice(blocks):
    """Each way to cut a chain into segments, each with each choice: (peak, FLOPs to compute again)."""
    count = len(blocks)
    for cuts in itertools.product((0, 1), repeat=count - 1):
        stops = [i + 1 for i, cut in enumerate(cuts) if cut] + [count]
        segments = list(zip([0, *stops[:-1]], stops, strict=True))
        for choices in itertools.product(("keep", "once", "nested"), repeat=len(segments)):
            yield cost(blocks, [(*segment, choice) for segment, choice in zip(segments, choices, strict=True)])


def cost(blocks, segments):
    used = peak = work = 0
    for start, stop, choice in segments:
        part = blocks[start:stop]
        inputs, insides = sum(b.input_bytes for b in part), [b.inside_bytes for b in part]
        kept = inputs + sum(insides) if choice == "keep" else part[0].input_bytes
        meanwhile = {"keep": kept, "once": inputs + sum(insides), "nested": inputs + max(insides)}[choice]
        peak = max(peak, used + meanwhile)
        used += kept
        flops = sum(b.flops for b in part)
        work += {"keep": 0, "once": flops, "nested": flops + sum(b.flops for b in part[:-1])}[choice]
    return peak, work


@pytest.mark.parametrize("blocks", CHAINS, ids=["equal", "unequal", "extreme"])
def test_no_other_choice_within_the_budget_computes_less(blocks):
    whole = sum(b.input_bytes + b.inside_bytes for b in blocks)
    for budget in range(int(least_bytes(blocks)) + 1, whole + 2, 7):
        chosen = [(s.start, s.stop, s.choice) for s in choose_segments(blocks, budget)]
        peak, work = cost(blocks, chosen)
        # bytes are rounded up to 1/256 of the budget a block: compare with what fits when they are
        tight = budget * (1 - (len(blocks) + 1) / 256)
        assert peak <= budget
        assert work <= min(w for p, w in every_choice(blocks) if p <= tight) if tight > peak else True
        assert work >= min(w for p, w in every_choice(blocks) if p <= budget)


def test_a_budget_for_everything_computes_nothing_again():
    assert all(s.choice == "keep" for s in choose_segments(CHAINS[1], 10_000))


def test_a_budget_that_nothing_fits_is_refused_with_the_smallest_that_would():
    with pytest.raises(ShoestringError, match="needs at least"):
        choose_segments(CHAINS[0], 20)


def test_on_a_long_chain_the_least_memory_grows_as_the_square_root_of_the_depth():
    least = [least_bytes(chain(*[(1000, 1000, 1)] * depth)) for depth in (16, 64, 256)]
    for short, long in itertools.pairwise(least):
        assert 1.6 < long / short < 2.5  # four times as deep
    assert math.isclose(least[0], 1000 * 2 * math.sqrt(16), rel_tol=0.3)
