"""Bounds: an operator call that cannot be run here -> the most scratch that calls of its kind were found to need.

The scratch of a call is copies of what it reads and writes, in another order or a wider type. So the bound is a
multiple of the bytes of its arguments and results, by the kind of operator; a convolution may also unfold its image.
`tests/measuring/test_bounds.py` compares the multiples with calibrated calls of every kind.
"""

import json
from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from ..fakes.corrections import run
from ..signature import Bound, Signature, output_key

THREAD_BYTES = {
    "attention": 1 << 19
}  # a thread's own buffers, which do not depend on the arguments: at most 0.4 MB seen
LITTLE = 1 << 16  # the same for other operators
COPIES = 2  # times all that a call reads and writes: a 16-bit reduction sums a copy in FP32
RECURRENT = 8  # the same for an LSTM, with what it saves for its backward pass: four gates and two states per step
CONVOLUTIONS = ("conv", "slow_", "thnn_", "mkldnn_conv")


def bounds_of(signature: Signature) -> dict[str, Bound]:
    """A call -> a table with bounds of its scratch and of outputs whose size its fake leaves open."""
    reads = sum(_argument_bytes(json.loads(signature.arguments)))
    results = _results(signature)
    moved = reads + sum(part.untyped_storage().nbytes() for part in results if isinstance(part, Tensor))
    if not moved or _only_looks(signature):
        return {str(signature): Bound(0)}
    buffers = next((size for name, size in THREAD_BYTES.items() if name in signature.op), LITTLE)
    copies = RECURRENT if "rnn" in signature.op else COPIES
    scratch = copies * moved + _unfolded_bytes(signature, results) + buffers * torch.get_num_threads()
    open_ = [n for n, part in enumerate(results) if isinstance(part, Tensor) and part.shape == (0,)]
    hidden = {output_key(signature, n): Bound(RECURRENT * moved // results[n].itemsize) for n in open_}
    return {str(signature): Bound(scratch)} | (hidden if len(results) > 1 else {})


def extent(shape: list[int], stride: list[int]) -> int:
    """How many elements a tensor's storage needs: 1 + sum((size - 1) * stride), or none if it is empty."""
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def _argument_bytes(value: Any) -> Iterator[int]:
    """Arguments as a signature has them -> the bytes of each tensor among them."""
    if isinstance(value, dict) and "shape" in value:
        yield extent(value["shape"], value["stride"]) * getattr(torch, value["dtype"]).itemsize
    elif isinstance(value, dict) and "unknown" in value:
        yield value.get("bytes", 0)
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _argument_bytes(part)


def _results(signature: Signature) -> list[Any]:
    """A call -> fakes of what it returns; none if it fails even with fakes."""
    try:
        return pytree.tree_leaves(faked(signature))
    except Exception:  # an operator may raise anything
        return []


def faked(signature: Signature) -> Any:
    """What a call returns on fake tensors, as in a trace."""
    with FakeTensorMode():
        args, kwargs = signature.call_arguments(lambda *like: torch.empty_strided(like[0], like[1], dtype=like[2]))
        return run(signature.function(), tuple(args), kwargs)


def _only_looks(signature: Signature) -> bool:
    """Whether the operator moves no bytes: its result is a view of an argument, which it does not write, or a number
    that it reads."""
    try:
        function = signature.function()
        return function.is_view or torch.Tag.data_dependent_output in function.tags
    except ValueError:
        return False


def _unfolded_bytes(signature: Signature, results: list[Any]) -> int:
    """The bytes of a convolution's unfolded image (im2col): all inputs of each output pixel; 0 for other operators."""
    if not signature.op.split(".")[1].startswith(CONVOLUTIONS):
        return 0
    arguments = json.loads(signature.arguments)["args"]
    maps = [value for value in arguments if isinstance(value, dict) and len(value.get("shape", ())) > 2]
    fakes = [part.shape for part in results if isinstance(part, Tensor) and part.dim() > 2]
    if len(maps) < 2:
        return 0
    *images, weight = maps
    window = prod(weight["shape"][2:])
    per_pixel = max(tensor["shape"][1] for tensor in images) * window * 4  # in FP32
    pixels = max(shape[0] * prod(shape[2:]) for shape in [*(tensor["shape"] for tensor in images), *fakes])
    return per_pixel * pixels
