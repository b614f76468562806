"""Budgets against the heap meter: plans for many models, budgets and risks, each run in a fresh process.

    python benchmarks/budgets_kept.py                    # all cases, a line each; ends with how many were over
    python benchmarks/budgets_kept.py --model wrn-16-1 --share 0.5

A budget is a share of what plain training occupies on the heap. Compared with it is the heap's peak over building
the model in its lean form and two steps, and the batch, which was there before.
"""

import argparse
import sys

import torch
from lean_steps import builtin, heap

from shoestring.measuring import calibrate
from shoestring.measuring.calibration import load_cache
from shoestring.planning.search import Search
from shoestring.planning.timing import device_rates
from shoestring.techniques.risk import Risk
from shoestring.training.budget import batch_bytes
from shoestring.units import format_bytes

MODELS = {"wrn-28-2": 100, "wrn-16-1": 50, "resnet18": 8, "vit-tiny": 8, "dynamicconv-iwslt": 500}  # items in a batch
SHARES = (0.9, 0.7, 0.5, 0.35, 0.2, 0.1, 0.05)
RISKS = ("exact", "neutral", "approximate")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--share", type=float, nargs="+", default=SHARES)
    parser.add_argument("--risk", choices=RISKS, nargs="+", default=RISKS)
    args = parser.parse_args()
    cases = over = 0
    for model in args.model:
        size = MODELS[model]
        task = builtin(model, size)
        given = batch_bytes(task.batch)
        plain = heap(model, size, {}) + given
        print(f"{model}, {size} at a time: plain training {format_bytes(plain)}", flush=True)
        search = Search(task, 0, device_rates(torch.get_num_threads()), dict(load_cache()), calibrate)
        measured: dict[str, int] = {}
        for share in args.share:
            search.budget = int(share * plain)
            for risk in args.risk:
                levels = (search.best(level) for level in Risk if level <= Risk.named(risk))
                option = next((option for option in levels if option is not None), None)
                if option is None:
                    print(f"  {format_bytes(search.budget):>9} {risk:12} no plan fits", flush=True)
                    continue
                found = search.finish(option)
                settings = found.techniques()
                if str(settings) not in measured:
                    measured[str(settings)] = heap(model, size, settings) + given
                taken = measured[str(settings)]
                cases, over = cases + 1, over + (taken > search.budget)
                print(
                    f"  {format_bytes(search.budget):>9} {risk:12} predicted "
                    f"{format_bytes(found.predicted_peak_bytes or 0):>9}, heap {format_bytes(taken):>9}"
                    f"{'  OVER' if taken > search.budget else ''}  {settings}",
                    flush=True,
                )
    print(f"{cases} cases, {over} over their budget")
    sys.exit(over > 0)


if __name__ == "__main__":
    main()
