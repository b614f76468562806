"""Packed sequences, unpacked by operators: PyTorch's own `_pad_packed_sequence` writes lengths into memory without one,
which a fake does not have."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ..patching import ForAllThreads


@ForAllThreads
@contextmanager
def unpacked_by_operators() -> Iterator[None]:
    """Inside, nn.utils.rnn.pad_packed_sequence makes the tensors that it makes in a run, also of fakes."""
    torch._VF._pad_packed_sequence = _pad_packed_sequence
    try:
        yield
    finally:
        vars(torch._VF).pop("_pad_packed_sequence")


def _pad_packed_sequence(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: Any, total_length: int
) -> tuple[Tensor, Tensor]:
    """As PyTorch's: steps that as many sequences have are copied at once."""
    sizes = batch_sizes.tolist()
    output = data.new_full((max(total_length, len(sizes)), sizes[0], *data.shape[1:]), padding_value)
    step = first = 0
    for size, run in groupby(sizes):
        steps = len(list(run))
        rows = data[first : first + steps * size].view(steps, size, *data.shape[1:])
        output[step : step + steps, :size].copy_(rows)
        step, first = step + steps, first + steps * size
    lengths = torch.tensor([sum(size > sequence for size in sizes) for sequence in range(sizes[0])])
    return output.transpose(0, 1) if batch_first else output, lengths
