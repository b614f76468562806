"""Predicted and measured peaks of each of several processes on this machine, the bytes that they send, and the time of
a step beside one process with the whole batch.

    python benchmarks/many_processes.py --processes 2 4
    python benchmarks/many_processes.py --only shard    # rows in whose model or plan this word is
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch

import shoestring
from shoestring import Plan, Task, apply, builtin
from shoestring.distributed import joined
from shoestring.measuring import measure_allocator
from shoestring.structure import tensors
from shoestring.techniques.words import described
from shoestring.training.processes import share_of

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "contract"), str(TESTS / "distributed")]
import table  # noqa: E402 - the contract's models
from exact_models import maps  # noqa: E402
from processes import run_in  # noqa: E402

CELLS = [
    ("wrn", Plan()),
    ("wrn", Plan(nonzero=30, precision="fp16", checkpoint="residual-2*", microbatch=2)),
    ("gpt", Plan()),
    ("vit", Plan(microbatch=2)),
    ("mlp", Plan(optimizer="8bit")),
    ("unet", Plan(checkpoint="every-3")),
    ("dynamicconv", Plan(checkpoint="residual-1")),
    *((model, Plan(shard="fsdp")) for model in ("wrn", "gpt", "vit", "mlp", "unet", "dynamicconv")),
    ("mlp", Plan(microbatch=4, shard="fsdp")),
    ("wrn", Plan(checkpoint="every-3", shard="fsdp")),
    ("mlp", Plan(optimizer="8bit", shard="fsdp")),
    ("maps", Plan(activations="pool2", shard="fsdp")),
    ("wrn", Plan(precision="fp16", shard="fsdp")),
    ("vit", Plan(precision="bf16", microbatch=2, shard="fsdp")),
    ("mlp", Plan(optimizer="adafactor", shard="fsdp")),
    ("wrn-28-2", Plan()),
    ("wrn-28-2", Plan(nonzero=30, precision="fp16", checkpoint="residual-2*", microbatch=10)),
    ("wrn-28-2", Plan(shard="fsdp")),
    ("wrn-28-2", Plan(shard="fsdp", checkpoint="residual-2*", microbatch=10)),
]
STEPS = 5


def task_of(model: str) -> Task:
    """A model of the contract, of whose steps little but messages is timed; one with larger maps; or one built in."""
    if model == "maps":
        return maps(examples=64)
    return table.task(model) if model in table.TASKS else builtin(model, batch=100)


def measured(model: str, plan: Plan) -> dict[str, float]:
    """One process: its predicted and measured peak, the bytes it sent in a step, and the seconds of one."""
    world, task = joined(), task_of(model)
    share = share_of(task, task.batch, world.rank, world.size)
    lean = apply(task.with_(batch=share), plan)
    predicted = shoestring.profile(lean.task).peak_bytes
    for _ in range(2):
        lean.step(share)
    peak = measure_allocator(lambda: lean.step(share), [*lean.held(), *tensors(share)]).peak_bytes
    before, start = world.sent_bytes + world.gathered_bytes, time.perf_counter()
    for _ in range(STEPS):
        lean.step(share)
    seconds, sent = (time.perf_counter() - start) / STEPS, world.sent_bytes + world.gathered_bytes
    return {"predicted": predicted, "peak": peak, "sent": (sent - before) / STEPS, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", default="", metavar="WORD", help="rows in whose model or plan this word is")
    args = parser.parse_args()
    sizes = args.processes
    torch.set_num_threads(1)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    print("| model | plan | processes | predicted, of each | measured, worst | sent per step | time of a step, ratio |")
    print("|---|---|---|---|---|---|---|")
    for model, plan in CELLS:
        words = described(plan.techniques().items()) or "none"
        if args.only not in f"{model} {words}":
            continue
        alone = measured(model, plan.for_one())["seconds"]
        for size in sizes:
            found = run_in(size, measured, model, plan)
            worst = max(found, key=lambda one: abs(one["peak"] - one["predicted"]))
            row = [
                model,
                words,
                str(size),
                f"{worst['predicted']:,.0f} B",
                f"{worst['peak']:,.0f} B",
                f"{worst['sent']:,.0f} B",
                f"{max(one['seconds'] for one in found) / alone:.2f}",
            ]
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
