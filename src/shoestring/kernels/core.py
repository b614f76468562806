"""The compiled core: which build of it runs here, chosen once, visible, and forced by SHOESTRING_CORE.

SHOESTRING_CORE=avx512 | avx2 | generic | torch. `torch` runs the reference implementation of every kernel, in PyTorch.
A checkout also has lanes16, the source of avx512 as AVX2 runs it: slow, and there to be tested where AVX-512 is not.
"""

import importlib
import os
from typing import Any

import torch

from ..errors import ShoestringError

# The cores, fastest first, and what they need of a CPU.
NEEDS = {"avx512": "AVX-512 F, BW, VL and DQ", "avx2": "AVX2, FMA and F16C", "generic": "nothing"}
CHOICES = (*NEEDS, "torch")
_FOR_TESTS = {"lanes16": NEEDS["avx2"]}


def build(name: str) -> Any:
    """-> the compiled module of that name; ShoestringError where this CPU does not run it or it was not built."""
    if not importlib.import_module("._core_generic", __package__).supports(name):
        needs = (NEEDS | _FOR_TESTS)[name]
        raise ShoestringError(f"SHOESTRING_CORE={name} needs a CPU with {needs}: unset it or use generic")
    try:
        return importlib.import_module(f"._core_{name}", __package__)
    except ModuleNotFoundError as error:
        raise ShoestringError(f"SHOESTRING_CORE={name} was not built: install from a checkout, or unset it") from error


def _load() -> tuple[str, Any]:
    wanted = os.environ.get("SHOESTRING_CORE", "")
    if wanted and wanted not in (*CHOICES, *_FOR_TESTS):
        raise ShoestringError(
            f"SHOESTRING_CORE={wanted} does not exist: use {', '.join(CHOICES[:-1])} or {CHOICES[-1]}"
        )
    if wanted:
        return wanted, None if wanted == "torch" else build(wanted)
    generic = build("generic")
    best = next(name for name in NEEDS if generic.supports(name))
    return best, build(best)


name, core = _load()


def threads() -> int:
    """The number of threads that a kernel may use: PyTorch's own setting."""
    return torch.get_num_threads()
