"""Budgets on the heap: models and budgets drawn at random, each planned, built and trained for two steps, metered.

    python tests/faults/budget_pairs.py 200 0 > pairs.jsonl    # how many pairs, the seed

All pairs of a call share one process, which has the meter from its start: importing torch takes longer than most pairs.
None of the models is one of those on which the room for Python objects was fitted (benchmarks/budgets_kept.py).
"""

import gc
import json
import random
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import shoestring
from shoestring.measuring.heap import measure_preloaded, preload_environment
from shoestring.models import materialise
from shoestring.models.build import on_meta
from shoestring.training.budget import batch_bytes

BUDGETS = 4  # for each model
RISKS = ("exact", "neutral", "approximate")
CLASSES, VOCABULARY = 10, 500
Settings = dict[str, Any]


class Words(nn.Module):
    """A classifier of token sequences: an embedding, `body`, the mean over tokens."""

    def __init__(self, width: int, body: nn.Module) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(VOCABULARY, width), body, nn.Linear(width, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        out = self.body(self.embedding(ids))
        return self.head((out[0] if isinstance(out, tuple) else out).mean(1))


class Hourglass(nn.Module):
    """Down, up, and a bridge between, as U-Nets have it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.down = convolution(3, width), convolution(width, 2 * width, 2)
        self.up, self.out = nn.ConvTranspose2d(2 * width, width, 2, 2), convolution(2 * width, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        x = self.out(torch.cat([x, self.up(self.down(x))], 1))
        return self.head(x.mean((2, 3)))


def convolution(inside: int, outside: int, stride: int = 1) -> nn.Module:
    layer = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outside), nn.ReLU(inplace=True))


def perceptron(width: int, depth: int) -> nn.Module:
    hidden = (part for _ in range(depth) for part in (nn.Linear(width, width), nn.GELU()))
    return nn.Sequential(*hidden, nn.Linear(width, CLASSES))


def convolutions(width: int, depth: int) -> nn.Module:
    layers = (convolution(width, width) for _ in range(depth))
    return nn.Sequential(
        convolution(3, width), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES)
    )


def hourglass(width: int, depth: int) -> nn.Module:
    return Hourglass(width)


def encoder(width: int, depth: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, batch_first=True, norm_first=depth % 2 == 0)
    return Words(width, nn.TransformerEncoder(layer, depth, enable_nested_tensor=False))


def recurrent(width: int, depth: int) -> nn.Module:
    return Words(width, (nn.LSTM if depth % 2 else nn.GRU)(width, width, depth, batch_first=True))


# A kind of model, its widths, the most of its layers, and the shapes of its examples (one number: of tokens).
KINDS = {
    perceptron: ((128, 256, 512), 8, None),
    convolutions: ((8, 16, 32), 6, ((3, 16, 16), (3, 24, 24), (3, 32, 32))),
    hourglass: ((8, 16, 24), 1, ((3, 16, 16), (3, 32, 32))),
    encoder: ((32, 64, 128), 4, ((12,), (32,), (64,))),
    recurrent: ((32, 64), 2, ((12,), (32,))),
}


def task_of(kind: Any, width: int, depth: int, shape: tuple[int, ...], size: int, adam: bool) -> shoestring.Task:
    """A task whose model has no memory yet."""
    generator = torch.Generator().manual_seed(0)
    if len(shape) == 1 and kind is not perceptron:
        examples = torch.randint(VOCABULARY, (size, *shape), generator=generator)
    else:
        examples = torch.randn(size, *shape, generator=generator)
    batch = examples, torch.randint(CLASSES, (size,), generator=generator)
    optimizer = shoestring.Adam(lr=1e-3) if adam else shoestring.SGD(lr=0.01, momentum=0.9)
    return shoestring.Task(on_meta(kind, width, depth), _loss, batch, optimizer)


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def drawn(seed: int) -> Iterator[tuple[Settings, list[tuple[float, str]]]]:
    """Models without end, and for each the budgets, as shares of what plain training takes, with their risks."""
    draw = random.Random(seed)
    while True:
        for kind, (widths, deepest, shapes) in KINDS.items():
            width = draw.choice(widths)
            shape = draw.choice(shapes or ((width,),))
            model = {"kind": kind, "width": width, "depth": draw.randint(1, deepest), "shape": shape}
            model |= {"size": draw.choice((8, 20, 48)), "adam": draw.random() < 0.5}
            yield model, [(round(draw.uniform(0.2, 1.0), 2), draw.choice(RISKS)) for _ in range(BUDGETS)]


def heap(model: Settings, plan: shoestring.Plan, batch: Any) -> int:
    """The peak of building the model in its lean form and of two steps, after a warm-up of the same, and the batch."""

    def steps() -> Any:
        lean = shoestring.apply(task_of(**model).with_(batch=batch), plan)
        materialise(lean.model)
        gc.collect()
        for _ in range(2):
            lean.step(batch)
        return lean

    steps()
    return measure_preloaded(steps).peak_bytes + batch_bytes(batch)


def pairs(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Plans for `count` pairs of a model and a budget: what each was predicted to need, and what the heap held. Budgets
    of a model that lead to the same plan are one measurement, and one pair."""
    found = 0
    for model, budgets in drawn(seed):
        task, measured = task_of(**model), set[str]()
        plain = heap(model, shoestring.Plan(), task.batch)
        words = {name: getattr(value, "__name__", value) for name, value in model.items()}
        for share, risk in sorted(budgets):  # the smallest budget of a plan first
            if found == count:
                return
            row = {"model": words, "budget": int(share * plain), "risk": risk}
            try:
                plan = shoestring.plan(task, row["budget"], risk)
            except shoestring.NoPlanFits:
                yield row | {"plan": None}
                continue
            if (techniques := str(plan.techniques())) not in measured:
                found += 1
                measured.add(techniques)
                needed = (plan.predicted_peak_bytes or 0) + (plan.object_bytes or 0)
                yield row | {"plan": techniques, "needed": needed, "heap": heap(model, plan, task.batch)}


def check(count: int, seed: int, folder: Path) -> tuple[Counter, list]:
    """Runs `pairs` in a process with the meter -> what was found, and the budgets that were not kept."""
    command = [sys.executable, __file__, str(count), str(seed)]
    done = subprocess.run(command, env=preload_environment(), stdout=subprocess.PIPE, text=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    kept = [row for row in rows if row["plan"] is not None and row["heap"] <= row["budget"]]
    bad = [row for row in rows if row["plan"] is not None and row not in kept]
    found = Counter({"distinct pairs": len(kept) + len(bad), "refused": sum(row["plan"] is None for row in rows)})
    found["kinds of plans"] = len({row["plan"] for row in kept})
    return found, bad + ([f"exit code {done.returncode}"] if done.returncode else [])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for row in pairs(int(sys.argv[1]), int(sys.argv[2])):
        print(json.dumps(row), flush=True)
