"""The suite of faults with its full numbers, and docs/reliability.md with what was run.

    python tests/faults/run.py --share 0.1 --write docs/reliability.md   # a tenth of each part
    python tests/faults/run.py flips poisoned --share 1 --write FILE      # some parts, in full; FILE keeps the others

Each part is a function of its seed. It counts what it did, and what went wrong: a word on any of these is a failure.
"""

import argparse
import datetime
import os
import platform
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "training"))
sys.path.append(str(Path(__file__).parents[1] / "data"))
sys.path.append(str(Path(__file__).parents[1] / "distributed"))

import budget_pairs
import damaged_files
import growth
import kills
import odd_lines
import readers
import system
import torch

from shoestring.kernels.core import build

ROOT = Path(__file__).parents[2]
Outcome = tuple[Counter, list]


@dataclass(frozen=True)
class Part:
    """A part of the suite: its full number, what it does, and how. `run(count, seed, folder)`."""

    full: int
    about: str
    run: Callable[[int, int, Path], Outcome]


def killed(count: int, seed: int, folder: Path) -> Outcome:
    """Kills over all settings in turn; each run must end with the bytes of one that was not killed."""
    settings = (*kills.SETTINGS, *kills.EACH)
    with kills.Server(settings) as server:
        return _over(settings, count, folder, lambda *how: kills.check(server, *how, seed))


def killed_together(count: int, seed: int, folder: Path) -> Outcome:
    """The same in two processes, either of which is killed."""
    import test_killed_processes as together

    return _over(kills.SETTINGS, count, folder, lambda *how: together.check(*how, seed))


def _over(settings: tuple[str, ...], count: int, folder: Path, check: Callable[[str, int, Path], int]) -> Outcome:
    found: Counter = Counter()
    for number, setting in enumerate(settings):
        share = count // len(settings) + (number < count % len(settings))
        if share:
            place = folder / str(number)
            place.mkdir()
            found["runs compared"] += check(setting, share, place)
            found["kills"] += share
    return found, []


def damaged(count: int, seed: int, folder: Path) -> Outcome:
    return _each(damaged_files.FAMILIES, damaged_files.check_family, count, seed, folder)


def read(count: int, seed: int, folder: Path) -> Outcome:
    return _each(readers.READERS, readers.check, count * len(readers.READERS), seed, folder)


