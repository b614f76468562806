"""`shoestring doctor`: reports what is installed, what works on this machine, and what is missing."""

import argparse
import os
import platform
import re
from typing import Any

from .. import __version__
from ..errors import ShoestringError, how_to_install
from .options import command, print_json

CPU_FEATURES = ("avx2", "fma3", "f16c", "avx512_f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16")
NOT_FOR_USERS = ("dev",)  # extras for developers


def add(subparsers: Any) -> None:
    purpose = "tell what is installed, what it can do here, and what is missing; a tiny model is trained"
    command(subparsers, "doctor", run, purpose, ("", "--json"))


def run(args: argparse.Namespace) -> int:
    health = examine()
    if args.json:
        print_json(health)
    else:
        _show(health)
    return 0 if health["healthy"] else 1


def examine() -> dict[str, Any]:
    """-> the doctor's findings as JSON; `problems` says what to fix."""
    try:
        import torch
    except (ImportError, OSError) as error:
        raise ShoestringError(f"torch does not load: {error}; run pip install torch") from error
    from ..cache import cache_folder
    from ..measuring import available

    core = _core()
    trial = _trial() if core["problem"] is None else {"problem": None, "words": "not tried"}
    products = _products()
    problems = [found["problem"] for found in (core, trial, products) if found["problem"]]
    return {
        "healthy": not problems,
        "problems": problems,
        "trial": trial,
        "versions": {
            "shoestring": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "onednn": _onednn(torch.__config__.show()),
        },
        "core": core,
        "products": products,
        "cpu": _cpu(torch),
        "threads": torch.get_num_threads(),
        "meters": {name: {"works": works, "how": how} for name, (works, how) in available().items()},
        "cache": str(cache_folder()),
        "extras": _extras(),
    }


def _core() -> dict[str, Any]:
    """Which build of the compiled core runs, and the reason; without one, the problem."""
    forced = os.environ.get("SHOESTRING_CORE", "")
    try:
        from ..kernels import core
    except Exception as error:
        mend = "install again from a checkout with pip install --force-reinstall ."
        problem = f"the compiled core does not load: {error}; {mend}, or set SHOESTRING_CORE=torch"
        return {"name": None, "lanes": None, "reason": str(error), "problem": problem}
    found = "lacks AVX2, FMA or F16C" if core.name == "generic" else f"has {core.NEEDS.get(core.name)}"
    reason = f"SHOESTRING_CORE={forced} says so" if forced else f"this CPU {found}"
    lanes = None if core.core is None else core.core.lanes
    return {"name": core.name, "lanes": lanes, "reason": reason, "problem": None}


def _products() -> dict[str, Any]:
    """Whether matrix products in BF16 run, which some machines announce and do not."""
    from ..measuring.products import VARIABLE, WITHOUT_AMX, products_crash

    if not products_crash():
        return {"words": "run", "problem": None}
    words = "end the process with an illegal instruction of oneDNN's (AMX)"
    cure = f"set {VARIABLE}={WITHOUT_AMX} before you start Python"
    return {"words": words, "problem": f"matrix products of PyTorch in bf16 {words}: {cure}"}


def _trial() -> dict[str, Any]:
    """Profiles, plans and trains a tiny model: versions that import may still not work together."""
    try:
        predicted, measured, plan = _tried()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        problem = f"a step does not run here: {type(error).__name__}: {lines[0]}; install the torch of pyproject.toml"
        return {"problem": problem, "words": "failed"}
    words = f"planned {plan}; a step was predicted to need {predicted:,} bytes and took {measured:,}"
    wrong = abs(predicted - measured) > 0.01 * measured
    doubt = "what a step needs is not what was predicted, so budgets may not be kept here" if wrong else None
    return {"problem": doubt, "words": words, "predicted_bytes": predicted, "measured_bytes": measured}


def _tried() -> tuple[int, int, str]:
    """-> bytes of a tiny model's step, predicted and measured, under the plan made for it."""
    import torch
    from torch import nn

    from ..measuring import calibrate, calibrated, measure_allocator
    from ..planning.search import plan
    from ..profiling import profile
    from ..structure import tensors
    from ..task import SGD, Task
    from ..techniques.words import described
    from ..training.apply import apply

    with torch.random.fork_rng():
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))
        batch = torch.randn(256, 64), torch.randint(8, (256,))
    task = Task(
        model, lambda model, pair: nn.functional.cross_entropy(model(pair[0]), pair[1]), batch, SGD(momentum=0.9)
    )
    chosen = plan(task, "95%", "exact", calibrate=calibrate)
    lean = apply(task, chosen)
    predicted = calibrated(lambda table: profile(lean.task, table, brief=True)).peak_bytes
    reading = measure_allocator(lambda: [lean.step(batch) for _ in range(2)], [*lean.held(), *tensors(batch)])
    return predicted, reading.peak_bytes, described(chosen.techniques().items()) or "no technique"


def _onednn(build: str) -> str | None:
    found = re.search(r"(?:MKL-DNN|oneDNN) v(\S+)", build)
    return found[1] if found else None


def _cpu(torch: Any) -> dict[str, Any]:
    able = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return {
        "name": able.get("cpu_name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "features": [name for name in CPU_FEATURES if able.get(name)],
        "torch_uses": torch.backends.cpu.get_cpu_capability(),
    }


def _extras() -> dict[str, dict[str, Any]]:
    """Each optional extra: whether all of it is installed, and the command that installs it."""
    from importlib.metadata import requires  # late: it is slower to import than all of --help

    wanted: dict[str, list[str]] = {}
    for line in requires("shoestring") or []:
        if found := re.match(r"([\w.-]+).*extra == ['\"](\w+)['\"]", line):
            wanted.setdefault(found[2], []).append(found[1])
    return {
        extra: {"installed": all(map(_installed, names)), "install": how_to_install(extra)}
        for extra, names in wanted.items()
        if extra not in NOT_FOR_USERS
    }


def _installed(package: str) -> bool:
    from importlib.metadata import PackageNotFoundError, version

    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _show(health: dict[str, Any]) -> None:
    from ..reporting.terminal import make_console

    console = make_console()
    for title, words, well in _lines(health):
        mark = "+" if well else "-"
        console.print(f"{mark} {title:<16}{words}", style=None if well else "yellow", soft_wrap=True)
    for problem in health["problems"]:
        console.print(f"! {problem}", style="bold red", soft_wrap=True)


def _lanes(lanes: int | None) -> str:
    return f" ({lanes} lanes)" if lanes else ""


def _lines(health: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """The findings -> title, text, and whether it is there."""
    core, cpu = health["core"], health["cpu"]
    lines = [(name, words or "not in this torch", bool(words)) for name, words in health["versions"].items()]
    lines += [
        ("core", f"{core['name'] or 'none'}{_lanes(core['lanes'])}: {core['reason']}", core["problem"] is None),
        ("cpu", ", ".join([cpu["name"], f"{cpu['cores']} cores", *cpu["features"]]), True),
        ("trial", health["trial"]["words"], health["trial"]["problem"] is None),
        ("bf16 products", health["products"]["words"], health["products"]["problem"] is None),
        ("threads", f"{health['threads']} used by torch, which runs {cpu['torch_uses']}", True),
    ]
    lines += [(f"meter {name}", meter["how"], meter["works"]) for name, meter in health["meters"].items()]
    lines.append(("cache", health["cache"], True))
    for extra, found in health["extras"].items():
        words = "installed" if found["installed"] else f"not installed: {found['install']}"
        lines.append((f"[{extra}]", words, found["installed"]))
    return lines
