"""How long planning takes, in seconds of CPU on one thread: small transformers and WRN-28-2, shares of plain's peak.

    python benchmarks/plan_time.py                      # all, at 70, 40 and 20% and the default risk
    python benchmarks/plan_time.py --model bert --share 0.4

The scratch of operators is measured before the clock starts, as it is known on a machine that planned before. CPU time
grows on a busy machine too, for caches are shared: the operators' calls that a plan traces are printed beside it.

The table is in docs/planning_time.md.
"""

import argparse
import time
from collections.abc import Callable

import torch
import transformers
import zoo_models

import shoestring
from shoestring import NoPlanFits, Task
from shoestring.profiling.trace import Tracer

MODELS: dict[str, Callable[[], Task]] = {
    "bert": lambda: zoo_models.task("bert"),
    "gpt2": lambda: zoo_models.task("gpt2"),
    "wrn-28-2": lambda: shoestring.builtin("wrn-28-2", batch=100),
    "gpt-12": lambda: twelve_layers(),
    "dynamicconv": lambda: shoestring.builtin("dynamicconv-iwslt", tokens=4000),
}


def twelve_layers() -> Task:
    """GPT-2 as published, 124 million parameters, on 4 x 256 tokens."""
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False))
    ids = torch.randint(model.config.vocab_size, (4, 256))
    return Task(model, lambda model, batch: model(input_ids=batch, labels=batch).loss, ids, shoestring.Adam())


def planned(task: Task, budget: int) -> tuple[float, int, str]:
    """-> seconds of CPU, traces, and the plan in words."""
    traces: list[str] = []
    start = time.process_time()
    try:
        found = shoestring.plan(task, budget, progress=traces.append).techniques()
    except NoPlanFits:
        found = {"no plan": ""}
    words = ", ".join(f"{name} {value}".strip() for name, value in found.items()) or "as it is"
    return time.process_time() - start, len(traces), words


class Counted:
    """Counts the operators' calls of all traces."""

    def __init__(self) -> None:
        self.calls, self._call = 0, Tracer._call

    def install(self) -> None:
        def call(tracer: Tracer, *args: object) -> object:
            self.calls += 1
            return self._call(tracer, *args)  # type: ignore[arg-type]

        Tracer._call = call  # type: ignore[method-assign, assignment]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--share", type=float, nargs="+", default=[0.7, 0.4, 0.2])
    args = parser.parse_args()
    torch.set_num_threads(1)
    counted = Counted()
    counted.install()
    for name in args.model:
        task = MODELS[name]()
        peak = shoestring.profile(task).peak_bytes
        for share in args.share:
            before = counted.calls
            seconds, traces, words = planned(task, int(share * peak))
            calls = counted.calls - before
            print(
                f"{name:10} {share:4.0%} {seconds:6.1f} s of CPU, {traces:2} traces, {calls:6} calls: {words}",
                flush=True,
            )


if __name__ == "__main__":
    main()
