import json
import math
import os
import signal
import threading
from types import SimpleNamespace

import pytest
import torch
from small import Noise, right_answers, task
from torch.nn import functional as F
from torch.utils.data import DataLoader

from shoestring import SGD, Plan, apply
from shoestring.errors import DamagedSave, Diverged, OverBudget, ShoestringError
from shoestring.ledger import Phase
from shoestring.measuring import measure_allocator
from shoestring.phases import current_phase
from shoestring.runs.record import read_record
from shoestring.runs.save import load_weights
from shoestring.runs.state import model_tensors
from shoestring.training.budget import Budget
from shoestring.training.evaluate import Evaluation, evaluating
from shoestring.training.events import Evaluated, Replanned, Saved, Updated
from shoestring.training.interrupts import Interrupted
from shoestring.training.loop import train
from shoestring.training.schedules import Steps, schedule


def log_of(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def saves_of(folder):
    return [int(path.name.removeprefix("update-")) for path in sorted((folder / "saves").iterdir())]


def weights(task):
    return {name: tensor.clone() for name, tensor in model_tensors(task.model).items()}


def assert_same_weights(one, two):
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_log_of_a_sparse_run_says_when_it_rewires_and_when_it_did(tmp_path):
    sparse = apply(task(), Plan(nonzero={"nonzero": 30, "method": "set"}))
    train(sparse, Noise(batches=20), epochs=2, run=tmp_path)
    first, *others = log_of(tmp_path)
    done = [line["update"] for line in others if "rewired" in line]
    schedule = "after every 10 updates until 5, 10 until 16, 10 until 28, 10 until 38: 3 times in 40 updates"
    assert first["rewiring"] == schedule and done == [10, 20, 30]
    assert not any("rewiring" in line for line in others)


def test_training_lowers_the_loss_and_tells_what_it_did(tmp_path):
    told = []
    record = train(task(), Noise(), epochs=6, evaluation=right_answers(), run=tmp_path / "run", listeners=[told.append])
    lines = log_of(tmp_path / "run")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 30 and sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert [line["epoch"] for line in lines if "accuracy" in line] == [1, 2, 3, 4, 5, 6]
    assert record.quality == lines[-1]["accuracy"] and record.finished and record.updates == 30
    kinds = [type(event) for event in told]
    assert (kinds.count(Updated), kinds.count(Evaluated), kinds.count(Saved)) == (30, 6, 6)
    assert read_record(tmp_path / "run" / "record.json") == record


def test_the_trainer_does_what_a_hand_written_loop_does():
    ours, theirs = task(), task()
    train(ours, Noise(), epochs=2, seed=3)
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(theirs.model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    for epoch in range(2):
        for number in range(5):
            theirs.loss(theirs.model, Noise().read(epoch, number)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(weights(ours), weights(theirs))


def test_the_schedule_sets_each_updates_learning_rate(tmp_path):
    schedule = Steps(updates=10, until=(0.5, 1.0), factors=(1.0, 0.2))
    train(task(), Noise(), updates=10, schedule=schedule, run=tmp_path / "run")
    rates = [line["lr"] for line in log_of(tmp_path / "run")]
    assert rates == pytest.approx([0.05] * 5 + [0.01] * 5)


def test_a_run_by_updates_ends_within_an_epoch_and_is_evaluated_there(tmp_path):
    train(task(), Noise(), updates=7, evaluation=right_answers(), run=tmp_path / "run")
    assert [line["update"] for line in log_of(tmp_path / "run") if "accuracy" in line] == [5, 7]


@pytest.mark.parametrize("length", [{}, {"epochs": 1, "updates": 5}, {"epochs": 0}, {"updates": -1}])
def test_a_length_that_is_not_clear_is_refused(length):
    with pytest.raises(ShoestringError, match="give"):
        train(task(), Noise(), **length)


def test_the_last_two_saves_the_best_and_those_to_average_are_kept(tmp_path):
    qualities = iter([1.0, 9.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    falling = Evaluation("made up", lambda model: next(qualities))
    record = train(task(), Noise(), epochs=6, save_every=2, evaluation=falling, run=tmp_path / "a")
    assert saves_of(tmp_path / "a") == [10, 28, 30] and (record.best_update, record.best_quality) == (10, 9.0)
    train(task(), Noise(), epochs=6, save_every=2, average=3, run=tmp_path / "b")
    assert saves_of(tmp_path / "b") == [20, 25, 28, 30]


def test_a_save_is_also_due_when_the_last_is_long_ago(tmp_path):
    told = []
    train(task(), Noise(), epochs=1, save_seconds=0, run=tmp_path / "run", listeners=[told.append])
    assert [event.update for event in told if isinstance(event, Saved)] == [1, 2, 3, 4, 5]


def test_the_best_is_the_lowest_where_lower_is_better_and_never_what_is_not_a_number():
    losses = iter([math.nan, 3.0, math.nan, 2.0, 5.0])
    lower = Evaluation("loss", lambda model: next(losses), higher=False)
    record = train(task(), Noise(), epochs=5, evaluation=lower)
    assert (record.best_quality, record.best_update) == (2.0, 20)


def test_the_averaged_model_is_the_mean_of_the_last_saves_and_the_model_keeps_its_last_weights(tmp_path):
    lean = task()
    record = train(lean, Noise(), epochs=5, average=3, evaluation=right_answers(), run=tmp_path / "run")
    means = []
    for update in (15, 20, 25):
        other = task()
        load_weights(other.model, tmp_path / "run" / "saves" / f"update-{update:010d}")
        means.append(weights(other))
    assert_same_weights(means[-1], weights(lean))
    averaged = task()
    load_weights(averaged.model, tmp_path / "run" / "averaged.safetensors")
    for name, tensor in weights(averaged).items():
        if tensor.is_floating_point():
            assert torch.allclose(tensor, (means[0][name] + means[1][name] + means[2][name]) / 3)
    assert record.averaged_quality == right_answers()(averaged.model)


def test_evaluation_leaves_modes_gradients_and_generators_as_they_were(tmp_path):
    model = task().model
    model.blocks[0].eval()
    before = torch.get_rng_state()
    with evaluating(model):
        assert not model.training and not model(torch.ones(1, 1, 6, 6)).requires_grad
    assert model.training and not model.blocks[0].training and model.blocks[1].training
    assert torch.equal(before, torch.get_rng_state())


class Stop:
    """A listener that sends this process a signal after some update."""

    def __init__(self, update, number=signal.SIGINT, times=1):
        self.update, self.number, self.times = update, number, times

    def __call__(self, event):
        if isinstance(event, Updated) and event.update == self.update:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_saves_says_how_to_resume_and_loses_nothing(tmp_path, number, code):
    whole = task()
    train(whole, Noise(), epochs=3, evaluation=right_answers(), run=tmp_path / "whole")
    how = {"epochs": 3, "evaluation": right_answers(), "run": tmp_path / "run", "how_to_resume": "this again"}
    handler = signal.getsignal(number)
    with pytest.raises(Interrupted, match="stopped after update 8 of 15: resume with `this again`") as error:
        train(task(), Noise(), listeners=[Stop(8, number)], **how)
    assert error.value.exit_code == code and signal.getsignal(number) is handler
    resumed = task()
    train(resumed, Noise(), resume=True, **how)
    assert_same_weights(weights(whole), weights(resumed))
    assert log_of(tmp_path / "whole") == log_of(tmp_path / "run")


def test_an_interrupt_in_an_evaluation_ends_it_and_it_is_done_when_resumed(tmp_path):
    def interrupted(model):
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the signal ended the evaluation")

    how = {"epochs": 2, "run": tmp_path / "run"}
    with pytest.raises(Interrupted):
        train(task(), Noise(), evaluation=Evaluation("accuracy", interrupted), **how)
    record = train(task(), Noise(), evaluation=right_answers(), resume=True, **how)
    train(task(), Noise(), epochs=2, evaluation=right_answers(), run=tmp_path / "whole")
    assert log_of(tmp_path / "whole") == log_of(tmp_path / "run") and record.finished


def test_a_second_interrupt_stops_at_once(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(task(), Noise(), epochs=3, run=tmp_path / "run", listeners=[Stop(8, times=2)])


def test_training_in_a_thread_leaves_signals_to_the_program():
    thread = threading.Thread(target=lambda: train(task(), Noise(), epochs=1))
    before = signal.getsignal(signal.SIGINT)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_loss_that_is_not_finite_stops_the_run_and_the_last_good_save_stays(tmp_path):
    bad = Noise(batches=4)
    good = bad.read
    bad.read = lambda epoch, number: (
        good(epoch, number)[0] * (math.nan if (epoch, number) == (1, 2) else 1),
        good(epoch, number)[1],
    )
    words = r"the loss is nan after 6 updates.*update 7, .*the save of update 4 is good"
    with pytest.raises(Diverged, match=words) as error:
        train(task(), bad, epochs=3, run=tmp_path / "run")
    assert error.value.exit_code == 5 and saves_of(tmp_path / "run") == [4]


def test_weights_that_are_not_finite_are_never_saved(tmp_path):
    lean = task()

    def spoil(event):
        if isinstance(event, Updated) and event.update == 8:
            lean.model.head.bias.data[0] = math.inf

    with pytest.raises(Diverged, match="weights are no longer finite at update 8"):
        train(lean, Noise(), epochs=3, save_every=4, run=tmp_path / "run", listeners=[spoil])
    assert saves_of(tmp_path / "run") == [4, 5]


def test_a_folder_of_a_run_is_not_used_for_another(tmp_path):
    run = tmp_path / "run"
    train(task(), Noise(), epochs=1, run=run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(ShoestringError, match="holds a run already: resume it with --resume"):
        train(task(), Noise(), epochs=1, run=run)
    with pytest.raises(ShoestringError, match=r"updates was 5 and is now 10.*seed was 0 and is now 1"):
        train(task(), Noise(), epochs=2, seed=1, run=run, resume=True)
    with pytest.raises(ShoestringError, match="techniques microbatch was None and is now 2"):
        train(apply(task(), Plan(microbatch=2)), Noise(), epochs=1, run=run, resume=True)
    with pytest.raises(ShoestringError, match=r"optimizer was SGD\(lr=0.05.* and is now SGD\(lr=0.5"):
        train(task(SGD(lr=0.5)), Noise(), epochs=1, run=run, resume=True)
    own = task(lambda parameters: torch.optim.SGD(parameters, lr=0.7))
    with pytest.raises(ShoestringError, match=r"optimizer was SGD\(lr=0.05.* and is now SGD\(lr=0.7"):
        train(own, Noise(), epochs=1, run=run, resume=True)
    with pytest.raises(ShoestringError, match="batch was None and is now 6"):
        train(task(), Noise(), epochs=1, run=run, resume=True, settings={"batch": 6})
    with pytest.raises(ShoestringError, match=r"remembers was \[\] and is now \['masks'\]"):
        train(task(), Noise(), epochs=1, run=run, resume=True, generators={"masks": torch.Generator()})
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_folder_with_other_things_or_without_a_run_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ShoestringError, match=r"holds 'thesis.tex', which no run wrote"):
        train(task(), Noise(), epochs=1, run=tmp_path)
    with pytest.raises(ShoestringError, match="holds no run to resume"):
        train(task(), Noise(), epochs=1, run=tmp_path / "new", resume=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(ShoestringError, match=r"file cannot be written: .*exists"):
        train(task(), Noise(), epochs=1, run=tmp_path / "file")


def test_two_processes_cannot_train_in_one_folder(tmp_path):
    def another(event):
        train(task(), Noise(), epochs=1, run=tmp_path / "run", resume=True)

    with pytest.raises(ShoestringError, match="another process is training in"):
        train(task(), Noise(), epochs=1, run=tmp_path / "run", listeners=[another])


def test_a_finished_run_can_be_resumed_and_changes_nothing(tmp_path):
    how = {"epochs": 3, "average": 2, "evaluation": right_answers(), "run": tmp_path / "run"}
    train(task(), Noise(), **how)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    record = train(task(), Noise(), resume=True, **how)
    assert record.finished and before == {path: path.read_bytes() for path in before}


def test_a_run_whose_saves_are_all_damaged_is_not_silently_begun_anew(tmp_path):
    train(task(), Noise(), epochs=1, run=tmp_path / "run")
    for path in (tmp_path / "run").rglob("manifest.json"):
        path.write_bytes(path.read_bytes().replace(b"update", b"upDate"))
    with pytest.raises(DamagedSave, match="no other save is undamaged"):
        train(task(), Noise(), epochs=1, run=tmp_path / "run", resume=True)


def test_a_damaged_save_costs_only_the_updates_since_the_one_before(tmp_path):
    whole = task()
    how = {"epochs": 4, "evaluation": right_answers()}
    train(whole, Noise(), run=tmp_path / "whole", **how)
    with pytest.raises(Interrupted):
        train(task(), Noise(), run=tmp_path / "run", listeners=[Stop(17)], **how)
    path = tmp_path / "run" / "saves" / "update-0000000017" / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    resumed = task()
    with pytest.warns(UserWarning, match="continuing from update 15"):
        train(resumed, Noise(), run=tmp_path / "run", resume=True, **how)
    assert_same_weights(weights(whole), weights(resumed))
    assert log_of(tmp_path / "run") == log_of(tmp_path / "whole")


def test_a_log_that_lost_its_end_is_told(tmp_path):
    with pytest.raises(Interrupted):
        train(task(), Noise(), epochs=3, run=tmp_path / "run", listeners=[Stop(8)])
    (tmp_path / "run" / "log.jsonl").write_text("")
    with pytest.warns(UserWarning, match=r"log.jsonl has 0 bytes where .* were written"):
        train(task(), Noise(), epochs=3, run=tmp_path / "run", resume=True)


def test_any_iterable_of_batches_is_data_and_is_resumed_within_an_epoch(tmp_path):
    def loader():
        pairs = [tuple(part[0] for part in Noise(size=1).read(0, n)) for n in range(12)]

        def augmented(items):
            images, labels = zip(*items, strict=True)
            return torch.stack(images) + 0.1 * torch.randn(len(images), 1, 6, 6), torch.stack(labels)

        return DataLoader(pairs, batch_size=3, shuffle=True, collate_fn=augmented, generator=torch.Generator())

    whole, resumed = task(), task()
    train(whole, loader(), epochs=3, run=tmp_path / "whole")
    with pytest.raises(Interrupted):
        train(task(), loader(), epochs=3, run=tmp_path / "run", listeners=[Stop(7)])
    train(resumed, loader(), epochs=3, run=tmp_path / "run", resume=True)
    assert_same_weights(weights(whole), weights(resumed))
    losses = [line["loss"] for line in log_of(tmp_path / "run")]
    assert losses == [line["loss"] for line in log_of(tmp_path / "whole")] and len(set(losses)) == 12


def test_the_callers_generators_are_left_alone():
    small = task()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train(small, Noise(), epochs=1)
    assert torch.equal(torch.rand(3), expected)


# -- the budget -------------------------------------------------------------------------------------------
def test_the_first_two_updates_are_measured_and_nothing_is_changed_by_it():
    measured, plain = task(), task()
    record = train(measured, Noise(), epochs=2, meter=measure_allocator)
    train(plain, Noise(), epochs=2)
    assert_same_weights(weights(measured), weights(plain))
    state = sum(tensor.nbytes for tensor in weights(measured).values())
    assert record.measured_peak_bytes == record.measured["peak_bytes"] > 2 * state


def test_a_batch_larger_than_all_before_is_measured_too():
    class Growing(Noise):
        def read(self, epoch, number):
            images, labels = super().read(epoch, number)
            return images[: 2 + number], labels[: 2 + number]

    calls = []

    def meter(run, held):
        calls.append(len(calls))
        return measure_allocator(run, held)

    one = train(task(), Growing(batches=5), epochs=3, meter=meter)
    assert len(calls) == 5  # each of the first epoch, none of the others
    updates, sizes = zip(*one.measured_peaks, strict=True)
    assert set(updates) <= {1, 2, 3, 4, 5} and sorted(set(sizes)) == list(sizes)
    assert sizes[-1] == one.measured_peak_bytes
    assert one.measured_peak_bytes > train(task(), Growing(batches=2), epochs=1, meter=meter).measured_peak_bytes


def test_a_run_that_is_broken_off_and_resumed_has_the_measured_peaks_of_a_whole_one(tmp_path):
    def breaks(event):
        if isinstance(event, Updated) and event.update == 4:
            raise KeyError("broken off")

    how = {"epochs": 2, "save_every": 1, "meter": measure_allocator}
    whole = train(task(), Noise(), **how)
    with pytest.raises(KeyError):
        train(task(), Noise(), run=tmp_path / "run", listeners=[breaks], **how)
    resumed = train(task(), Noise(), run=tmp_path / "run", resume=True, **how)
    assert resumed.measured_peaks == whole.measured_peaks and len(whole.measured_peaks) > 0


def test_a_step_over_the_budget_stops_the_run_after_it_was_measured(tmp_path):
    with pytest.raises(
        OverBudget, match=r"a step occupies .* \(measured, in .*\), and the budget is 1.000 KB"
    ) as error:
        train(task(), Noise(), epochs=2, budget_bytes=1000, meter=measure_allocator, run=tmp_path / "run")
    assert error.value.exit_code == 3 and len(log_of(tmp_path / "run")) == 1


def test_a_watch_stops_a_step_before_the_weights_change():
    lean, used = task(), iter(range(0, 10**9, 1000))
    before = {name: p.clone() for name, p in lean.model.named_parameters()}
    with pytest.raises(OverBudget, match="seen at the start of backward"):
        train(lean, Noise(), epochs=2, budget_bytes=500, watch=lambda: next(used))
    assert current_phase() is Phase.BUILD
    assert all(torch.equal(before[name], p) for name, p in lean.model.named_parameters())


@pytest.mark.parametrize("how", ["meter", "watch"])
def test_a_run_over_its_budget_goes_on_from_the_same_update_when_replanned(tmp_path, how):
    plans = []

    def replan(lean, used_bytes):
        plans.append(used_bytes)
        return apply(task(model=lean.model), Plan(microbatch=2))

    def watch():
        return 10**6 if not plans and len(log_of(run)) == 7 else 0

    def peak(plan):
        return train(apply(task(), plan), Noise(), updates=2, meter=measure_allocator).measured_peak_bytes

    run = tmp_path / "run"
    if how == "meter":
        budget = (peak(Plan()) + peak(Plan(microbatch=2))) // 2
        limits = {"meter": measure_allocator, "budget_bytes": budget}
    else:
        limits = {"watch": watch, "budget_bytes": 10**5}
    record = train(task(), Noise(), epochs=3, run=run, replan=replan, **limits)
    assert [line["update"] for line in log_of(run)] == list(range(1, 16))
    assert len(plans) == 1 and record.settings["techniques"] == {"microbatch": 2} and record.finished
    assert json.loads((run / "plan.json").read_text())["microbatch"] == 2
    again = apply(task(), Plan(microbatch=2))
    train(again, Noise(), epochs=3, run=run, resume=True)


class Longer(Noise):
    """From the fourth batch on, four times as many images as the task was planned for."""

    def read(self, epoch, number):
        return Noise(size=24 if number > 2 else 6).read(epoch, number)


def test_a_batch_larger_than_planned_is_refused_before_it_runs_if_it_would_break_the_budget(tmp_path):
    budget = train(task(), Noise(), updates=2, meter=measure_allocator).measured_peak_bytes
    with pytest.raises(OverBudget, match=r"predicted for a batch of .* larger than planned.* --replan"):
        train(task(), Longer(), epochs=1, budget_bytes=budget, meter=measure_allocator, run=tmp_path / "run")
    assert len(log_of(tmp_path / "run")) == 3


def test_replanned_a_run_goes_on_with_smaller_microbatches_of_the_same_batch(tmp_path):
    budget = train(task(), Noise(), updates=2, meter=measure_allocator).measured_peak_bytes
    limits = {"budget_bytes": budget, "meter": measure_allocator, "run": tmp_path / "run"}
    told = []
    record = train(task(), Longer(), epochs=1, replan=True, listeners=[told.append], **limits)
    assert record.finished and record.measured_peak_bytes <= budget
    assert record.settings["techniques"] == {"microbatch": 3}
    assert [event.update for event in told if isinstance(event, Replanned)] == [3]
    assert [line["update"] for line in log_of(tmp_path / "run")] == [1, 2, 3, 4, 5]


def test_an_update_is_measured_again_once_more_outlives_it():
    readings, held = [], [torch.zeros(4)]

    def meter(run, tensors):
        run()
        readings.append(SimpleNamespace(peak_bytes=sum(t.nbytes for t in tensors)))
        return readings[-1]

    budget, batch = Budget(None, meter, None), torch.zeros(1)
    for update in range(6):
        budget.run(lambda: torch.zeros(()), batch, lambda: held)
        if update == 3:  # as where a loss scale let the first updates be skipped
            held.append(torch.zeros(8))
    assert [reading.peak_bytes for reading in readings] == [20, 20, 52]


def test_seconds_and_measured_bytes_are_in_a_log_of_their_own_that_a_resumed_run_continues(tmp_path):
    def stop(event):
        if isinstance(event, Updated) and event.update == 7:
            raise KeyboardInterrupt

    class Reading:
        peak_bytes, to_json = 1000, staticmethod(dict)

    def meter(step, held):
        step()
        return Reading

    how = {"epochs": 2, "run": tmp_path / "run", "meter": meter, "evaluation": right_answers()}
    with pytest.raises(KeyboardInterrupt):
        train(task(), Noise(), listeners=[stop], **how)
    train(task(), Noise(), resume=True, **how)
    lines = [json.loads(line) for line in (tmp_path / "run" / "measures.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines if "seconds" in line] == list(range(1, 11))
    assert [line["update"] for line in lines if "evaluation_seconds" in line] == [5, 10]
    assert {line["update"] for line in lines if "bytes" in line} >= {1, 2} and all(
        line.get("seconds", 0) >= 0 for line in lines
    )


def test_a_run_that_is_made_longer_and_stopped_is_not_called_finished(tmp_path):
    class Stopped(Exception):
        pass

    def stop(event):
        if isinstance(event, Updated) and event.update == 12:
            raise Stopped

    train(task(), Noise(), epochs=1, run=tmp_path / "run")
    with pytest.raises(Stopped):
        train(task(), Noise(), epochs=3, run=tmp_path / "run", resume=True, listeners=[stop])
    record = read_record(tmp_path / "run" / "record.json")
    assert record.updates == 10 and not record.finished


def test_a_run_whose_schedule_is_not_stretched_can_be_made_longer_and_ends_as_if_it_had_been(tmp_path):
    one, other = task(), task()
    train(one, Noise(), epochs=1, run=tmp_path / "run")
    record = train(one := task(), Noise(), epochs=3, run=tmp_path / "run", resume=True)
    train(other, Noise(), epochs=3, run=tmp_path / "whole")
    assert record.updates == 15 and record.settings["updates"] == 15 and record.finished
    for mine, wanted in zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True):
        assert torch.equal(mine, wanted)
    with pytest.raises(ShoestringError, match="15 updates are done already, and 5 are asked for"):
        train(task(), Noise(), epochs=1, run=tmp_path / "run", resume=True)
    train(task(), Noise(), epochs=1, schedule=schedule("cosine", 5), run=tmp_path / "cosine")
    with pytest.raises(ShoestringError, match="the schedule of the learning rate is stretched"):
        train(task(), Noise(), epochs=2, schedule=schedule("cosine", 10), run=tmp_path / "cosine", resume=True)


def test_other_batches_of_the_same_number_are_noticed_by_a_resumed_run(tmp_path):
    batches = [Noise().read(0, number) for number in range(3)]
    train(task(), batches, epochs=1, run=tmp_path / "run")
    train(task(), [*batches], epochs=2, run=tmp_path / "run", resume=True)
    others = [batches[0], (batches[1][0] + 1, batches[1][1]), batches[2]]
    with pytest.raises(ShoestringError, match="its data have changed"):
        train(task(), others, epochs=3, run=tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    "plan", [Plan(), Plan(precision="bf16"), Plan(microbatch=2)], ids=["plain", "bf16", "microbatch"]
)
def test_a_lean_task_is_evaluated_on_any_batches_and_stays_as_it_is(plan):
    lean = apply(task(), plan)
    batches = [Noise().read(0, number) for number in range(2)]
    before = {name: tensor.clone() for name, tensor in lean.model.state_dict().items()}
    mean = lean.evaluate(batches)
    right = lean.evaluate(torch.utils.data.DataLoader(batches, batch_size=None),
                          lambda model, batch: float((model(batch[0]).argmax(1) == batch[1]).sum()))  # fmt: skip
    lean.model.eval()
    with torch.no_grad():
        answers = [lean.model(images) for images, _ in batches]
    labels = [labels for _, labels in batches]
    assert mean == pytest.approx(float(F.cross_entropy(torch.cat(answers), torch.cat(labels))), rel=0.01)
    assert right == pytest.approx(float((torch.cat(answers).argmax(1) == torch.cat(labels)).float().mean()))
    assert all(torch.equal(tensor, before[name]) for name, tensor in lean.model.state_dict().items())


@pytest.mark.parametrize(
    "name, words", [("lr", r"SGD\(lr=...\)"), ("epoch", "did you mean epochs?"), ("zzz", "it takes epochs")]
)
def test_a_keyword_that_train_does_not_take_is_refused_with_the_one_that_was_meant(name, words):
    with pytest.raises(ShoestringError, match=rf"takes no '{name}'.*{words}"):
        train(task(), Noise(), updates=1, **{name: 3})


@pytest.mark.parametrize("name, value", [("epochs", 1.5), ("epochs", "2"), ("seed", "a"), ("schedule", "cosine")])
def test_a_keyword_of_a_wrong_kind_is_refused_before_any_work(name, value):
    with pytest.raises(ShoestringError, match=rf"train\(\) takes .* {name}.* and got {value!r}"):
        train(task(), Noise(), **{"epochs": 1} | {name: value})


@pytest.fixture
def heard():
    """The tests themselves may run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_closed_terminal_saves_the_run_unless_that_signal_is_ignored_as_by_nohup(tmp_path, heard):
    def hang_up(event):
        if isinstance(event, Updated) and event.update == 3:
            os.kill(os.getpid(), signal.SIGHUP)

    with pytest.raises(Interrupted, match="stopped after update 3") as error:
        train(task(), Noise(), epochs=1, run=tmp_path / "closed", listeners=[hang_up])
    assert error.value.exit_code == 129 and saves_of(tmp_path / "closed") == [3]
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert train(task(), Noise(), epochs=1, run=tmp_path / "nohup", listeners=[hang_up]).finished
    finally:
        signal.signal(signal.SIGHUP, before)
