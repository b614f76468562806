"""Your own training loop inside a memory budget: `lean.step(batch)` takes the place of forward, backward and update.

python examples/own_loop.py
"""

import torch
from torch import nn
from torch.nn import functional as F

import shoestring


def batches(count: int, size: int = 1000) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Random points in 64 dimensions, labelled by the largest of their first ten coordinates."""
    points = (torch.randn(size, 64) for _ in range(count))
    return [(x, x[:, :10].argmax(1)) for x in points]


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def accuracy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Plain PyTorch: outside a step, the lean model is an ordinary module."""
    inputs, labels = batch
    model.eval()
    with torch.no_grad():
        right = model(inputs).argmax(1) == labels
    model.train()
    return right.float().mean().item()


def main(updates: int = 60) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    *train, test = batches(updates + 1)

    # A task is what a training step needs: model, loss(model, batch), an example batch and an optimizer.
    task = shoestring.Task(model, loss, train[0], shoestring.SGD(lr=0.1, momentum=0.9))
    plain = shoestring.profile(task).peak_bytes
    plan = shoestring.plan(task, budget=plain // 2)
    print(f"plain training needs {plain / 1e6:.1f} MB; planned: {plan.techniques()}")

    lean = shoestring.apply(task, plan)
    for number, batch in enumerate(train):
        value = lean.step(batch)  # one whole update; returns the batch's mean loss
        if number % 20 == 0:
            print(f"update {number}: loss {value.item():.3f}, accuracy {accuracy(lean.model, test):.2f}")
    reached = accuracy(lean.model, test)
    print(f"accuracy {reached:.2f} after {updates} updates, predicted peak {plan.predicted_peak_bytes / 1e6:.1f} MB")
    return reached


if __name__ == "__main__":
    main()
