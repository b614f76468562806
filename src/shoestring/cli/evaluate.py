"""`shoestring evaluate RUN`: the quality of a trained run's weights, from its folder alone."""

import argparse
from contextlib import nullcontext
from typing import Any

from .model import is_function, users_code
from .options import add_threads, command, path_name, print_json
from .recorded import add_run, opened, session_of

EXAMPLES = (
    "runs/wrn-28-2",
    "runs/wrn-28-2 --weights averaged --data cifar-10-batches-bin",
    "runs/mine-task mine.py:task",
)


def add(subparsers: Any) -> None:
    parser = command(subparsers, "evaluate", run, "tell how good a trained run is", EXAMPLES)
    add_run(parser)
    parser.add_argument(
        "model", type=path_name, nargs="?", metavar="MODEL", help="file.py:function, if the model is your own"
    )
    parser.add_argument(
        "--data", type=path_name, metavar="DIR", help="other data than it was trained with, or file.py:function"
    )
    parser.add_argument("--valid", type=path_name, metavar="FILE.py:FUNCTION", help="your own batches to evaluate on")
    add_threads(parser)


def run(args: argparse.Namespace) -> int:
    from ..distributed import joined
    from ..errors import ShoestringError
    from ..reporting.progress import progress
    from ..reporting.run_words import quality_words
    from ..runs.averaging import averaged
    from ..runs.export import averaged_file, chosen_save
    from ..runs.save import restore_task
    from ..training.evaluate import evaluated, telling

    if (processes := joined().size) > 1:
        raise ShoestringError(f"evaluate takes one process, not {processes}: start it without torchrun")
    folder = opened(args.run_folder)
    with users_code(args.model or str(folder.path)):
        save = chosen_save(folder, args.weights)
        if args.weights == "averaged":
            averaged_file(folder)  # refused before any work
        if args.data is None and is_function(args.valid):
            args.data = args.valid  # what it was trained on is not needed
        session = session_of(args, folder)
        evaluation = session.evaluation
        if evaluation is None:
            raise ShoestringError("there is nothing to evaluate on: name your batches with --valid file.py:function")
        restore_task(session.lean.task, save)
        model, task = session.lean.model, session.lean.task
        chosen = averaged(model, folder.averaged_path, save) if args.weights == "averaged" else nullcontext(model)
        with chosen as model, progress(f"evaluating {evaluation.name}") as advance, telling(advance):
            quality = evaluated(task.with_(model=model), evaluation)
    if args.json:
        found = {"run": str(folder.path), "weights": args.weights, "update": save.update, evaluation.name: quality}
        print_json(found)
    else:
        words = quality_words(evaluation.name, quality)
        print(f"{evaluation.name} {words} with the {args.weights} weights, of update {save.update:,}")
    return 0
