"""The README's picture: a step of WRN-28-2, plain and in the paper's mildest sparse setting -> docs/timelines.svg.

Both are predicted; docs/predicted_against_measured.md says how far that is from what a meter reads.
"""

import sys
from pathlib import Path

from shoestring import Plan, builtin
from shoestring.profiling import profile
from shoestring.reporting.figures import overlay_figure
from shoestring.training.apply import lean_task

PATH = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent.parent / "docs" / "timelines.svg"
PLAN = Plan(nonzero=30, precision="fp16", checkpoint="residual-2*", microbatch=10)

task = builtin("wrn-28-2", batch=100, device="meta")
plain, lean = profile(task), profile(lean_task(task, PLAN))
TITLE = "A training step of WRN-28-2, 100 images: tensors in memory, the batch included"
overlay_figure(PATH, plain.ledger, lean.ledger, ("plain PyTorch", "Shoestring"), TITLE, budget_bytes=8_000_000)
print(f"{plain.peak_bytes / 1e6:.1f} MB and {lean.peak_bytes / 1e6:.2f} MB, the batch of 1.23 MB included: {PATH}")
