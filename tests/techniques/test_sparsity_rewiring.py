"""Rewiring keeps the total of nonzeros, prunes the weak, grows zeros elsewhere, and follows from a saved state."""

import copy
import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shoestring import SGD, Adam, Plan, ShoestringError, apply, builtin
from shoestring.kernels.sparse_index import decode, validate
from shoestring.step import Stepper
from shoestring.techniques import sparsity
from shoestring.techniques.sparsity.bitmap import count_from, threshold_of
from shoestring.techniques.sparsity.conversion import from_dense
from shoestring.techniques.sparsity.layers import SparseLinear
from shoestring.techniques.sparsity.rewiring import Rewiring, Schedule, shares, sparse_layers
from shoestring.training.events import Updated
from shoestring.training.loop import train


def three_layers(nonzero=20, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    sizes = [(30, 70), (70, 50), (50, 20)]
    model = nn.Sequential(*(nn.Linear(*size, dtype=dtype) for size in sizes))
    return from_dense(model, nonzero, layers=("*",), positions="random", seed=seed)


def rewire(model, rewiring, optimizer=None):
    return rewiring.rewire(model, optimizer or torch.optim.SGD(model.parameters(), lr=0.1))


def counts(model):
    return [layer.values.numel() for layer in sparse_layers(model)]


def entries(layer):
    """{position: value} of a layer."""
    return dict(zip(decode(layer.index, layer.numel).tolist(), layer.values.tolist(), strict=True))


# -- what is pruned and grown ----------------------------------------------------------------------------------
@settings(max_examples=40, deadline=None)
@given(
    nonzero=st.floats(0.5, 99),
    method=st.sampled_from(["dsr", "set"]),
    fraction=st.floats(0.001, 0.9),
    threshold=st.sampled_from([1e-9, 0.001, 0.05, 0.1, 10.0]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
)
def test_the_total_of_nonzeros_is_always_the_same(nonzero, method, fraction, threshold, dtype):
    model = three_layers(nonzero, dtype)
    before = counts(model)
    rewiring = Rewiring(method, fraction, threshold=threshold)
    for _ in range(3):
        rewire(model, rewiring)
        assert sum(counts(model)) == sum(before)
        assert method == "dsr" or counts(model) == before
        for layer in sparse_layers(model):
            validate(layer.index, layer.numel, layer.values.numel())


def test_weights_below_the_threshold_go_and_zeros_come_at_free_positions():
    model = three_layers()
    before = [entries(layer) for layer in sparse_layers(model)]
    pruned = rewire(model, Rewiring(threshold=0.05))
    grown = 0
    for old, layer in zip(before, sparse_layers(model), strict=True):
        new = entries(layer)
        survivors = {position: value for position, value in old.items() if abs(value) >= 0.05}
        assert survivors.items() <= new.items()
        fresh = [value for position, value in new.items() if position not in survivors]
        assert not any(fresh)
        grown += len(fresh)
    assert pruned == grown > 0


def test_layers_grow_in_proportion_to_what_survives():
    model = three_layers()
    with torch.no_grad():
        for layer, share in zip(sparse_layers(model), (0.0, 0.2, 0.5), strict=True):
            layer.values.fill_(1)[: int(share * layer.values.numel())] = 0
    survivors = [count_from(layer.values.detach(), 0.5) for layer in sparse_layers(model)]
    pruned = rewire(model, Rewiring(threshold=0.5))
    grown = [now - left for now, left in zip(counts(model), survivors, strict=True)]
    assert sum(grown) == pruned
    for got, left in zip(grown, survivors, strict=True):
        assert got == pytest.approx(pruned * left / sum(survivors), abs=1)


@pytest.mark.parametrize("threshold", [1e-6, 0.001, 1e9])
def test_no_layer_loses_more_than_half_of_its_weights_at_once_however_far_off_the_threshold_is(threshold):
    model = three_layers()
    layers = sparse_layers(model)
    with torch.no_grad():
        layers[1].values.mul_(1e-9)  # all of it below any of the thresholds
    before = [entries(layer) for layer in layers]
    rewire(model, Rewiring(threshold=threshold))
    for old, layer in zip(before, layers, strict=True):
        kept = sorted(old.values(), key=abs)[len(old) // 2 :]
        assert set(kept) <= set(entries(layer).values())


@pytest.mark.parametrize("method", ["dsr", "set"])
@pytest.mark.parametrize("nonzero", [0.5, 1, 2, 5])
def test_most_weights_stay_at_each_rewiring_where_few_are_left(method, nonzero):
    """By the paper's share of all positions, 1% of nonzeros would all go at once."""
    torch.manual_seed(0)
    task = builtin("wrn-10-1", batch=2)
    task = sparsity.apply(task, sparsity.Settings(nonzero, method))
    (hook,), model = task.after_update, task.model
    held = sum(counts(model))
    for _ in range(12):
        for layer in sparse_layers(model):  # as if trained: what was grown is no longer zero
            nn.init.normal_(layer.values, std=0.05)
        pruned = rewire(model, hook)
        assert sum(counts(model)) == held
        assert pruned <= (0.3 if method == "set" else 0.5) * held + len(counts(model))
        assert sum(int(layer.values.count_nonzero()) for layer in sparse_layers(model)) == held - pruned
    assert 0.1 * held < pruned < 0.5 * held  # it goes on, and the threshold has settled


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_of_equal_weights_only_the_wanted_number_goes(value):
    model = three_layers()
    for layer in sparse_layers(model):
        nn.init.constant_(layer.values, value)
    assert rewire(model, Rewiring("set", fraction=0.02)) == sum(round(0.02 * x.numel) for x in sparse_layers(model))


@pytest.mark.parametrize("method", ["dsr", "set"])
@pytest.mark.parametrize("chosen", [{"fraction": 0.2}, {"fraction_multiplier": 30}])
def test_to_rewire_more_than_a_third_of_the_nonzeros_is_refused_where_it_was_asked_for(method, chosen):
    task = builtin("wrn-10-1", device="meta")
    with pytest.raises(ShoestringError, match=r"nonzeros, which are 0\.05 of them: rewire at most 0\.015 at a time"):
        sparsity.apply(task, sparsity.Settings(5, method, **chosen))


@pytest.mark.parametrize("name", ["fraction", "fraction_multiplier", "frequency_multiplier", "updates"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_settings_by_which_nothing_can_be_rewired_are_refused(name, value):
    with pytest.raises(ShoestringError, match=f"{name}=.* use a number above 0"):
        sparsity.apply(builtin("wrn-10-1", device="meta"), sparsity.Settings(30, **{name: value}))


def test_set_prunes_the_smallest_of_each_layer():
    model = three_layers()
    before = [entries(layer) for layer in sparse_layers(model)]
    rewire(model, Rewiring("set", fraction=0.02))
    for old, layer in zip(before, sparse_layers(model), strict=True):
        kept = sorted(old.values(), key=abs)[round(0.02 * layer.numel) :]
        assert sorted(filter(None, entries(layer).values())) == sorted(kept)


def test_every_free_position_is_as_likely():
    times = np.zeros(400)
    for seed in range(600):
        layer = SparseLinear(nn.Linear(20, 20), 100)
        first = set(entries(layer))
        layer.rewire(0, 30, np.random.default_rng(seed))
        times[list(set(entries(layer)) - first)] += 1
    expected = 600 * 0.75 * 30 / 300
    assert abs(times - expected).max() < 5 * expected**0.5


def test_the_threshold_doubles_or_halves_until_the_wanted_number_goes():
    wanted = 0.02 * (30 * 70 + 70 * 50 + 50 * 20)
    for start in (1e-6, 1.0):
        rewiring, model = Rewiring(fraction=0.02, threshold=start), three_layers()
        for _ in range(25):
            for layer in sparse_layers(model):
                nn.init.uniform_(layer.values, -0.1, 0.1)
            before, pruned = rewiring.threshold, rewire(model, rewiring)
            factor = 2 if pruned < 0.9 * wanted else 0.5 if pruned > 1.1 * wanted else 1
            assert rewiring.threshold == before * factor
        assert 0.4 * wanted < pruned < 2.1 * wanted


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 30)), min_size=1), st.floats(0, 1))
def test_shares_add_up_and_stay_within_their_room(layers, part):
    weights, room = zip(*layers, strict=True)
    count = round(part * sum(room))
    given_ = shares(count, weights, room)
    assert sum(given_) == count and all(0 <= g <= r for g, r in zip(given_, room, strict=True))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-4, 4, width=16), min_size=1, max_size=40), st.data())
