"""How a kernel becomes a PyTorch op: a schema, a twin in PyTorch, a fake for tracing, and the compiled form.

    define("pack_bits(Tensor mask) -> Tensor", twin=..., fake=..., compiled=...)

makes `torch.ops.shoestring.pack_bits`. On the CPU it runs `compiled` where the core is loaded, elsewhere the
twin; there is no other fallback. `fake` allocates what the op allocates, its scratch included: scratch that is
made and dropped in the fake is what the profiler counts. Gradients are given by autograd functions around ops.
"""

from collections.abc import Callable
from typing import Any

import torch

from . import core

_library = torch.library.Library("shoestring", "DEF")


def define(schema: str, *, twin: Callable, fake: Callable, compiled: Callable) -> Any:
    """An op schema and its three forms -> the op, callable as a function."""
    name = schema.split("(", 1)[0]
    _library.define(schema)
    _library.impl(name, twin, "CompositeExplicitAutograd")
    if core.core is not None:
        _library.impl(name, compiled, "CPU")
    torch.library.register_fake(f"shoestring::{name}", fake, lib=_library)
    return getattr(torch.ops.shoestring, name).default
