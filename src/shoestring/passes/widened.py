"""Matrix products of 16-bit tensors on a CPU without 16-bit arithmetic: computed in FP32, stored in 16 bits.

PyTorch's own 16-bit products are tens of times slower there than FP32's. `widened(func, ...)` casts the operands to
FP32 for the one call and saves them in 16 bits; the backward pass casts them a second time.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from .saved_tensors import store

HALF_TYPES = (torch.float16, torch.bfloat16)


class Widened(torch.autograd.Function):
    """func(*args) of 16-bit tensors, in FP32."""

    @staticmethod
    def forward(ctx: Any, func: Any, rebuild: Any, kept: Any, *tensors: Tensor) -> Tensor:
        ctx.func, ctx.rebuild, ctx.kept, ctx.dtypes = func, rebuild, kept, [t.dtype for t in tensors]
        ctx.random = torch.get_rng_state() if _draws(rebuild) else None
        args, kwargs = rebuild([t.float() for t in tensors])
        return func(*args, **kwargs).to(tensors[0].dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        kept, ctx.kept = ctx.kept, None
        leaves = [k.take().float().requires_grad_(need) for k, need in zip(kept, ctx.needs_input_grad[3:], strict=True)]
        args, kwargs = ctx.rebuild(leaves)
        with torch.enable_grad(), torch.random.fork_rng([], ctx.random is not None):
            if ctx.random is not None:
                torch.set_rng_state(ctx.random)
            out = ctx.func(*args, **kwargs)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        gradients = iter(torch.autograd.grad(out, wanted, grad.float()))
        return (
            None,
            None,
            None,
            *(
                next(gradients).to(dtype) if leaf.requires_grad else None
                for leaf, dtype in zip(leaves, ctx.dtypes, strict=True)
            ),
        )


class _Rebuild:
    """Puts tensors back where they were among a call's arguments."""

    def __init__(self, args: tuple, kwargs: dict) -> None:
        self.leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self.places = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor) and leaf.dtype in HALF_TYPES]
        self.tensors = [self.leaves[i] for i in self.places]
        for i in self.places:
            self.leaves[i] = None  # the tensors themselves are stored elsewhere

    def __call__(self, tensors: list[Tensor]) -> Any:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return pytree.tree_unflatten(leaves, self.spec)


def _draws(rebuild: _Rebuild) -> bool:
    return any(isinstance(leaf, float) and 0 < leaf < 1 for leaf in rebuild.leaves)  # attention's dropout


def widened(func: Any, args: tuple, kwargs: dict) -> Tensor:
    """A matrix product of 16-bit tensors -> its result in 16 bits, computed in FP32."""
    rebuild = _Rebuild(args, kwargs)
    tensors, rebuild.tensors = rebuild.tensors, []
    return Widened.apply(func, rebuild, [store(t) for t in tensors], *tensors)


def is_narrow(x: Any) -> bool:
    """Whether a tensor is 16-bit on a CPU, and so slow to multiply as it is."""
    return isinstance(x, Tensor) and x.dtype in HALF_TYPES and x.device.type == "cpu"