def test_a_threshold_is_the_least_with_the_wanted_number_below_it(numbers, data):
    values, count = torch.tensor(numbers), data.draw(st.integers(1, len(numbers)))
    threshold = threshold_of(values, count)
    below = len(numbers) - count_from(values, threshold)
    assert below >= count
    assert sum(abs(x) < np.nextafter(np.float32(threshold), np.float32(0)) for x in numbers) < count


# -- the optimizer, and what else is in force ------------------------------------------------------------------
@pytest.mark.parametrize("optimizer", [SGD(momentum=0.9, nesterov=True), Adam()])
def test_the_optimizer_starts_anew_for_rewired_tensors_and_goes_on_for_the_others(optimizer):
    task = sparsity.apply(
        builtin("wrn-10-1", batch=2).with_(optimizer=optimizer), sparsity.Settings(20, positions="random")
    )
    stepper = Stepper(task)
    stepper.step(task.batch)
    state = stepper.optimizer.state
    bias, values = task.model.fc.bias, task.model.blocks[0].conv1.values
    kept = copy.deepcopy(state[bias])
    assert state[values]
    rewire(task.model, task.after_update[0], stepper.optimizer)
    assert values not in state and state[bias].keys() == kept.keys()
    stepper.step(task.batch)
    assert all(t.numel() in (1, values.numel()) for t in state[values].values() if isinstance(t, torch.Tensor))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(),
        Plan(checkpoint="residual-2*", microbatch=2),
        Plan(precision="fp16", checkpoint="residual-2*", microbatch=2),
        Plan(optimizer="8bit", checkpoint="no-bn"),
        Plan(optimizer="fp16", microbatch=2),
        Plan(optimizer="8bit+no-gradient"),
    ],
    ids=lambda plan: "-".join(map(str, plan.techniques().values())) or "plain",
)
def test_training_goes_on_through_rewirings(plan):
    task = sparsity.apply(
        builtin("wrn-10-1", batch=4), sparsity.Settings(30, frequency_multiplier=50, positions="random")
    )
    lean = apply(task, plan)
    total = sum(counts(lean.model))
    before = [layer.index.clone() for layer in sparse_layers(lean.model)]
    losses = [lean.step(task.batch).item() for _ in range(6)]
    assert sum(counts(lean.model)) == total
    assert not all(torch.equal(b, layer.index) for b, layer in zip(before, sparse_layers(lean.model), strict=True))
    assert losses[-1] < losses[0]


