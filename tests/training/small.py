"""Runs of a few milliseconds an update: what the tests of training train."""

import torch
import torch.nn.functional as F
from torch import nn

from shoestring import SGD, Task
from shoestring.training.evaluate import Evaluation


class Block(nn.Module):
    def __init__(self, channels, dropout):
        super().__init__()
        self.dropout = dropout
        self.norm = nn.BatchNorm2d(channels)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return x + self.conv(F.dropout(F.relu(self.norm(x)), self.dropout, self.training))


class Net(nn.Module):
    """Batch norm, dropout, residual blocks, and a buffer that changes and that state_dict() leaves out."""

    def __init__(self, channels=4, blocks=2, dropout=0.2):
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(channels, dropout) for _ in range(blocks)))
        self.head = nn.Linear(channels, 3)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, images):
        if self.training:
            self.seen += len(images)
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


class Noise:
    """Data that is a function of (seed, epoch, number): images whose mean tells the class."""

    def __init__(self, batches=5, size=6, seed=0):
        self.batches, self.size, self.seed = batches, size, seed

    def __len__(self):
        return self.batches

    def read(self, epoch, number):
        generator = torch.Generator().manual_seed(self.seed + 1000 * epoch + number)
        labels = torch.randint(3, (self.size,), generator=generator)
        images = torch.randn(self.size, 1, 6, 6, generator=generator) + labels.view(-1, 1, 1, 1)
        return images, labels


def task(optimizer=None, **changes):
    torch.manual_seed(0)
    fields = {
        "model": Net(),
        "loss": loss,
        "batch": Noise().read(0, 0),
        "optimizer": optimizer,
        "name": "small",
    }
    fields["optimizer"] = optimizer or SGD(lr=0.05, momentum=0.9, nesterov=True)
    return Task(**(fields | changes))


def right_answers(batches=2):
    """Percent of noise that a model classifies rightly."""
    data = Noise(batches, size=20, seed=10**6)

    def measure(model):
        pairs = [data.read(0, number) for number in range(len(data))]
        right = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in pairs)
        return 100 * right / (20 * len(data))

    return Evaluation("accuracy", measure)
