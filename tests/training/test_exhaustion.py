"""Memory that the system does not have: said in one line with the save to go on from, or the run goes on with less."""

import subprocess
import sys
import textwrap
import threading
import warnings
from weakref import WeakSet

import pytest
import torch

from shoestring import Plan, Task, apply, exhaustion, train
from shoestring.errors import OutOfMemory, OverBudget
from shoestring.exhaustion import asked_bytes, is_exhaustion, out_of_memory
from shoestring.limits import Room
from shoestring.training.evaluate import mean_loss
from shoestring.training.resumable import as_data

REAL = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
)


@pytest.mark.parametrize(("error", "asked"), [
    (RuntimeError(f"{REAL}4096 bytes. Error code 12"), 4096),
    (MemoryError(), None),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0"), 2**31),
    (RuntimeError("std::bad_alloc"), None),
    (OSError(12, "Cannot allocate memory"), None),
])  # fmt: skip
def test_whoever_says_so_it_is_understood(error, asked):
    assert is_exhaustion(error) and asked_bytes(error) == asked
    assert "out of memory in a step" in str(out_of_memory(error, "a step", "rest"))


@pytest.mark.parametrize(
    "error", [RuntimeError("shape"), ValueError("out of memory"), OSError(28, "full"), KeyError(1)]
)
def test_other_errors_are_not_taken_for_it(error):
    assert not is_exhaustion(error)


class Limited:
    """A loss for which the system has no memory if more than `most` examples go through at once."""

    def __init__(self, most, asks=1000):
        self.most, self.asks, self.calls = most, asks, []

    def __call__(self, model, batch):
        if type(batch) is torch.Tensor:  # not in a trace
            self.calls.append(len(batch))
            if len(batch) > self.most:
                raise RuntimeError(f"{REAL}{self.asks} bytes. Error code 12")
        return model(batch).square().mean()


def a_task(loss):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 512), torch.nn.Tanh(), torch.nn.Linear(512, 8))
    batch = torch.linspace(-1, 1, 512).view(64, 8)
    return Task(model, loss, batch, lambda p: torch.optim.SGD(p, 0.1), microbatches=True)


def test_it_is_told_with_what_was_asked_for_what_is_free_and_the_good_save(tmp_path):
    loss = Limited(64)
    task = a_task(loss)

    def then_less(event):
        if getattr(event, "update", 0) == 3:
            loss.most = 16

    with pytest.raises(
        OutOfMemory, match=r"update 4, which asked for 1.000 KB; .* left of .*: the save of update 2 is"
    ):
        train(task, [task.batch] * 6, epochs=1, run=tmp_path / "run", save_every=2, listeners=[then_less])


