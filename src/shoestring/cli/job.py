"""Arguments -> the job: a model on data, with the recipe's changes; and plans from files."""

import argparse
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ShoestringError
from .model import is_builtin, is_function, load_batches, load_task, short_name
from .options import given

if TYPE_CHECKING:
    from ..planning.plan import Plan
    from ..task import Task
    from ..training.job import Job


RECIPE: dict[str, Any] = {"seed": 0} | dict.fromkeys(
    ("lr", "weight_decay", "clip", "label_smoothing", "quality", "image")
)  # what `load_job` reads besides MODEL, its size and --data, and its defaults


def load_job(args: argparse.Namespace) -> "Job":
    """MODEL and --data -> the task on that data."""
    if is_builtin(args.model):
        job: Any = _translation(args) if args.model.startswith("dynamicconv") else _classification(args)
    else:
        job = _users(args)
    synchronised = getattr(args, "sync_batch_norm", False)
    return replace(job, task=job.task.with_(sync_batch_norm=True)) if synchronised else job


def shared_out(job: Any, devices: int) -> "Job":
    """The job as one of several processes has it: its example batch is the largest share of one."""
    from ..training.processes import example_share

    return job if devices == 1 else replace(job, task=example_share(job.task, devices))


def _classification(args: argparse.Namespace) -> "Job":
    from ..data import open_images
    from ..models import builtin
    from ..training.job import CrossEntropy, image_job

    _refuse(args, "tokens", "is for translation: use --batch")
    _refuse(args, "quality", "is for translation: images are judged by accuracy")
    _refuse_functions(args)
    usual = builtin(args.model, device="meta", batch=1).batch[0].shape[-1]
    images = open_images(args.data, channels=3, size=args.image, resized=usual)
    if args.batch is not None and args.batch > len(images.train):
        raise ShoestringError(
            f"batches of {args.batch:,} cannot be made from {len(images.train):,} images: use a smaller --batch"
        )
    shape: dict[str, Any] = {"classes": len(images.classes), "image": images.shape[1]}
    task = _with_recipe(builtin(args.model, device="meta", **given(args, "batch"), **shape), args)
    loss = CrossEntropy(args.label_smoothing or 0.0)
    job = image_job(task, images, args.seed, loss, schedule="mostafa-wang")
    return _tuned(replace(job, options=shape | {"batch": 1}), args)


def _translation(args: argparse.Namespace) -> "Job":
    from ..data import open_pairs
    from ..models import builtin
    from ..models.dynamicconv import Settings
    from ..training.job import pair_job

    _refuse(args, "batch", "is for images: use --tokens")
    _refuse(args, "image", "is for images")
    _refuse(args, "label_smoothing", "is for images: the loss of translations is smoothed by 0.1 already")
    _refuse_functions(args)
    known = getattr(args, "known", None)  # of the run, if there is one already
    pairs = open_pairs(args.data, vocabulary=getattr(args, "vocabulary", None) or 10_000, known=known)
    sizes: dict[str, Any] = {"source_vocabulary": len(pairs.source), "target_vocabulary": len(pairs.target)}
    tokens = args.tokens or 4000
    task = _with_recipe(builtin(args.model, device="meta", tokens=tokens, **sizes), args)
    job = pair_job(task, pairs, tokens, args.seed, Settings.most_positions, args.quality or "loss")
    return _tuned(replace(job, options=sizes | {"tokens": 100}), args)


def _tuned(job: Any, args: argparse.Namespace) -> "Job":
    """The learning rate that was found best for the network and the plan, unless one is given."""
    from ..training.job import tuned

    return job if args.lr is not None else replace(job, multiplier=tuned(args.model))


def _users(args: argparse.Namespace) -> "Job":
    """A user's task on data of theirs; or on images in a folder, if its batch is images and labels."""
    from ..data import open_images
    from ..training.job import OwnJob, image_job, takes_images

    _refuse(args, "quality", "is for translation: images are judged by accuracy")
    _refuse(args, "image", "is for built-in models: yours are given images of the size of the task's batch")
    _refuse(args, "label_smoothing", "is for built-in models: smooth the labels in your loss")
    task = _with_recipe(load_task(args.model, given(args, "batch", "tokens")), args)
    if is_function(args.data):
        valid = getattr(args, "valid", None)
        batches = load_batches(args.data, given(args, "batch", "tokens"))
        judged = load_batches(valid, given(args, "batch", "tokens")) if valid else None
        return OwnJob(task, batches, judged, short_name(args.data), args.seed)
    if not takes_images(task):
        raise ShoestringError(
            f"{args.model!r} does not train on images (n, channels, height, width) and labels (n), which is what "
            "folders are read for: name a function that returns your batches, as in --data mine.py:batches"
        )
    channels, size = task.batch[0].shape[1:3]
    images = open_images(args.data, channels=channels, size=size)
    return image_job(task, images, args.seed)


def _refuse_functions(args: argparse.Namespace) -> None:
    """Batches that a function makes are for tasks of the user's: built-in models read folders."""
    _refuse(args, "valid", "is for your own tasks: built-in models are judged on the data of their folder")
    if is_function(args.data):
        raise ShoestringError(
            f"--data {args.data} names a function, and {args.model} reads a folder: name one, or train a task of yours "
            "on such batches (MODEL as file.py:function)"
        )


def _refuse(args: argparse.Namespace, option: str, why: str) -> None:
    if getattr(args, option, None) is not None:
        raise ShoestringError(f"--{option.replace('_', '-')} {why}")


def _with_recipe(task: "Task", args: argparse.Namespace) -> "Task":
    """The task with the optimizer settings and the clipping that were given."""
    changes = given(args, "lr", "weight_decay")
    known: list[str] = [f.name for f in fields(task.optimizer)] if is_dataclass(task.optimizer) else []
    if unknown := sorted(set(changes) - set(known)):
        option = unknown[0].replace("_", "-")
        raise ShoestringError(f"--{option} cannot be set: the task makes its optimizer by a function of its own")
    changed: Any = replace(task.optimizer, **changes) if changes else task.optimizer
    return task.with_(optimizer=changed, clip=args.clip if args.clip is not None else task.clip)


def read_plan(path: Path, task: "Task") -> "Plan":
    """A file of `shoestring plan`, for this task -> the plan."""
    return checked_plan(plan_in(path), path, task)


def checked_plan(plan: "Plan", path: Path, task: "Task") -> "Plan":
    """The plan of a file, if it is one for this task."""
    if plan.task and plan.task != task.name:
        raise ShoestringError(f"{path} is a plan for {plan.task}, not for {task.name}: plan again")
    return plan


def plan_in(path: Path) -> "Plan":
    """A plan file -> the plan, whatever it is for."""
    from ..planning.plan import Plan
    from ..records import file_bytes

    try:
        return Plan.from_json(file_bytes(path).decode())
    except OSError as error:
        raise ShoestringError(f"the plan {path} cannot be read: {error.strerror}") from error
    except ShoestringError as error:
        raise ShoestringError(f"{path}: {error}") from error
    except (ValueError, TypeError) as error:
        raise ShoestringError(f"{path} is no plan ({error}): make one with `shoestring plan`") from error
