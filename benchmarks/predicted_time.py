"""The planner's time model against the clock: predicted and measured time of a step under many plans.

    python benchmarks/predicted_time.py --model wrn-16-1 --batch 50

Both are ratios to plain training; measured ones are medians of steps that were taken in turn.
"""

import argparse

import torch
from lean_steps import builtin, times

from shoestring.measuring import calibrate
from shoestring.measuring.calibration import load_cache
from shoestring.measuring.rates import device_rates
from shoestring.planning.options import Option
from shoestring.planning.search import Search
from shoestring.techniques.technique import Risk

PLANS: tuple[dict, ...] = (
    {"checkpoint": "residual-1*"},
    {"checkpoint": "residual-2*"},
    {"microbatch": 10},
    {"precision": "fp16"},
    {"precision": "fp16", "microbatch": 10},
    {"precision": "fp16", "optimizer": "8bit", "microbatch": 10},
    {"precision": "fp16", "checkpoint": "residual-2*", "microbatch": 10},
    {"nonzero": 30},
    {"nonzero": 30, "precision": "fp16", "checkpoint": "residual-2*", "microbatch": 10},
    {"nonzero": 10, "precision": "fp16", "checkpoint": "residual-2*", "microbatch": 10},
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="wrn-16-1")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    search = Search(builtin(args.model, args.batch), 0, device_rates(), dict(load_cache()), calibrate)
    plain = search.seconds(Option((), Risk.EXACT))
    measured = times(args.model, args.batch, [{}, *PLANS], args.repeats)
    print(f"{args.model}, batch {args.batch}: plain predicted {plain:.3f} s, measured {measured[0]:.3f} s")
    for plan, seconds in zip(PLANS, measured[1:], strict=True):
        predicted = search.seconds(Option(tuple(plan.items()), Risk.EXACT))
        print(f"  predicted {predicted / plain:.2f}, measured {seconds / measured[0]:.2f}  {plan}", flush=True)


if __name__ == "__main__":
    main()
