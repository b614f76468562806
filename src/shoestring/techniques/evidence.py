"""The runs of our own behind the labels: what each technique alone cost beside FP32.

`shoestring study run neutral --scale small --data DIR` makes the numbers, `figure6` and `figure4` those of the longer
runs; a test compares them with docs/results.
"""

from typing import NamedTuple

WHERE = "WRN-16-1, CIFAR-10 at 16 x 16, 3 epochs, 3 seeds: docs/results/neutral.small.md"
LONGER = "WRN-28-2, 10 epochs, a single seed: docs/results/{study}.small.md"


class Evidence(NamedTuple):
    """Points of accuracy beside FP32 with the same first weights and batches, and 1.96 standard errors of them; those
    of a longer run, and the study that has it."""

    points: float
    margin: float
    longer: float
    study: str = "figure6"

    def __str__(self) -> str:
        told = "no difference found" if abs(self.points) <= self.margin else "a difference"
        more = f"{self.longer:+.1f} ({LONGER.format(study=self.study)})"
        return f"{self.points:+.1f} ± {self.margin:.1f} points of accuracy in our runs, {told} ({WHERE}), and {more}"


SHORT = {
    "FP16": Evidence(0.5, 1.2, longer=-0.43),
    "BF16": Evidence(0.53, 1.61, longer=-0.18),
    "microbatch 10": Evidence(-1.74, 1.21, longer=-0.95, study="figure4"),
    "8-bit state": Evidence(0.45, 2.04, longer=0.37),
}
