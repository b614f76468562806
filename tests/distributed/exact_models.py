"""Models without batch norm and dropout: what several processes compute is then what one computes."""

import torch
import torch.nn.functional as F
from torch import nn

from shoestring import SGD, Adam, Task


def classify(model, batch):
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


class Block(nn.Module):
    def __init__(self, channels, norm):
        super().__init__()
        self.norm, self.conv = norm(channels), nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return x + self.conv(F.relu(self.norm(x)))


def images(examples, size=6):
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(4, (examples,), generator=generator)
    return torch.randn(examples, 3, size, size, generator=generator), labels


def group_norm(channels):
    return nn.GroupNorm(2, channels)


def convolutions(optimizer=None, norm=group_norm, examples=7):
    torch.manual_seed(0)
    blocks = [Block(8, norm) for _ in range(2)]
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.Flatten(), nn.Linear(8 * 36, 4))
    return Task(model, classify, images(examples), optimizer or SGD(lr=0.1, momentum=0.9), name="convolutions")


def maps(optimizer=None, examples=7):
    """Convolutions whose maps are large enough to be compressed."""
    torch.manual_seed(0)
    stem, blocks = (nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()), [Block(8, group_norm) for _ in range(2)]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    return Task(model, classify, images(examples, 32), optimizer or SGD(lr=0.1, momentum=0.9), name="maps")


def layers(optimizer=None, examples=7):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    generator = torch.Generator().manual_seed(5)
    batch = torch.randn(examples, 20, generator=generator), torch.randint(4, (examples,), generator=generator)
    return Task(model, classify, batch, optimizer or Adam(lr=0.01), name="layers")


class Words(nn.Module):
    def __init__(self, vocabulary=30, width=16):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        kinds = {"dim_feedforward": 32, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 2, **kinds) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.embedding.weight  # tied

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def predict(model, batch):
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def words(optimizer=None, examples=7):
    """Sentences with labels that are ignored: shares of the batch are weighed by the labels that are left."""
    torch.manual_seed(0)
    model = Words()
    generator = torch.Generator().manual_seed(5)
    ids, labels = torch.randint(30, (2, examples, 9), generator=generator)
    for row in range(examples):
        labels[row, row + 1 :] = -100
    batch = {"ids": ids, "labels": labels}
    return Task(model, predict, batch, optimizer or SGD(lr=0.1, momentum=0.9, nesterov=True), name="words")


TASKS = {"convolutions": convolutions, "layers": layers, "words": words}
