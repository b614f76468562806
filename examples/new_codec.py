"""A new codec for saved activations: rounded to 8 bits, one scale per tensor.

python examples/new_codec.py
"""

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F

import shoestring
from shoestring.techniques.activations.codecs import CODECS, Codec
from shoestring.techniques.technique import Risk


class Byte:
    """What is stored of one tensor: 8-bit codes and their scale. `take()` gives back what the backward pass reads."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self.scale = tensor.abs().amax().clamp(min=1e-12) / 127
        self.codes = (tensor / self.scale).round_().to(torch.int8)

    def take(self) -> torch.Tensor:
        return self.codes.to(self.dtype).mul_(self.scale)


def takes(tensor: torch.Tensor, channel: int) -> bool:
    """Which tensors are for it; `channel` is the dimension of their channels."""
    return tensor.is_floating_point()


# `opened()` is entered once per pass and yields the function that packs a tensor.
CODECS["byte"] = Codec("byte", takes, Risk.APPROXIMATE, opened=lambda: nullcontext(Byte))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def main() -> list[tuple[float, float]]:
    """-> (predicted peak, loss after five updates), plain and with the codec."""
    results = []
    for plan in (shoestring.Plan(), shoestring.Plan(activations="byte")):
        torch.manual_seed(0)
        model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.Tanh())))
        batch = torch.randn(1024, 256), torch.randint(256, (1024,))
        task = shoestring.Task(model, loss, batch, shoestring.SGD(lr=0.1))
        lean = shoestring.apply(task, plan)
        peak = shoestring.profile(lean.task).peak_bytes  # predicted by running the codec on fake tensors
        value = [lean.step(batch).item() for _ in range(5)][-1]
        print(f"{plan.techniques() or 'plain'}: {peak / 1e6:.2f} MB, loss {value:.5f}")
        results.append((peak, value))
    return results


if __name__ == "__main__":
    main()
