"""One model in several processes: torchrun --nproc-per-node 2 examples/several_processes.py

Or alone: python examples/several_processes.py

Each process steps on its share of the batch, of any size, and all update by the mean over all items. Alone, without
torchrun, the same script trains on the whole batch, to the same weights up to the order of sums.
"""

import os

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import shoestring

rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def loss(model, batch):
    inputs, labels = batch
    return cross_entropy(model(inputs), labels)


def main(updates=20):
    """-> the losses of the whole batch, the same in every process."""
    torch.manual_seed(0)  # the same weights in every process
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    inputs = torch.randn(96, 32)
    labels = inputs[:, :10].argmax(1)
    mine = inputs[rank::size], labels[rank::size]
    task = shoestring.Task(model, loss, mine, shoestring.SGD(lr=0.1, momentum=0.9))
    lean = shoestring.apply(task, shoestring.Plan(nonzero=50, microbatch=16))
    losses = [float(lean.step(mine)) for _ in range(updates)]
    if rank == 0:
        print(f"{size} process{'es' * (size > 1)}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
