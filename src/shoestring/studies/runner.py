"""Runs the jobs of a study: side by side on this machine's cores, on Ray, or shared with other machines by a folder.

Each job is a process of its own, so that one that fails or is killed harms no other. Stopping (Ctrl-C, SIGTERM, a kill)
loses nothing: a job that was running resumes from its newest save. SIGSTOP or Ctrl-Z pauses the jobs with the runner.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

from ..errors import ShoestringError
from ..models.dynamicconv import Settings
from ..training.interrupts import Interrupted, Interrupts
from .data import VARIABLE, find_data, fingerprint
from .jobs import LEASE_SECONDS, Claim, Store, worker_name
from .plans import lr_multiplier, model_of, size_of
from .study import Row, Scale, Study

Job = dict[str, Any]
Progress = Callable[[str, Job, str], None]  # what happened (started, done, failed), the job, more words
UNMEASURED = ("lr_multiplier", "rewire_fraction", "rewire_frequency")  # settings on which no byte of a step depends
BUSY = "another process trains in"  # of the run folder's lock: a worker that was taken for dead still works


def memory_job(study: Study, row: Row, scale: Scale | None) -> Job:
    settings = {key: value for key, value in _deciding(row).items() if key not in UNMEASURED}
    return {"kind": "memory", **_step(study, row, scale), "settings": settings}


def time_job(study: Study, row: Row, scale: Scale | None) -> Job:
    return memory_job(study, row, scale) | {"kind": "time"}


def step_jobs(study: Study, row: Row, scale: Scale | None) -> list[Job]:
    """What is found out about a row's step: its memory and, in a study of what memory buys, its time."""
    return [memory_job(study, row, scale), *([time_job(study, row, scale)] if study.pareto else [])]


def _step(study: Study, row: Row, scale: Scale | None) -> Job:
    """The step of a row: its model and the sizes of its batch."""
    return {"model": model_of(study, row), "sizes": size_of(study, scale) | _sizes(scale, row)}


def training_jobs(study: Study, row: Row, scale: Scale, root: str | None) -> list[Job]:
    """One job per seed of the row."""
    data = {"name": scale.data, "fingerprint": fingerprint(find_data(scale.data, root))}
    times = row.settings.get("length", 1)
    length = {"epochs": round(times * scale.epochs)} if scale.epochs else {"updates": round(times * scale.updates)}
    kind = "fidelity" if study.quality == "cosine" else "train"
    settings = {key: value for key, value in _deciding(row).items() if key not in scale.untrained}
    job = {"kind": kind, **_step(study, row, scale), "settings": settings, "data": data, **length}
    job |= {"held_out": study.tuning, "schedule": scale.schedule, "lr_multiplier": lr_multiplier(job)}
    return [job | {"seed": seed} for seed in row.seeds or scale.seeds]


def _sizes(scale: Scale | None, row: Row) -> dict[str, int]:
    found = {key: value for key in ("image", "width") if scale and (value := getattr(scale, key))}
    if "width" in row.settings:
        found["width"] = 8 * round(row.settings["width"] * found.get("width", Settings.width) / 8)
    return found


def _deciding(row: Row) -> dict[str, Any]:
    """The settings, but those that a job has under other names."""
    return {key: value for key, value in row.settings.items() if key not in ("model", "width", "length")}


def jobs_of(study: Study, scale_name: str, root: str | None = None) -> list[Job]:
    """All jobs of a study at a scale: the step of each row, then its trainings, all first seeds first."""
    scale = study.scale(scale_name)
    jobs = [job for row in study.rows for job in step_jobs(study, row, scale)]
    if scale_name != "memory" and scale is not None:
        seeds = zip_longest(*(training_jobs(study, row, scale, root) for row in study.rows))
        jobs += [job for row in seeds for job in row if job]
    return jobs


def run(
    store: Store,
    jobs: list[Job],
    *,
    workers: int = 1,
    threads: int = 1,
    nice: int = 10,
    root: str | None = None,
    engine: str = "local",
    retry: bool = False,
    progress: Progress = lambda what, job, more: None,
) -> None:
    """Does every job that is not done. `retry` tries the failed ones once more."""
    ids = [store.add(job, again=retry) for job in jobs]
    environment = {"OMP_NUM_THREADS": str(threads)} | ({VARIABLE: str(Path(root).resolve())} if root else {})
    if engine == "ray":
        _on_ray(store, ids, workers, threads, nice, environment)
    elif engine == "local":
        _on_cores(store, ids, workers, nice, environment, progress)
    else:
        raise ShoestringError(f"there is no engine {engine!r}: use local or ray")


