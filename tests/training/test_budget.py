"""A budget holds for all of a run: rewiring, other shapes, evaluations, saves and averaging are measured too."""

import json
from types import SimpleNamespace

import pytest
import torch
from small import Net, Noise, task

from shoestring import Plan, apply
from shoestring.errors import OverBudget
from shoestring.measuring import measure_allocator
from shoestring.measuring.counted import is_available, measure_counted
from shoestring.runs.folder import RunFolder
from shoestring.techniques import sparsity
from shoestring.training.budget import FIRST, PACE, Budget
from shoestring.training.evaluate import Evaluation, mean_loss, tell_progress
from shoestring.training.loop import train


def measured_updates(batches, more=lambda update: False):
    """Which of these updates a budget measures."""
    found, now = [], 0

    def meter(run, held):
        found.append(now)
        run()
        return SimpleNamespace(peak_bytes=1)

    budget = Budget(100, meter, None)
    for now, batch in enumerate(batches):
        budget.run(lambda: torch.zeros(()), batch, list, more(now))
    return found


def test_updates_that_do_more_than_others_are_measured_first_and_then_now_and_then():
    found = measured_updates([torch.zeros(4)] * 1000, more=lambda update: update % 10 == 9)
    rewired = [update for update in found if update % 10 == 9]
    assert rewired[:FIRST] == [9, 19, 29, 39, 49] and {0, 1, 500} <= set(found)
    gaps = [after - before for before, after in zip(rewired[FIRST - 1 :], rewired[FIRST:], strict=False)]
    assert gaps and all(PACE <= gap < PACE + 10 for gap in gaps)


def test_the_first_batch_of_another_shape_is_measured_though_it_is_no_larger():
    wide, high, small = torch.zeros(2, 8), torch.zeros(8, 2), torch.zeros(3)
    batches = [wide] * 10 + [high] * 10 + [small] * 10 + [wide, high, small] * 5 + [wide.int()]
    assert measured_updates(batches) == [0, 1, 10, 20, 45]


def test_data_whose_every_batch_has_a_shape_of_its_own_costs_one_measured_update_in_64():
    largest = torch.zeros(10_000)
    found = measured_updates([largest, *(torch.zeros(1, 5000 - n) for n in range(600))])
    assert len(found) <= 3 + FIRST + 600 / PACE


def test_every_rewiring_of_a_short_run_is_measured(tmp_path):
    lean = apply(sparsity.apply(task(), sparsity.Settings(50, frequency_multiplier=100)), Plan())
    train(lean, Noise(), epochs=8, run=tmp_path, meter=measure_allocator, budget_bytes=10**7)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    rewired = [line["update"] for line in lines if "rewired" in line]
    measures = [json.loads(line) for line in (tmp_path / "measures.jsonl").read_text().splitlines()]
    assert len(rewired) >= 2 and set(rewired[:FIRST]) <= {line["update"] for line in measures if "bytes" in line}


# -- between steps -------------------------------------------------------------------------------------------------
def hungry(megabytes):
    """An evaluation that takes some memory of its own."""

    def measure(model):
        return float(torch.zeros(megabytes * 250_000).sum())

    return Evaluation("hungry", measure)


def test_an_evaluation_over_the_budget_stops_the_run(tmp_path):
    how = {"epochs": 1, "budget_bytes": 3_000_000, "meter": measure_allocator}
    with pytest.raises(
        OverBudget, match=r"the evaluation occupies 4\.0.* MB \(measured\), and the budget is 3\.000 MB"
    ):
        train(task(), Noise(), evaluation=hungry(4), run=tmp_path / "over", **how)
    record = train(task(), Noise(), evaluation=hungry(2), run=tmp_path / "within", **how)
    assert record.finished and 2_000_000 < record.measured_beside["evaluation"] < 3_000_000


def test_an_evaluation_that_has_no_room_for_a_batch_takes_it_in_pieces(tmp_path):
    """A batch of 200 beside a plan of microbatches of 2, of which the evaluation was not told."""

    def quality(name, **limits):
        lean = apply(task(), Plan(microbatch=2))
        judged = mean_loss(task(), Noise(2, size=200, seed=7))
        return train(lean, Noise(), epochs=1, evaluation=judged, run=tmp_path / name, **limits)

    free = quality("free", budget_bytes=10**9, meter=measure_allocator)
    limit = (free.measured_peak_bytes + free.measured_beside["evaluation"]) // 2
    tight = quality("tight", budget_bytes=limit, meter=measure_allocator)
    assert free.measured_beside["evaluation"] > limit >= tight.measured_beside["evaluation"]
    assert tight.best_quality == pytest.approx(free.best_quality, rel=1e-5)


def test_measuring_an_evaluation_changes_no_bit_of_the_run(tmp_path):
    """The first one is begun under the meter, broken off, and done again: also where it draws random numbers."""

    def drawing(model):
        data = Noise(4, size=20, seed=7)
        judged = mean_loss(task(), data)
        return judged(model) + float(torch.rand(()))

    runs = {}
    for name, limits in {"plain": {}, "metered": {"budget_bytes": 10**7, "meter": measure_allocator}}.items():
        small = task()
        train(small, Noise(), epochs=3, evaluation=Evaluation("drawn", drawing), run=tmp_path / name, **limits)
        runs[name] = (tmp_path / name / "log.jsonl").read_bytes(), small.model.state_dict()
    assert runs["plain"][0] == runs["metered"][0]
    assert all(torch.equal(runs["plain"][1][key], value) for key, value in runs["metered"][1].items())


