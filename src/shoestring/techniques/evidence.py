"""The runs of our own behind the labels: what each technique alone cost beside FP32.

`shoestring study run neutral --scale small --data DIR` makes the numbers; a test compares them with docs/results.
"""

from typing import NamedTuple

WHERE = "WRN-16-1, CIFAR-10 at 16 x 16, 3 epochs, 3 seeds: docs/results/neutral.small.md"


class Evidence(NamedTuple):
    """Points of accuracy beside FP32 with the same first weights and batches, and 1.96 standard errors of them."""

    points: float
    margin: float

    def __str__(self) -> str:
        told = "no difference found" if abs(self.points) <= self.margin else "a difference"
        return f"{self.points:+.1f} ± {self.margin:.1f} points of accuracy in our runs, {told} ({WHERE})"


SHORT = {
    "FP16": Evidence(0.5, 1.2),
    "BF16": Evidence(0.53, 1.61),
    "microbatch 10": Evidence(-1.74, 1.21),
    "8-bit state": Evidence(0.45, 2.04),
}