def test_with_replan_the_run_goes_on_from_the_same_update_with_the_same_numbers():
    """Twice: the first smaller microbatch is still too large."""
    roomy, tight = a_task(Limited(64)), a_task(Limited(16))
    train(roomy, [roomy.batch] * 4, epochs=1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        record = train(tight, [tight.batch] * 4, epochs=1, replan=True)
    torch.testing.assert_close(roomy.model.state_dict(), tight.model.state_dict(), rtol=1e-5, atol=1e-6)
    assert record.updates == 4 and record.settings["techniques"]["microbatch"] <= 16
    assert [size for size in tight.loss.calls if size > 16] == [64, 32]
    assert sum("smaller microbatches" in str(warning.message) for warning in told) == 2


def test_where_no_microbatch_is_small_enough_that_is_said():
    task = a_task(Limited(0))
    with pytest.raises(OutOfMemory, match="no smaller microbatch fits either"):
        train(task, [task.batch] * 2, epochs=1, replan=True)


def test_an_update_that_broke_off_in_the_middle_is_not_repeated_on_torn_weights():
    class Breaking(torch.optim.SGD):
        def step(self, closure=None):
            self.param_groups[0]["params"][0].data.add_(1)
            raise MemoryError("in the middle")

    task = a_task(Limited(64)).with_(optimizer=lambda p: Breaking(p, 0.1))
    with pytest.raises(OutOfMemory, match="there is no save before it"):
        train(task, [task.batch], epochs=1, replan=True)


def test_a_run_that_is_resumed_in_less_takes_smaller_microbatches_at_once(tmp_path):
    task = a_task(Limited(64))
    plan = Plan(predicted_peak_bytes=10**6, budget_bytes=10**6)
    with pytest.raises(OverBudget, match="no smaller microbatch"):
        train(apply(task, plan), [task.batch] * 2, epochs=1, budget_bytes=1000, replan=True)
    task = a_task(Limited(64))
    needed = apply(task, Plan(microbatch=16))
    from shoestring.profiling import profile

    limit = profile(needed.task, brief=True).peak_bytes + 100
    task = a_task(Limited(64))
    lean = apply(task, Plan(predicted_peak_bytes=profile(task, brief=True).peak_bytes))
    record = train(lean, [task.batch] * 2, epochs=1, budget_bytes=limit, replan=True, run=tmp_path / "run")
    assert record.settings["techniques"]["microbatch"] == 16 and set(task.loss.calls) == {16}


SCRIPT = """
    import resource, sys, torch
    from shoestring import Plan, Task, apply, train

    def used():
        fields = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
        return int(fields["VmData"].split()[0]) * 1024

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(16, 16384), torch.nn.Linear(16384, 16))
                                  for _ in range(4)))
    batch = torch.randn(256, 16)  # 16.8 MB per activation of 16384
    task = Task(model, lambda m, x: m(x).square().mean(), batch, lambda p: torch.optim.SGD(p, 0.01), microbatches=True)
    lean = apply(task, Plan())
    lean.step(batch[:4])  # threads, libraries and the optimizer are there
    resource.setrlimit(resource.RLIMIT_DATA, (used() + 40_000_000, resource.RLIM_INFINITY))
    record = train(lean, [batch] * 3, epochs=1, replan="--replan" in sys.argv)
    print(record.updates, record.settings["techniques"])
"""


def run_limited(tmp_path, *words):
    path = tmp_path / "limited.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return subprocess.run([sys.executable, str(path), *words], capture_output=True, text=True)


def test_under_a_real_limit_of_the_process_the_run_goes_on_in_smaller_microbatches(tmp_path):
    done = run_limited(tmp_path, "--replan")
    assert done.returncode == 0, done.stderr
    updates, techniques = done.stdout.split(maxsplit=1)
    assert updates == "3" and eval(techniques)["microbatch"] < 256


def test_under_a_real_limit_without_replan_the_reason_is_one_line(tmp_path):
    done = run_limited(tmp_path)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and "OutOfMemory: out of memory in update 1, which asked for" in last
    assert "RLIMIT_DATA" in last


def test_an_evaluation_for_which_there_is_no_memory_is_made_in_smaller_microbatches_too():
    """It is due after the third update; of the microbatches that were evaluated in the end none is too large."""
    loss = Limited(64)
    task = a_task(loss)

    def then_less(event):
        if getattr(event, "update", 0) == 3:
            loss.most = 16

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        record = train(
            task, [task.batch] * 3, epochs=2, replan=True, listeners=[then_less],
            evaluation=mean_loss(task, as_data([task.batch], 0)),
        )  # fmt: skip
    assert record.updates == 6 and record.settings["techniques"]["microbatch"] <= 16
    assert [update for update, _ in record.out_of_memory] == [3, 3] and not record.over_budget
    assert "out of memory in the evaluation after update 3" in str(told[0].message)
    assert [size for size in loss.calls if size > 16] == [64] * 4 + [32]
    loss.most = 64
    assert record.quality == pytest.approx(task.loss(task.model, task.batch).item(), rel=1e-5)


@pytest.fixture
def left(monkeypatch):
    """What is left, in a thread in which oneDNN has met no error: a list whose last reading stays."""
    readings = [Room(2**20, "a limit"), Room(2**40, "the memory")]
    monkeypatch.setattr(exhaustion, "_spoilt", WeakSet())
    monkeypatch.setattr(exhaustion, "room", lambda: readings.pop(0) if len(readings) > 1 else readings[0])
    return readings


def test_a_primitive_that_could_not_be_made_is_exhaustion_only_where_little_is_left(left):
    """oneDNN says no more than that, whatever the reason."""
    error = RuntimeError("could not create a primitive")
    assert not is_exhaustion(RuntimeError("could not create a primitive descriptor for a convolution"))
    del left[0]
    assert not is_exhaustion(error)
    left[:] = [Room(2**20, "a limit")]
    assert is_exhaustion(error)


def test_after_that_the_thread_gets_no_primitive_whatever_is_left(left):
    error = RuntimeError("could not create a primitive")
    assert is_exhaustion(error) and left == [Room(2**40, "the memory")]
    others = []
    other = threading.Thread(target=lambda: others.append(is_exhaustion(error)))
    other.start()
    other.join()
    assert is_exhaustion(error) and others == [False]


def test_a_run_whose_thread_gets_no_primitive_is_replanned_once_and_then_told_to_resume(left):
    """Operators that are there already still work, so one attempt is worth it."""
    sizes = []

    def loss(model, batch):
        if type(batch) is torch.Tensor:  # not in a trace
            sizes.append(len(batch))
            raise RuntimeError("could not create a primitive")
        return model(batch).square().mean()

    task = a_task(loss)
    with pytest.warns(UserWarning, match="tried again"), pytest.raises(OutOfMemory, match="go on with less by"):
        train(task, [task.batch], epochs=1, replan=True)
    assert sizes == [64, 32]