def test_rewiring_follows_from_its_saved_state():
    task = sparsity.apply(builtin("wrn-10-1", batch=2), sparsity.Settings(30, frequency_multiplier=100))
    first, model = task.after_update[0], task.model
    first.update = 7
    rewire(model, first)
    twin, second = copy.deepcopy(model), Rewiring(seed=99)
    second.fraction, state = first.fraction, copy.deepcopy(first.state())
    second.restore(state)
    assert (second.update, second.times, second.threshold) == (7, 1, first.threshold)
    rewire(model, first)
    rewire(twin, second)
    for a, b in zip(sparse_layers(model), sparse_layers(twin), strict=True):
        assert torch.equal(a.index, b.index) and torch.equal(a.values, b.values)


def test_static_sparsity_has_no_hook_and_frozen_layers_are_not_rewired():
    task = builtin("wrn-10-1", device="meta")
    assert sparsity.apply(task, sparsity.Settings(30, method="static")).after_update == ()
    model = three_layers()
    model[0].values.requires_grad_(False)
    assert sparse_layers(model) == [model[1], model[2]]


# -- when ------------------------------------------------------------------------------------------------------
def due(schedule, length):
    return [update for update in range(1, length + 1) if schedule.is_due(update, length)]


def test_the_schedule_is_the_papers():
    expected = [*range(100, 12_501, 100), *range(12_600, 40_001, 200), *range(40_400, 70_001, 400),
                *range(70_400, 95_001, 800)]  # fmt: skip
    assert due(Schedule(), 100_000) == expected and Schedule().times(100_000) == len(expected)


def test_periods_stretch_with_the_run_and_a_frequency_rewires_more_often():
    half = due(Schedule(), 50_000)
    assert [*range(100, 6_251, 100)] == [update for update in half if update <= 6_250] and half[-1] <= 47_500
    assert due(Schedule(frequency=2), 100_000)[:20] == [*range(50, 1_001, 50)]


@pytest.mark.parametrize("frequency", [0.125, 0.5, 1, 2])
@pytest.mark.parametrize("length", [30, 100, 250, 500, 1_000, 4_000, 20_000])
def test_a_short_run_is_rewired_some_dozens_of_times_and_the_momentum_has_time_to_build_up(frequency, length):
    found = due(Schedule(frequency=frequency), length)
    gaps = np.diff([0, *found])
    assert len(found) >= min(30, 0.08 * length - 1) and found[-1] <= 0.95 * length
    assert min(gaps) >= 10 and (length < 500 or gaps[-1] > 2 * gaps[0])  # more seldom towards the end


