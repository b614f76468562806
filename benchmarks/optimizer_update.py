"""Milliseconds per million parameters of one optimizer update, ours beside torch.optim and, where installed, peers.

    python benchmarks/optimizer_update.py [--numel 4096000] [--repeats 15] [--json FILE]

All contenders update their own copy of one FP32 weight with the same gradients, in turn, in one process, so that all
meet the same noise. On one thread a figure is CPU time, which other processes do not lengthen; on two it is wall time,
which they do. bitsandbytes and torchao take part where they can be imported and have a path for this CPU;
where they do not, the reason is printed in place of a time.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from lean_steps import cpu_name
from torch import nn

from shoestring import SGD, Adam
from shoestring.kernels import core
from shoestring.techniques.optimizer import LeanSettings
from shoestring.techniques.optimizer.factored import SM3, Adafactor

Maker = Callable[[Iterable[nn.Parameter]], Any]
COLUMNS = 1024
ADAM, MOMENTUM = Adam(lr=1e-3), SGD(lr=1e-3, momentum=0.9)


def ours() -> dict[str, Maker]:
    forms = ("fp32", "fp16", "bf16", "8bit")
    made: dict[str, Maker] = {f"ours, Adam {form}": LeanSettings(ADAM, form) for form in forms}
    made |= {f"ours, SGD {form}": LeanSettings(MOMENTUM, form) for form in forms}
    return made | {"ours, SM3": SM3(), "ours, Adafactor": Adafactor()}


def torchs() -> dict[str, Maker]:
    # Without a word torch.optim takes neither of the two on a CPU: tensor after tensor, operator after operator.
    ways: dict[str, dict[str, bool]] = {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}
    made: dict[str, Maker] = {}
    for name, way in ways.items():
        made[f"torch, Adam fp32, {name}"] = lambda p, way=way: torch.optim.Adam(p, lr=1e-3, **way)
        made[f"torch, SGD fp32, {name}"] = lambda p, way=way: torch.optim.SGD(p, lr=1e-3, momentum=0.9, **way)
    return made


def bitsandbytes_adam(parameters: Iterable[nn.Parameter]) -> Any:
    import bitsandbytes

    return bitsandbytes.optim.Adam8bit(parameters, lr=1e-3)


def torchao_adam(parameters: Iterable[nn.Parameter]) -> Any:
    from torchao.optim import Adam8bit

    return Adam8bit(parameters, lr=1e-3)


def contenders() -> dict[str, Maker]:
    peers: dict[str, Maker] = {"bitsandbytes, Adam 8bit": bitsandbytes_adam, "torchao, Adam 8bit": torchao_adam}
    return ours() | torchs() | peers


class Contender:
    """An optimizer with a weight of its own; `reason` says why it cannot take part, if it cannot."""

    def __init__(self, make: Maker, start: torch.Tensor, gradient: torch.Tensor, clock: Callable[[], float]) -> None:
        self.weight, self.gradient, self.clock = nn.Parameter(start.clone()), gradient, clock
        self.seconds: list[float] = []
        self.reason = ""
        try:
            self.optimizer = make([self.weight])
            for _ in range(3):  # state is made, and what compiles compiles
                self.update()
            if torch.equal(self.weight.detach(), start):
                self.reason = "ran, and changed nothing"
        except Exception as error:  # whatever a peer raises is why it cannot take part
            self.reason = f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
        self.seconds.clear()

    def update(self) -> None:
        self.weight.grad = self.gradient
        start = self.clock()
        self.optimizer.step()
        self.seconds.append(self.clock() - start)

    def state_bytes(self) -> int:
        """Bytes of state; a peer's own tensor types are asked for the tensors inside them."""
        return sum(map(_bytes, self.optimizer.state[self.weight].values()))


def _bytes(part: Any) -> int:
    if not isinstance(part, torch.Tensor):
        return 0
    if type(part) in (torch.Tensor, nn.Parameter):
        return part.nbytes
    return sum(_bytes(getattr(part, name)) for name in part.__tensor_flatten__()[0])


def measure(numel: int, repeats: int, threads: int) -> dict[str, dict[str, Any]]:
    """-> for each contender the least and the median milliseconds per million parameters, or why there are none."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    shape = (numel // COLUMNS, COLUMNS)  # a matrix: SM3 and Adafactor keep a number a row and a column
    start, gradient = (torch.randn(shape, generator=generator) for _ in range(2))
    clock = time.process_time if threads == 1 else time.perf_counter
    taking_part = {name: Contender(make, start, gradient * 1e-2, clock) for name, make in contenders().items()}
    for _ in range(repeats):
        for contender in taking_part.values():
            if not contender.reason:
                contender.update()
    return {name: result(contender, start.numel()) for name, contender in taking_part.items()}


def result(contender: Contender, numel: int) -> dict[str, Any]:
    if contender.reason:
        return {"reason": contender.reason}
    per_million = [1e3 * seconds / (numel / 1e6) for seconds in contender.seconds]
    return {
        "least_ms": min(per_million),
        "median_ms": statistics.median(per_million),
        "state_bytes_each": contender.state_bytes() / numel,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=4_096_000)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json")
    args = parser.parse_args()
    results = {}
    for threads in (1, 2):
        results[threads] = measure(args.numel, args.repeats, threads)
        print(f"\n{cpu_name()}, torch {torch.__version__}, core {core.name}")
        print(f"{threads} thread(s), {args.numel:,} parameters: ms per million, least (median); state bytes each")
        for name, row in results[threads].items():
            told = row.get("reason") or (
                f"{row['least_ms']:7.2f} ({row['median_ms']:7.2f})   {row['state_bytes_each']:5.2f}"
            )
            print(f"  {name:<34} {told}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
