"""Accelerate with a plan: `lean.backward(batch)` takes the place of the forward pass and of accelerator.backward(loss).

pip install accelerate
python examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoestring


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


def main(epochs: int = 3, accumulated: int = 2) -> list[float]:
    torch.manual_seed(0)
    inputs = torch.randn(2048, 64)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :10].argmax(1)), batch_size=128, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    task = shoestring.Task(model, loss, next(iter(loader)), torch.optim.AdamW(model.parameters(), lr=3e-3), clip=1.0)
    lean = shoestring.apply(task, shoestring.Plan(microbatch=32, optimizer="8bit"))  # or shoestring.plan(task, "2MB")

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
    scheduler = torch.optim.lr_scheduler.LinearLR(lean.optimizer, 1.0, 0.1, total_iters=24)
    optimizer, loader, scheduler = accelerator.prepare(lean.optimizer, loader, scheduler)
    losses = []
    for epoch in range(epochs):
        total = 0.0
        for batch in loader:
            with accelerator.accumulate(lean.model):
                total += lean.backward(batch, weight=1 / accumulated).item()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        losses.append(total * accumulated / len(loader))
        print(f"epoch {epoch}: loss {losses[-1]:.3f}, learning rate {scheduler.get_last_lr()[0]:.2g}")
    return losses


if __name__ == "__main__":
    main()