def test_no_run_is_rewired_less_often_than_a_shorter_one():
    times = [Schedule(frequency=0.5).times(length) for length in (20, 50, 90, 200, 400, 700, 1_000, 3_000, 9_000)]
    assert all(later >= earlier - 2 for earlier, later in pairwise(times))  # but for rounding


def test_a_frequency_that_was_asked_for_is_not_changed_for_a_short_run():
    hook = sparsity.apply(
        builtin("wrn-10-1", device="meta"), sparsity.Settings(30, frequency_multiplier=50)
    ).after_update[0]
    assert due(hook.schedule, 40) == [2, 4, *range(8, 17, 4), 24, 32]


def test_a_run_that_knows_its_length_goes_by_it():
    rewired = []

    class Counting(Rewiring):
        def rewire(self, model, optimizer):
            rewired.append(self.update)

    task = builtin("wrn-10-1", batch=2).with_(after_update=(Counting(schedule=Schedule(frequency=100, least=0)),))
    stepper = Stepper(task, length=20)
    for _ in range(20):
        stepper.task.after_update[0](stepper)
    assert rewired == [1, 2, 4, 6, 8, 12, 16]  # every 1, 2, 4, 8 updates up to 2.5, 8, 14 and 19


def test_multipliers_are_those_of_the_papers_tables():
    wrn = sparsity.apply(builtin("wrn-10-1", device="meta"), sparsity.Settings(28)).after_update[0]
    assert (wrn.fraction, wrn.schedule.frequency) == (pytest.approx(2 * 0.01377866), 0.5)
    assert sparsity.multipliers(three_layers(), 50) == (4, 0.125)
    chosen = sparsity.Settings(28, fraction_multiplier=3, frequency_multiplier=7)
    hook = sparsity.apply(builtin("wrn-10-1", device="meta"), chosen).after_update[0]
    assert (hook.fraction, hook.schedule.frequency) == (pytest.approx(3 * 0.01377866), 7)


# -- in a run --------------------------------------------------------------------------------------------------
class Crash(Exception):
    pass


def crash_at(update):
    def listener(event):
        if isinstance(event, Updated) and event.update == update:
            raise Crash

    return listener


def run_of(folder, **how):
    """A run of 12 updates of a sparse WRN in which every second update rewires -> its model."""
    task = builtin("wrn-10-1", batch=2)
    lean = sparsity.apply(task, sparsity.Settings(30, frequency_multiplier=200))
    train(lean, [task.batch] * 4, epochs=3, run=folder, save_every=2, **how)
    return lean.model


def test_a_run_that_crashed_between_rewirings_is_resumed_to_the_bit(tmp_path):
    whole = run_of(tmp_path / "whole")
    with pytest.raises(Crash):
        run_of(tmp_path / "crashed", listeners=[crash_at(7)])
    resumed = run_of(tmp_path / "crashed", resume=True)
    assert [b.shape for b in resumed.buffers()] == [b.shape for b in whole.buffers()]
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_a_short_run_of_a_plan_rewires_and_its_log_says_when(tmp_path):
    task = builtin("wrn-10-1", batch=2, image=8)
    lean = apply(task, Plan(nonzero={"nonzero": 30, "positions": "random"}))
    before = [layer.index.clone() for layer in sparse_layers(lean.model)]
    train(lean, [task.batch] * 20, epochs=2, run=tmp_path / "run")
    assert not any(torch.equal(b, layer.index) for b, layer in zip(before, sparse_layers(lean.model), strict=True))
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    rewired = {line["update"]: line["rewired"] for line in lines if "rewired" in line}
    assert list(rewired) == [10, 20, 30] and lean.task.after_update[0].times == 3
    assert all(0 < number < sum(counts(lean.model)) for number in rewired.values())


def test_a_run_of_another_density_is_not_resumed(tmp_path):
    run_of(tmp_path / "run")
    task = builtin("wrn-10-1", batch=2)
    other = sparsity.apply(task, sparsity.Settings(20, frequency_multiplier=200))
    with pytest.raises(ShoestringError, match="of 14,746 nonzeros in all here and of 22,118 in the save"):
        train(other, [task.batch] * 4, epochs=3, run=tmp_path / "run", save_every=2, resume=True)
