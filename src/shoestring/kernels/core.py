"""The compiled core: which build of it runs here, chosen once, visible, and forced by SHOESTRING_CORE.

SHOESTRING_CORE=avx2 | generic | torch. `torch` runs the reference implementation of every kernel, in PyTorch.
"""

import importlib
import os
from typing import Any

import torch

from ..errors import ShoestringError


def _load() -> tuple[str, Any]:
    wanted = os.environ.get("SHOESTRING_CORE", "")
    if wanted not in ("", "avx2", "generic", "torch"):
        raise ShoestringError(f"SHOESTRING_CORE={wanted} does not exist: use avx2, generic or torch")
    if wanted == "torch":
        return "torch", None
    generic = importlib.import_module("._core_generic", __package__)
    if wanted == "generic":
        return "generic", generic
    if generic.supports_avx2():
        return "avx2", importlib.import_module("._core_avx2", __package__)
    if wanted == "avx2":
        raise ShoestringError("SHOESTRING_CORE=avx2 needs a CPU with AVX2, FMA and F16C: unset it or use generic")
    return "generic", generic


name, core = _load()


def threads() -> int:
    """The number of threads that a kernel may use: PyTorch's own setting."""
    return torch.get_num_threads()
