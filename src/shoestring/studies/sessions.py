"""A study's training job -> the session that trains it: the lean task, its data and its evaluation."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from ..data import open_images, open_pairs
from ..data.splits import held_out
from ..errors import ShoestringError
from ..models import builtin
from ..models.dynamicconv import Settings
from ..task import Task
from ..training.job import CrossEntropy, Job, Session, image_job, pair_job, scaled
from .jobs import size
from .plans import plan_of

HELD_OUT = 5_000  # images on which hyperparameters are tuned: 45,000 are left to train on


def session(job: dict[str, Any], folder: Path) -> Session:
    """Trains on all training data and is judged on the test set; a tuning job (`held_out`) sees no test set."""
    sizes = job["sizes"]
    plan = plan_of(job["settings"], size(job))
    made = _translation(job, folder) if "tokens" in sizes else _classification(job, folder)
    return made.build(plan)


def _classification(job: dict[str, Any], folder: Path) -> Job:
    images = open_images(folder, channels=3)
    if job["held_out"]:
        train, valid = held_out(images.train, HELD_OUT)
        images = replace(images, train=train, test=valid)
    side = job["sizes"].get("image", images.shape[1])
    if images.shape[1] % side:
        raise ShoestringError(f"images of {images.shape[1]} pixels cannot be averaged to {side}: use a divisor")
    task = builtin(job["model"], device="meta", **job["sizes"], classes=len(images.classes))
    return image_job(_tuned(task, job), images, job["seed"], CrossEntropy(), "mostafa-wang", images.shape[1] // side)


def _translation(job: dict[str, Any], folder: Path) -> Job:
    pairs = open_pairs(folder)
    if not job["held_out"]:
        pairs = replace(pairs, valid=pairs.test)  # what is evaluated
    vocabularies = {"source_vocabulary": len(pairs.source), "target_vocabulary": len(pairs.target)}
    task = builtin(job["model"], device="meta", **job["sizes"], **vocabularies)
    return pair_job(_tuned(task, job), pairs, job["sizes"]["tokens"], job["seed"], Settings.most_positions, "bleu")


def _tuned(task: Task, job: dict[str, Any]) -> Task:
    """The task at the learning rate that was found best for its network and sparsity."""
    return scaled(task, job["lr_multiplier"])
