"""The life of one sparse layer, for the heap meter's fresh process."""

import numpy as np
from torch import nn

from shoestring.models import materialise
from shoestring.techniques.sparsity.layers import SparseLinear


def life(features, nonzeros):
    """Made on meta, materialised, and rewired twice."""
    layer = SparseLinear(nn.Linear(features, features, bias=False, device="meta"), nonzeros)
    materialise(layer)
    for seed in range(2):
        layer.rewire(nonzeros // 50, nonzeros // 50, np.random.default_rng(seed))
    return layer