def _each(names: object, check: Callable[..., Outcome], count: int, seed: int, folder: Path) -> Outcome:
    found, bad = Counter(), []
    for name in list(names):  # type: ignore[call-overload]
        place = folder / name.replace(" ", "-")
        place.mkdir()
        one, wrong = check(name, max(1, count // len(list(names))), seed, place)  # type: ignore[call-overload]
        found.update({f"{name} {what}": number for what, number in one.items()})
        bad += [(name, str(what)[:300]) for what in wrong]
    return found, bad


def lines(count: int, seed: int, folder: Path) -> Outcome:
    codes, bad = odd_lines.check(count, seed, folder)
    return Counter({f"exit code {code}": number for code, number in codes.items()}), bad


def grows(count: int, seed: int, folder: Path) -> Outcome:
    found, bad = Counter(), []
    for rewires in (False, True):
        more_bytes, more_objects, times = growth.grown(count, 200, rewires)
        name = "with rewiring" if rewires else "without"
        found.update({f"bytes {name}": more_bytes, f"objects {name}": more_objects, f"rewirings {name}": times})
        if more_bytes > growth.MOST_BYTES or more_objects > growth.MOST_OBJECTS:
            bad.append(f"{count} steps {name}: {more_bytes} bytes and {more_objects} objects")
    return found, bad


CORES = ("generic", "avx2", "avx512", "lanes16")


def sanitized(count: int, seed: int, folder: Path) -> Outcome:
    """The compiled kernels, among them those that read the index of a saved sparse layer, under AddressSanitizer: the
    cores that run on this CPU."""
    test = "tests/kernels/test_fuzz.py"
    cores = [core for core in CORES if build("generic").supports(core)][:count]
    chosen = " or ".join(f"(memory and {core})" for core in cores)
    options = ["-q", "-n", "0", "-m", "slow", "-k", f"sanitizer or {chosen}", "--timeout=3600"]
    command = [sys.executable, "-m", "pytest", test, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = Counter({f"calls of each kernel family, {core}": 300 for core in cores})
    return found, [done.stdout[-2000:]] if done.returncode else []


PARTS = {
    "kills": Part(1000, "SIGKILL at random moments, bytes and calls of a save, all techniques by 2 optimizers", killed),
    "kills-together": Part(100, "the same of either of 2 processes, 6 kinds of runs", killed_together),
    "save-calls": Part(
        1, "ENOSPC, EIO, EROFS, EINTR and EDQUOT at every system call of a save (the share is of all of them)",
        lambda count, seed, folder: system.save_calls(count, seed, folder),
    ),
    "flips": Part(10_000, "a flipped bit in a file of a run folder, every file in turn", system.flips),
    "files": Part(98_000, "damaged plans, records, manifests, weights, studies, results and settings", damaged),
    "lines": Part(2000, "command lines made at random", lines),
    "readers": Part(50_000, "changed data files, of each reader", read),
    "poisoned": Part(200, "NaN or infinity in an output, input, gradient or weight", system.poisoned),
    "budgets": Part(200, "plans for models and budgets drawn at random, on the heap", budget_pairs.check),
    "growth": Part(20_000, "steps with and without rewiring, and what they leave behind", grows),
    "sanitizer": Part(4, "the compiled kernels under AddressSanitizer, by core", sanitized),
}  # fmt: skip


def count_of(name: str, share: float) -> float:
    full = PARTS[name].full
    return share if name == "save-calls" else max(1, round(share * full))


def rows(names: list[str], shares: dict[str, float], seed: int) -> Iterator[tuple[str, str, int]]:
    """Runs parts -> for each its name, its row of the table, and how much went wrong."""
    for name in names:
        part, count, began = PARTS[name], count_of(name, shares[name]), time.monotonic()
        print(f"{name}: {count:,} of {part.full:,}, seed {seed}", file=sys.stderr, flush=True)
        with kills.quick_folder() as folder:
            found, bad = part.run(count, seed, Path(folder))  # type: ignore[arg-type]
        told = ", ".join(f"{number:,} {what}" for what, number in found.items())
        print(f"  {told}; {len(bad)} wrong {bad[:3]}", file=sys.stderr, flush=True)
        run = f"{count:.0%} of all" if name == "save-calls" else f"{count:,} of {part.full:,}"
        taken, today = f"{time.monotonic() - began:,.0f}", datetime.date.today()
        cells = name, part.about, run, told, len(bad), taken, today, seed, where()
        yield name, f"| {' | '.join(map(str, cells))} |", len(bad)


def earlier(file: Path) -> dict[str, str]:
    """The page's rows by part."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {name: line for line in lines if line.startswith("| ") and (name := line.split("|")[1].strip()) in PARTS}


def cpu() -> str:
    with open("/proc/cpuinfo") as file:
        names = (line.partition(":")[2].strip() for line in file if line.startswith("model name"))
        return next(names, platform.machine())


def where() -> str:
    return f"{cpu()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"


def page(found: dict[str, str]) -> str:
    """The rows by part -> the page; parts in the order of PARTS, and those that were never run by name."""
    left_out = [name for name in PARTS if name not in found]
    missing = [f"Not run: {', '.join(left_out)}.", ""] if left_out else []
    return "\n".join([
        "# Reliability",
        "Made by `make test-faults` (`tests/faults/run.py`), each row by the last run of its part; short forms are in",
        "`make test`.",
        "",
        "| part | what | run | found | wrong | seconds | date | seed | where |",
        "|---|---|---|---|---|---|---|---|---|",
        *(found[name] for name in PARTS if name in found),
        "",
        *missing,
        '"Wrong" is anything else than was promised: other bits after a kill, a bare error of the system, a flip that',
        "nobody noticed, an answer that is not one line, a number that is not finite in a save, a budget that the heap",
        f"exceeded, steps that leave over {growth.MOST_BYTES:,} bytes or {growth.MOST_OBJECTS:,} small objects behind.",
        "",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--share", default="1", help="of the full numbers: 0.1, or flips=1,lines=0.05 for some")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, metavar="FILE")
    args = parser.parse_args()
    names = args.parts or list(PARTS)
    if unknown := sorted(set(names) - set(PARTS)):
        parser.error(f"there is no part {unknown[0]!r}: use {', '.join(PARTS)}")
    given = dict(word.split("=") for word in args.share.split(",") if "=" in word)
    usual = next((word for word in args.share.split(",") if "=" not in word), "1")
    shares = {name: float(given.get(name, usual)) for name in PARTS}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = earlier(args.write) if args.write else {}
    wrong = []
    for name, row, count in rows(names, shares, args.seed):
        found[name] = row
        wrong += [row] if count else []
        if args.write:
            args.write.write_text(page(found))
    sys.exit(f"wrong: {wrong}" if wrong else 0)


if __name__ == "__main__":
    main()
