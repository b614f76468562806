"""The setting that takes a hundredth of the paper's memory: whether it learns, and how near its gradients are.

    python benchmarks/hundredfold.py cifar-10-batches-bin --updates 300                    # wrn-10-2, 16 x 16
    python benchmarks/hundredfold.py cifar-10-batches-bin --updates 0 --model wrn-28-2     # cosines alone

CIFAR-10 at 16 x 16, batches of 100, no augmentation, a constant learning rate: the plan with everything beside the same
without what was added to reach the hundredth (4 bits, 8-bit sums of gradients, a few samples at a time), from the same
weights and with the same batches. Prints the mean loss of every 50 updates and the accuracy on 1,000 test images. Heap
and time are benchmarks/lean_steps.py's.
"""

import argparse
import copy
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import shoestring
import shoestring.training.apply
from shoestring.data.cifar import MEAN, STD, open_binary
from shoestring.kernels.moments import read_moment
from shoestring.step import Stepper

BEFORE = {"nonzero": 30, "precision": "fp16", "checkpoint": "residual-2*", "microbatch": 10, "optimizer": "8bit"}
PLANS = {
    "60x": BEFORE,
    "60x, residual-2**": BEFORE | {"checkpoint": "residual-2**"},
    "60x, 8-bit sums": BEFORE | {"optimizer": "8bit+8bit-gradient"},
    "100x": BEFORE | {"checkpoint": "residual-2**", "activations": "int4", "optimizer": "8bit+8bit-gradient"},
}
BATCH, SIDE, EVERY, TESTED = 100, 16, 50, 1000


def images(folder: Path, part: int, count: int) -> tuple[Tensor, Tensor]:
    """The first images of the training or the test set, at half their side."""
    pixels, labels = open_binary(folder)[part].read(np.arange(count))
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (MEAN, STD))
    return F.avg_pool2d((pixels / 255 - mean) / std, 2), labels


def lean(name: str, plan: dict) -> shoestring.training.apply.LeanTask:
    torch.manual_seed(0)
    task = shoestring.builtin(name, batch=BATCH, image=SIDE)
    return shoestring.apply(task.with_(optimizer=shoestring.SGD(lr=0.1, momentum=0.9)), shoestring.Plan(**plan))


def learn(name: str, plan: dict, train: tuple, test: tuple, updates: int) -> None:
    """Trains, and prints the loss on the way and the accuracy at the end."""
    task, losses = lean(name, plan), []
    for update in range(updates):
        at = update * BATCH % len(train[1])
        losses.append(float(task.step((train[0][at : at + BATCH], train[1][at : at + BATCH]))))
        if (update + 1) % EVERY == 0:
            print(f"  update {update + 1}: loss {fmean(losses[-EVERY:]):.3f}", flush=True)
    task.model.eval()
    with torch.no_grad():
        found = torch.cat([task.model(part).argmax(1) for part in test[0].split(BATCH)])
        right = int((found == test[1]).sum())
    print(f"  accuracy {100 * right / len(test[1]):.1f}%", flush=True)


def gradient(name: str, plan: dict, batch: tuple) -> Tensor:
    """The gradient of a batch under a plan, as the update would get it."""
    stepper = Stepper(lean(name, plan).task)
    found: list[Tensor] = []

    def note(factor: float) -> None:
        sums = getattr(stepper.optimizer, "_summed", {})
        for parameter in stepper.task.model.parameters():
            given = read_moment(sums[parameter]) if parameter in sums else parameter.grad
            found.append(copy.deepcopy(given).double().flatten() * factor)

    stepper.optimizer.step_by = note  # type: ignore[method-assign, union-attr]
    stepper.step(batch)
    return torch.cat(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", default="wrn-10-2")
    parser.add_argument("--updates", type=int, default=300)
    args = parser.parse_args()
    train, test = images(args.data, 0, BATCH * max(1, args.updates)), images(args.data, 1, TESTED)
    batch = train[0][:BATCH], train[1][:BATCH]
    exact = gradient(args.model, PLANS["60x"], batch)
    for what, plan in PLANS.items():
        cosine = F.cosine_similarity(exact, gradient(args.model, plan, batch), 0)
        print(f"{what}: cosine {cosine:.5f} with 60x at the first update", flush=True)
    for what in ("60x", "100x") if args.updates else ():
        print(f"{what}: {PLANS[what]}", flush=True)
        learn(args.model, PLANS[what], train, test, args.updates)


if __name__ == "__main__":
    main()
