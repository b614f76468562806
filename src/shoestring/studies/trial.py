"""One job, in a process of its own: `python -m shoestring.studies.trial JOB FOLDER ANSWER`.

A `memory` job counts and measures a step, a `time` job takes its time. A `train` job trains in FOLDER/run, from its
newest save if it was killed. A `fidelity` job trains briefly and compares the gradients of compressed activations with
exact ones.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from ..errors import ShoestringError
from ..runs.log import Log
from ..training.interrupts import Interrupted
from .data import find_data
from .jobs import size
from .plans import plan_of

PROBES = 5  # steps at which a fidelity job compares gradients


def main(job_path: str, folder: str, answer: str) -> int:
    job = json.loads(Path(job_path).read_text())
    outcome: dict[str, Any]
    try:
        outcome = {"result": _KINDS[job["kind"]](job, Path(folder))}
    except Interrupted as stopped:
        outcome = {"stopped": str(stopped)}
    except ShoestringError as error:
        outcome = {"error": str(error)}
    except Exception as error:  # told as it is: the other trials go on
        outcome = {"error": f"{type(error).__name__}: {error}"}
    Path(answer).write_text(json.dumps(outcome))
    return 0 if "result" in outcome else 1


def _use_threads() -> None:
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def measure(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    from .memory import memory

    sizes = job["sizes"]
    plan = plan_of(job["settings"], size(job))
    return memory(job["model"], sizes, job["settings"], plan)


def clock(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    from ..runs.record import environment
    from .clock import step_seconds

    seconds = step_seconds(job["model"], job["sizes"], plan_of(job["settings"], size(job)))
    return {"step_seconds": seconds, "environment": environment() | {"cpu_model": cpu_model()}}


def train(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Trains as the job says -> the quality by epoch and the other results of a trial."""
    from ..training.loop import train
    from ..training.schedules import schedule
    from .sessions import session

    _use_threads()
    lesson = session(job, find_data(job["data"]["name"]))
    length = {key: job[key] for key in ("epochs", "updates") if job.get(key)}
    updates = length.get("updates") or length["epochs"] * len(lesson.data)
    run = folder / "run"
    record = train(
        lesson.lean,
        lesson.data,
        run=run,
        resume=(run / "record.json").exists(),
        schedule=schedule(job["schedule"] or lesson.schedule, updates),
        evaluation=lesson.evaluation,
        seed=job["seed"],
        save_seconds=300.0,
        **length,
    )
    return {
        "quality_name": record.quality_name,
        "quality": record.quality,
        "best_quality": record.best_quality,
        "by_epoch": _by_epoch(run / "log.jsonl", record.quality_name),
        "updates": record.updates,
        "seconds": record.seconds,
        "environment": record.environment | {"cpu_model": cpu_model()},
    }


def fidelity(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Trains plainly for the job's updates -> the cosine of the whole gradient by probe, and of each layer's."""
    from time import perf_counter

    from ..fidelity import endless, probe
    from ..profiling import profile
    from ..runs.record import environment
    from .sessions import session

    _use_threads()
    start, updates, codec = perf_counter(), job["updates"], job["settings"]["activations"]
    settings = {key: value for key, value in job["settings"].items() if key != "activations"}
    lesson = session(job | {"settings": settings}, find_data(job["data"]["name"]))
    every = max(1, updates // PROBES)
    found = probe(
        lesson.lean.task, endless(lesson.data), updates, [codec], every,
        peak=lambda task: profile(task, brief=True).peak_bytes,
    )  # fmt: skip
    (whole,) = found.whole
    return {
        "quality_name": "cosine",
        "quality": whole.cosine,
        "by_epoch": [one.cosines[codec] for one in found.probes],
        "exact_bytes": whole.exact_bytes,
        "stored_bytes": whole.stored_bytes,
        "layers": found.to_json()["layers"],
        "updates": found.steps,
        "seconds": perf_counter() - start,
        "environment": environment() | {"cpu_model": cpu_model()},
    }


def _by_epoch(log: Path, name: str) -> list[float]:
    lines = [line.content for line in Log(log).read()]
    return [line[name] for line in lines if line is not None and name in line]


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


_KINDS = {"memory": measure, "time": clock, "train": train, "fidelity": fidelity}

if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