def test_a_save_that_takes_too_much_is_whole_and_stops_the_run(tmp_path):
    class Part:
        def state(self):
            return {"copy": torch.zeros(1_000_000)}

        def restore(self, state):
            pass

    how = {"epochs": 1, "budget_bytes": 3_000_000, "meter": measure_allocator, "stateful": {"part": Part()}}
    with pytest.raises(OverBudget, match=r"the save occupies 4\.0"):
        train(task(), Noise(), run=tmp_path, **how)
    assert RunFolder(tmp_path).saves.newest().update == 5


def test_averaged_weights_that_have_no_room_beside_a_sparse_model_are_written_and_not_evaluated(tmp_path):
    def sparse():
        wide = task(model=Net(channels=96), batch=Noise(size=2).read(0, 0))
        return apply(sparsity.apply(wide, sparsity.Settings(5)), Plan())

    data = Noise(2, size=2)
    how = {"epochs": 2, "average": 2, "evaluation": Evaluation("one", lambda model: 1.0), "meter": measure_allocator}
    peak = train(sparse(), data, run=tmp_path / "free", **how).measured_peak_bytes
    record = train(sparse(), data, run=tmp_path / "roomy", budget_bytes=20 * peak, **how)
    assert record.averaged_quality is not None and record.measured_beside.keys() == {"evaluation", "save", "averaging"}
    held = sum(tensor.nbytes for tensor in sparse().held())
    room = held + (tmp_path / "roomy" / "averaged.safetensors").stat().st_size
    assert room > peak, "or there is nothing to refuse"
    with pytest.warns(UserWarning, match="the averaged weights are not evaluated"):
        record = train(sparse(), data, run=tmp_path / "tight", budget_bytes=(peak + room) // 2, **how)
    assert record.finished and record.averaged_quality is None
    assert (tmp_path / "tight" / "averaged.safetensors").exists()


def test_a_run_that_may_be_replanned_tells_of_an_evaluation_over_the_budget_and_goes_on(tmp_path):
    how = {"epochs": 2, "budget_bytes": 3_000_000, "meter": measure_allocator, "replan": True}
    with pytest.warns(UserWarning, match=r"the evaluation occupies 4\.0.*; the run goes on"):
        assert train(task(), Noise(), evaluation=hungry(4), run=tmp_path, **how).finished


@pytest.mark.skipif(not is_available(), reason="the core of this checkout does not count, or the system")
@pytest.mark.parametrize("meter", [measure_counted, measure_allocator])
def test_a_meter_that_costs_little_sees_a_step_that_no_rule_would_have_measured(meter, tmp_path):
    calls = iter(range(100))

    def loss(model, batch):
        scratch = torch.empty(10**7 if next(calls) == 5 else 1, dtype=torch.uint8)
        return task().loss(model, batch) + 0 * scratch.numel()

    how = {"epochs": 2, "budget_bytes": 5_000_000, "meter": meter, "run": tmp_path}
    if meter is measure_allocator:
        train(task().with_(loss=loss), Noise(), **how)
        return
    with pytest.raises(OverBudget, match=r"a step occupies 1\d\.\d\d MB \(measured\)"):
        train(task().with_(loss=loss), Noise(), **how)
    lines = [json.loads(line) for line in (tmp_path / "measures.jsonl").read_text().splitlines()]
    assert len(lines) == 6 and all("bytes" in line for line in lines)


def by_epoch(lean, values):
    """The value of the epoch that a run of Noise's five batches is in."""
    return values[(lean.stepper.updates - 1) // 5]


@pytest.mark.skipif(not is_available(), reason="the core of this checkout does not count, or the system")
@pytest.mark.parametrize("epochs", [[[1, 1], [4, 1]], [[1, 1, 4]] * 2], ids=["a later one", "its third batch"])
def test_a_meter_that_costs_little_measures_all_of_every_evaluation(epochs, tmp_path):
    def trained(name, **more):
        def measure(model):
            megabytes = by_epoch(lean, epochs)
            for number, size in enumerate(megabytes):
                torch.empty(size * 10**6, dtype=torch.uint8)
                tell_progress(number + 1, len(megabytes))
            return 1.0

        lean, how = apply(task(), Plan()), {"budget_bytes": 3_000_000, "meter": measure_counted} | more
        return train(lean, Noise(), epochs=2, evaluation=Evaluation("one", measure), run=tmp_path / name, **how)

    with pytest.raises(OverBudget, match=r"the evaluation occupies 4\.0"):
        trained("over")
    with pytest.warns(UserWarning) as told:
        assert trained("on", replan=True).measured_beside["evaluation"] > 4_000_000
    assert sum("the evaluation occupies" in str(warning.message) for warning in told) == 1


@pytest.mark.skipif(not is_available(), reason="the core of this checkout does not count, or the system")
def test_a_meter_that_costs_little_measures_every_save(tmp_path):
    class Part:
        def state(self):
            return {"copy": torch.zeros(by_epoch(lean, [1, 1, 1_000_000]))}

        def restore(self, state):
            pass

    lean = apply(task(), Plan())
    how = {"epochs": 3, "budget_bytes": 3_000_000, "meter": measure_counted, "stateful": {"part": Part()}}
    with pytest.raises(OverBudget, match=r"the save occupies 4\.0"):
        train(lean, Noise(), run=tmp_path, **how)
    assert RunFolder(tmp_path).saves.newest().update == 15
