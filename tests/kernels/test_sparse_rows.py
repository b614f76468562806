"""Sparse linear layers and embeddings equal the dense ones with the same weight, in blocks of any height."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.errors import ShoestringError
from shoestring.kernels import reference_rows, sparse_rows
from shoestring.kernels.sparse_embedding import sparse_embedding_forward, sparse_embedding_gradient
from shoestring.kernels.sparse_index import encode
from shoestring.kernels.sparse_linear import (
    sparse_linear_forward,
    sparse_linear_input_gradient,
    sparse_linear_weight_gradient,
)

STEP = {torch.float64: 1e-14, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SIZES = st.tuples(st.integers(1, 40), st.integers(1, 40))
quick = settings(max_examples=40, deadline=None, derandomize=True)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(sparse_rows, "SCRATCH", 100)


def matrix(rows, width, density, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    positions = (torch.rand(rows * width, generator=generator) < density).nonzero().flatten()
    return torch.randn(len(positions), generator=generator).to(dtype), encode(positions, rows * width)


def close(found, wanted, dtype):
    assert found.dtype == dtype and found.shape == wanted.shape
    assert not found.numel() or (found.double() - wanted).abs().max() <= STEP[dtype] * wanted.abs().max().clamp(min=1)


@quick
@given(SIZES, st.floats(0, 1), st.sampled_from([(1,), (7,), (2, 3), (0,)]), st.sampled_from(list(STEP)), st.booleans())
def test_a_sparse_linear_layer_is_the_dense_one(size, density, tokens, dtype, accumulate):
    rows, width = size
    values, index = matrix(rows, width, density, dtype)
    x, dy = torch.randn(*tokens, width).to(dtype), torch.randn(*tokens, rows).to(dtype)
    wide = [t.double() for t in (x, dy, values)]
    close(sparse_linear_forward(x, values, index, rows), reference_rows.linear(wide[0], wide[2], index, rows), dtype)
    wanted = reference_rows.linear_input_gradient(wide[1], wide[2], index, width)
    close(sparse_linear_input_gradient(dy, values, index, width), wanted, dtype)
    gradient = values.clone()
    expected = gradient.double()
    reference_rows.linear_weight_gradient(expected, wide[0], wide[1], index, accumulate)
    close(sparse_linear_weight_gradient(x, dy, index, out=gradient, accumulate=accumulate), expected, dtype)


@quick
@given(SIZES, st.floats(0, 1), st.sampled_from([(1,), (7,), (2, 3), (0,)]), st.sampled_from(list(STEP)), st.booleans())
def test_a_sparse_embedding_is_the_dense_one(size, density, shape, dtype, accumulate):
    rows, width = size
    values, index = matrix(rows, width, density, dtype)
    ids = torch.randint(rows, shape)
    assert torch.equal(
        sparse_embedding_forward(ids, values, index, rows, width),
        reference_rows.embedding(ids, values, index, rows, width),
    )
    dy, gradient = torch.randn(*shape, width).to(dtype), values.clone()
    expected = gradient.double()
    reference_rows.embedding_gradient(expected, ids, dy.double(), index, rows, width, accumulate)
    sparse_embedding_gradient(ids, dy, index, rows, width, out=gradient, accumulate=accumulate)
    close(gradient, expected, dtype)


def test_wrong_input_is_refused():
    values, index = matrix(6, 5, 0.5, torch.float32)
    with pytest.raises(ShoestringError, match=r"cannot be those of a weight of 2 x 5 = 10"):
        sparse_linear_forward(torch.randn(3, 5), values, index, 2)
    with pytest.raises(ShoestringError, match="outside of the embedding's 6 rows"):
        sparse_embedding_forward(torch.tensor([6]), values, index, 6, 5)
    with pytest.raises(ShoestringError, match="which are integers"):
        sparse_embedding_forward(torch.tensor([1.0]), values, index, 6, 5)
