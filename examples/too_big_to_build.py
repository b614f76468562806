"""A model too big to build: on the meta device it has shapes and no bytes, and can be profiled and planned.

python examples/too_big_to_build.py
"""

import torch
from torch import nn
from torch.nn import functional as F

import shoestring
from shoestring.models import materialise


class Classifier(nn.Module):
    """Wide layers with residual connections."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def task(width: int, depth: int, examples: int = 64) -> shoestring.Task:
    with torch.device("meta"):
        model = Classifier(width, depth)
        batch = torch.empty(examples, width), torch.zeros(examples, dtype=torch.long)
    # On meta nobody can check that losses of microbatches add up to the batch's: here they do, so say so.
    return shoestring.Task(model, loss, batch, shoestring.Adam(), microbatches=True)


def main() -> shoestring.Plan:
    big = task(width=16384, depth=32)
    weights = sum(parameter.nbytes for parameter in big.model.parameters())
    print(f"{weights / 1e9:.0f} GB of weights, none of them allocated")
    # The scratch inside PyTorch's operators is measured by running them, which takes memory that we do not have.
    plain = shoestring.profile(big, calibrate=False)
    print(f"plain training would take {plain.peak_bytes / 1e9:.0f} GB")
    plan = shoestring.plan(big, budget="80GB", calibrate=None)
    print(f"planned for 80 GB: {plan.techniques()}, predicted {plan.predicted_peak_bytes / 1e9:.1f} GB")

    # The same plan on a small sibling, built layer by layer straight into its lean form.
    lean = shoestring.apply(task(width=64, depth=4), plan.with_(budget_bytes=None))
    materialise(lean.model)
    batch = torch.randn(64, 64), torch.randint(10, (64,))
    print(f"a small sibling under the same plan: loss {lean.step(batch).item():.3f}")
    return plan


if __name__ == "__main__":
    main()
