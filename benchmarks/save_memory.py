"""What a save costs beside PyTorch's and safetensors' own: seconds, and bytes of heap on top of the model.

    python benchmarks/save_memory.py [--megabytes 100] [--repeats 5]

Seconds are medians, the three taking turns; each includes fsync. Bytes are those of the heap meter, in a
process of its own for each.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from shoestring.measuring import measure_heap
from shoestring.runs.save import Saves
from shoestring.runs.state import ModelState


def model(megabytes: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(500, 500, bias=False) for _ in range(megabytes)))


def synced(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def save_torch(net: nn.Module, folder: Path) -> None:
    torch.save(net.state_dict(), folder / "a.pt")
    synced(folder / "a.pt")


def load_torch(net: nn.Module, folder: Path) -> None:
    net.load_state_dict(torch.load(folder / "a.pt", weights_only=True))


def save_safetensors(net: nn.Module, folder: Path) -> None:
    save_file(net.state_dict(), folder / "a.safetensors")
    synced(folder / "a.safetensors")


def load_safetensors(net: nn.Module, folder: Path) -> None:
    net.load_state_dict(load_file(folder / "a.safetensors"))


def save_ours(net: nn.Module, folder: Path) -> None:
    Saves(folder / "saves").write(1, "", {"model": ModelState(net)})


def load_ours(net: nn.Module, folder: Path) -> None:
    Saves(folder / "saves").newest().restore("model", ModelState(net), in_place=True)


PAIRS = {
    "torch.save": (save_torch, load_torch),
    "safetensors": (save_safetensors, load_safetensors),
    "shoestring (checked)": (save_ours, load_ours),
}
_net: nn.Module | None = None


def measured(name: str, which: int, megabytes: int) -> None:
    """Run by the heap meter twice: the first time the model is made and saved, and what is late is loaded."""
    global _net
    if _net is None:
        _net = model(megabytes)
    with tempfile.TemporaryDirectory() as folder:
        if which:
            PAIRS[name][0](_net, Path(folder))
        PAIRS[name][which](_net, Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    net = model(args.megabytes)
    seconds: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.repeats):
            for name, pair in PAIRS.items():
                for which, function in enumerate(pair):
                    start = time.perf_counter()
                    function(net, Path(folder))
                    seconds.setdefault((name, which), []).append(time.perf_counter() - start)
    print(f"{args.megabytes} MB of weights   {'save s':>8}{'heap MB':>9}{'load s':>8}{'heap MB':>9}")
    for name in PAIRS:
        row = [f"{name:<21}"]
        for which in (0, 1):
            heap = measure_heap(f"{__file__}:measured", args=[name, which, args.megabytes], warmups=1)
            row.append(f"{statistics.median(seconds[name, which]):8.2f}{heap.peak_bytes / 1e6:9.2f}")
        print("".join(row))


if __name__ == "__main__":
    main()