def _on_cores(
    store: Store, ids: list[str], workers: int, nice: int, environment: dict[str, str], progress: Progress
) -> None:
    stop, failures = threading.Event(), list[BaseException]()

    def work(number: int) -> None:
        try:
            work_off(store, ids, f"{worker_name()}-{number}", nice, environment, progress, stop)
        except BaseException as error:
            failures.append(error)
            stop.set()

    crew = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(workers)]
    for member in crew:
        member.start()
    interrupts = Interrupts()
    try:
        with interrupts.heeded():
            while any(member.is_alive() for member in crew) and interrupts.received is None:
                time.sleep(0.2)
        if interrupts.received is not None:
            words = "stopped: what was running is saved, and the same command goes on from there"
            raise Interrupted(words, interrupts.received)
    except BaseException:
        stop.set()  # the claims are given back, and the trials save where they are
        for member in crew:
            member.join(60)
        raise
    if failures:
        raise failures[0]


def work_off(
    store: Store,
    ids: list[str],
    worker: str,
    nice: int,
    environment: dict[str, str],
    progress: Progress = lambda what, job, more: None,
    stop: threading.Event | None = None,
) -> None:
    """One worker: claims jobs and does them until none is left that waits."""
    stop = stop or threading.Event()
    while not stop.is_set() and (claim := store.claim(ids, worker)) is not None:
        progress("started", claim.job, "")
        outcome = do(claim, nice, environment, stop)
        if outcome is None or "stopped" in outcome:
            claim.release()
        elif BUSY in outcome.get("error", ""):
            claim.release()
            stop.wait(LEASE_SECONDS / 4)
        elif "result" in outcome:
            claim.finish(outcome["result"])
            progress("done", claim.job, "")
        else:
            claim.fail(outcome["error"])
            progress("failed", claim.job, outcome["error"])


def do(claim: Claim, nice: int, environment: dict[str, str], stop: threading.Event) -> dict[str, Any] | None:
    """Does a job in a process of its own -> its outcome: a `result`, an `error`, or `stopped` by a signal of others,
    which is no failure; None if we told it to stop or it was taken over."""
    claim.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        request, answer = Path(folder) / "job.json", Path(folder) / "answer.json"
        request.write_text(json.dumps(claim.job))
        command = [sys.executable, "-m", "shoestring.studies.trial", str(request), str(claim.folder), str(answer)]
        with (claim.folder / "output.txt").open("ab") as output:
            process = subprocess.Popen(
                command, env={**os.environ, **environment}, stdout=output, stderr=output,
                preexec_fn=lambda: os.nice(nice),
            )  # fmt: skip
            while process.poll() is None:
                if stop.wait(0.5) or not claim.renew():
                    process.terminate()  # the run saves and ends
                    process.wait()
                    return None
        if answer.exists():
            return json.loads(answer.read_text())
        return {"error": f"the trial ended with exit code {process.returncode}; see {claim.folder / 'output.txt'}"}


def _on_ray(store: Store, ids: list[str], workers: int, threads: int, nice: int, environment: dict[str, str]) -> None:
    """Workers on a Ray cluster, whose machines all see the store's folder."""
    try:
        import ray
    except ImportError:
        raise ShoestringError(
            "--engine ray needs Ray: install it with `pip install ray` (the extra is called ray), or use --engine local"
        ) from None
    if not ray.is_initialized():
        ray.init(ignore_reinit_error=True, log_to_driver=False)
    remote = ray.remote(num_cpus=threads)(_ray_worker)
    ray.get([remote.remote(str(store.path.resolve()), ids, nice, environment, number) for number in range(workers)])


def _ray_worker(path: str, ids: list[str], nice: int, environment: dict[str, str], number: int) -> None:
    work_off(Store(Path(path)), ids, f"{worker_name()}-{number}", nice, environment)


def seconds_left(store: Store, jobs: Iterable[Job], workers: int) -> float | None:
    """About how long the rest takes: as long as the finished trainings took; None if none has finished. By their
    median: a trial that was paused for a night, or for another program, says nothing of the others."""
    trainings = [job for job in jobs if job["kind"] in ("train", "fidelity")]
    done = [result["seconds"] for job in trainings if (result := store.result(job))]
    open_ones = sum(store.state(job) in ("waiting", "running") for job in trainings)
    return median(done) * open_ones / max(1, workers) if done else None
