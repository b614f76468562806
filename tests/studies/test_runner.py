"""A small study, run for real: trained, killed, resumed, shared by two workers."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from layouts import write_cifar_binary

from shoestring.studies.data import VARIABLE
from shoestring.studies.jobs import Store
from shoestring.studies.results import report, steps
from shoestring.studies.runner import jobs_of, memory_job, run, seconds_left, training_jobs
from shoestring.studies.study import parse

TEXT = """title = "tiny"
paper = "sohoni"
place = "Table 0"
model = "wrn-10-0.5"
batch = 10
quality = "accuracy"

[[rows]]
label = "plain"

[[rows]]
label = "lean"
microbatch = 5
checkpoint = "residual-1*"

[[rows]]
label = "impossible"
checkpoint = "residual-0"

[scales.small]
image = 16
epochs = 2
seeds = [0, 1]
"""


@pytest.fixture
def study():
    return parse(TEXT, "tiny", "tiny.toml")


@pytest.fixture
def data(tmp_path):
    write_cifar_binary(tmp_path / "cifar-10-batches-bin", count=12)
    return str(tmp_path)


def test_a_study_of_what_memory_buys_takes_the_time_of_each_step_too(study, tmp_path):
    store, buys = Store(tmp_path / "store"), replace(study, pareto=True, rows=study.rows[:2])
    timed = [job for job in jobs_of(buys, "memory") if job["kind"] == "time"]
    assert len(timed) == 2 and not [job for job in jobs_of(study, "memory") if job["kind"] == "time"]
    run(store, timed, nice=0)
    assert all(0 < row["step_seconds"] < 5 for row in report(buys, "memory", store)["rows"])
    assert [step["job"]["kind"] for step in steps(buys, "memory", store)] == ["time", "time"]


def trainings(study, data, *labels):
    return [job for job in jobs_of(study, "small", data) if job["kind"] == "train"
            and job["settings"] in [row.settings for row in study.rows if row.label in labels]]  # fmt: skip


def test_rows_are_trained_once_per_seed_and_a_failure_does_not_stop_the_others(study, data, tmp_path):
    store, told = Store(tmp_path / "store"), []
    jobs = trainings(study, data, "plain", "lean", "impossible")
    run(store, jobs, root=data, nice=0, progress=lambda what, job, more: told.append(what))
    assert told.count("done") == 4 and told.count("failed") == 2
    found = {row["label"]: row for row in report(study, "small", store, data)["rows"]}
    assert found["plain"]["seeds"] == found["lean"]["seeds"] == [0, 1]
    assert 0 <= found["plain"]["quality"]["accuracy"] <= 100
    assert "there is no checkpoint strategy 'residual-0'" in found["impossible"]["failed"][0]
    again = []
    run(store, jobs, root=data, progress=lambda what, job, more: again.append(what))
    assert again == []  # nothing is run twice


def test_two_runners_on_one_folder_never_run_the_same_trial(study, data, tmp_path):
    store, told = Store(tmp_path / "store"), []
    jobs = trainings(study, data, "plain")
    run(store, jobs, workers=2, root=data, nice=0, progress=lambda what, job, more: told.append((what, job["seed"])))
    assert sorted(told) == [("done", 0), ("done", 1), ("started", 0), ("started", 1)]


SCRIPT = """
import json, sys
from pathlib import Path
from shoestring.studies.jobs import Store
from shoestring.studies.runner import run
run(Store(Path(sys.argv[1])), json.loads(sys.argv[2]), root=sys.argv[3], nice=0)
"""


@pytest.mark.slow
def test_a_runner_that_was_killed_goes_on_from_its_saves_to_the_same_result(study, data, tmp_path):
    jobs = [job | {"epochs": 30} for job in trainings(study, data, "plain")[:1]]
    whole, killed = Store(tmp_path / "whole"), Store(tmp_path / "killed")
    run(whole, jobs, root=data, nice=0)
    command = [sys.executable, "-c", SCRIPT, str(killed.path), json.dumps(jobs), data]
    first = subprocess.Popen(command, start_new_session=True)
    deadline = time.time() + 60
    while not list(killed.path.glob("work/*/run/saves/*")) and time.time() < deadline:
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    for claim in (killed.path / "claimed").iterdir():
        os.utime(claim, (0, 0))  # as after the lease
    run(killed, jobs, root=data, nice=0)
    assert killed.result(jobs[0])["by_epoch"] == whole.result(jobs[0])["by_epoch"]


def test_a_trial_that_somebody_stopped_has_not_failed(study, data, tmp_path):
    """A machine that shuts down sends SIGTERM to trials and runner alike: the trial saves, and waits to be resumed."""
    (job,) = [job | {"epochs": 4_000} for job in trainings(study, data, "plain")[:1]]
    request, answer, log = tmp_path / "job.json", tmp_path / "answer.json", tmp_path / "work" / "run" / "log.jsonl"
    request.write_text(json.dumps(job))
    command = [sys.executable, "-m", "shoestring.studies.trial", str(request), str(tmp_path / "work"), str(answer)]
    trial = subprocess.Popen(command, env={**os.environ, VARIABLE: data})
    deadline = time.time() + 60
    while not (log.exists() and log.stat().st_size) and time.time() < deadline:
        time.sleep(0.05)
    trial.terminate()
    trial.wait(60)
    assert "stopped after update" in json.loads(answer.read_text())["stopped"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_runner_that_is_told_to_stop_leaves_no_trial_behind(study, data, tmp_path, number):
    jobs = [job | {"epochs": 4_000} for job in trainings(study, data, "plain")[:1]]
    store = Store(tmp_path / "store")
    runner = subprocess.Popen([sys.executable, "-c", SCRIPT, str(store.path), json.dumps(jobs), data])
    deadline = time.time() + 60
    while not list(store.path.glob("work/*/run/log.jsonl")) and time.time() < deadline:
        time.sleep(0.05)
    (locked,) = store.path.glob("work/*/run")
    runner.send_signal(number)
    assert runner.wait(60) != 0
    assert not list((store.path / "claimed").iterdir()) and len(list((store.path / "waiting").iterdir())) == 1
    assert not any(str(locked.parent) in words for words in command_lines())


def command_lines():
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield process.read_bytes().decode(errors="replace")


def test_one_trial_that_was_paused_for_a_night_does_not_make_the_others_look_long(study, data, tmp_path):
    store, jobs = Store(tmp_path / "store"), [job | {"seed": seed} for seed in range(5) for job in
                                              trainings(study, data, "plain")[:1]]  # fmt: skip
    for job, seconds in zip(jobs, (10.0, 12.0, 50_000.0), strict=False):
        store.adopt(job, {"seconds": seconds})
    for job in jobs[3:]:
        store.add(job)
    assert seconds_left(store, jobs, workers=1) == 24.0


def test_a_row_may_train_longer_and_be_narrower_than_its_scale(data):
    text = TEXT.replace('label = "lean"', 'label = "lean"\nlength = 1.5\nwidth = 0.5').replace(
        "image = 16\nepochs = 2", "width = 128\nupdates = 10"
    )
    study = parse(text, "tiny", "tiny.toml")
    plain, lean, _ = (training_jobs(study, row, study.scale("small"), data)[0] for row in study.rows)
    assert (plain["updates"], lean["updates"]) == (10, 15)
    assert (plain["sizes"]["width"], lean["sizes"]["width"]) == (128, 64)
    assert memory_job(study, study.rows[1], None)["sizes"]["width"] == 256
    assert "length" not in lean["settings"] and "width" not in lean["settings"]


def test_a_study_of_cosines_compares_gradients_in_a_brief_training(data, tmp_path):
    text = TEXT[: TEXT.index("[[rows]]")].replace("accuracy", "cosine").replace("batch = 10", "batch = 12")
    text += '[grid]\nactivations = ["int8", "pool4"]\n[scales.small]\nupdates = 2\nseeds = [0]\n'
    text += '[[claims]]\nclaim = "8 bits are nearer"\nmetric = "cosine"\nrow = "activations int8"\n'
    text += 'minus = "activations pool4"\nat_least = 0.0\n'
    study, store = parse(text, "tiny", "tiny.toml"), Store(tmp_path / "store")
    run(store, [job for job in jobs_of(study, "small", data) if job["kind"] == "fidelity"], root=data, nice=0)
    found = report(study, "small", store, data)
    fine, rough = (row["quality"]["cosine"] for row in found["rows"])
    assert 1 >= fine > 0.999 > rough > 0
    assert found["claims"][0]["verdict"] == "confirmed"


@pytest.mark.timeout(900)
def test_on_ray_the_jobs_are_done_by_workers_of_its_cluster(study, data, tmp_path):
    """A cluster on this machine: two workers claim the memory jobs of one store, and a failure does not stop them."""
    ray = pytest.importorskip("ray", reason="Ray is optional: pip install 'shoestring[ray]'")
    store = Store(tmp_path / "store")
    jobs = [job for job in jobs_of(study, "small", data) if job["kind"] == "memory"]
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        run(store, jobs, workers=2, engine="ray", nice=0, root=data)
    finally:
        ray.shutdown()
    assert [store.state(job) for job in jobs] == ["done", "done", "failed"]
