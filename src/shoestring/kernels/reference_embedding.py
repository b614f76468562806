"""Pure-PyTorch twins of the sparse embedding's kernels: any device; the table is made dense for the call."""

import torch
from torch import Tensor
from torch.nn import functional

from .reference_sparse import densify, positions


def embedding(ids, values, index, rows, width) -> Tensor:
    return functional.embedding(ids, densify(values, index, [rows, width]))


def embedding_gradient(gradient, ids, dy, index, rows, width, accumulate) -> None:
    wide = torch.promote_types(dy.dtype, torch.float32)
    dense = torch.zeros(rows, width, dtype=wide, device=dy.device)
    dense.index_add_(0, ids.reshape(-1), dy.reshape(-1, width).to(wide))
    at_nonzeros = dense.view(-1)[positions(index, dense.numel())]
    gradient.copy_(gradient.to(wide) + at_nonzeros if accumulate else at_nonzeros)
