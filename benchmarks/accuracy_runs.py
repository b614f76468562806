"""What the accuracy studies share: a file of finished runs, CIFAR-10 averaged to fewer pixels, the command line."""

import argparse
import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from shoestring.data import Augment, ImageBatches, open_images


class Runs:
    """The finished runs of one setting, a line of JSON each; a study that was stopped goes on from there."""

    def __init__(self, path: str, settings: dict) -> None:
        self.path, self.settings = Path(path), settings

    def __call__(self) -> list[dict]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [record for record in map(json.loads, lines) if record["settings"] == self.settings]

    def missing(self, runs: Iterable[dict]) -> list[dict]:
        """The runs of which no record has all of these values."""
        return [run for run in runs if not any(run.items() <= record.items() for record in self._plain())]

    def add(self, record: dict) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(record | {"settings": self.settings}) + "\n")
        print(record, flush=True)

    def _plain(self) -> list[dict]:
        return [{name: value for name, value in record.items() if name != "settings"} for record in self()]


class Cifar(NamedTuple):
    """Batches to train and to test, and what a model and a loss make of one."""

    train: ImageBatches
    test: ImageBatches
    prepare: Callable
    loss: Callable


def cifar(folder: str, batch: int, side: int, seed: int) -> Cifar:
    source = open_images(folder)
    augment = Augment(source.mean, source.std)

    def prepare(pixels, draws):
        return F.avg_pool2d(augment(pixels, draws), 32 // side)

    def loss(model, batch):
        pixels, labels, draws = batch
        return F.cross_entropy(model(prepare(pixels, draws)), labels)

    train, test = ImageBatches(source.train, batch, augment, seed), ImageBatches(source.test, batch, augment)
    return Cifar(train, test, prepare, loss)


def mean_and_spread(values: list[float], digits: int) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{digits}f} ± {spread:.{digits}f}"


def command_line(words: str, results: str) -> argparse.ArgumentParser:
    """The arguments of every study; those of one are added to them."""
    parser = argparse.ArgumentParser(description=words)
    parser.add_argument("--data", default="/work/shared/data")
    parser.add_argument("--side", type=int, default=16, help="pixels; images are averaged down to it")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", default=results)
    parser.add_argument("--report", help="write the table of the results to this file, and train nothing")
    return parser


def train_or_report(args: argparse.Namespace, study: Callable, report: Callable) -> None:
    torch.set_num_threads(args.threads)
    if args.report:
        Path(args.report).write_text(report(args))
    else:
        study(args)
