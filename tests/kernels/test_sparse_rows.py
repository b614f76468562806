"""Sparse linear layers and embeddings equal the dense ones with the same weight."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from shoestring.errors import ShoestringError
from shoestring.kernels.references import sparse_linear as reference_rows
from shoestring.kernels.sparse_embedding import sparse_embedding_forward, sparse_embedding_gradient
from shoestring.kernels.sparse_index import encode
from shoestring.kernels.sparse_linear import (
    sparse_linear_forward,
    sparse_linear_input_gradient,
    sparse_linear_weight_gradient,
)

STEP = {torch.float64: 1e-14, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
TOKENS = [(1,), (7,), (2, 3), (0,), (70,)]
SIZES = st.tuples(st.integers(1, 40), st.integers(1, 40))
quick = settings(max_examples=40, deadline=None, derandomize=True)


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def matrix(rows, width, density, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    positions = (torch.rand(rows * width, generator=generator) < density).nonzero().flatten()
    return torch.randn(len(positions), generator=generator).to(dtype), encode(positions, rows * width)


def close(found, wanted, dtype, step=None):
    assert found.dtype == dtype and found.shape == wanted.shape
    allowed = (step or STEP[dtype]) * wanted.abs().max().clamp(min=1) if found.numel() else 0
    assert not found.numel() or (found.double() - wanted).abs().max() <= allowed


def check_linear(rows, width, density, tokens, dtype, accumulate=False, step=None):
    torch.manual_seed(0)
    values, index = matrix(rows, width, density, dtype)
    x, dy = torch.randn(*tokens, width).to(dtype), torch.randn(*tokens, rows).to(dtype)
    wide = [t.double() for t in (x, dy, values)]
    wanted = reference_rows.linear(wide[0], wide[2], index, rows)
    close(sparse_linear_forward(x, values, index, rows), wanted, dtype, step)
    wanted = reference_rows.linear_input_gradient(wide[1], wide[2], index, width)
    close(sparse_linear_input_gradient(dy, values, index, width), wanted, dtype, step)
    gradient = values.clone()
    expected = gradient.double()
    reference_rows.linear_weight_gradient(expected, wide[0], wide[1], index, accumulate)
    close(sparse_linear_weight_gradient(x, dy, index, out=gradient, accumulate=accumulate), expected, dtype)


@quick
@given(SIZES, st.floats(0, 1), st.sampled_from(TOKENS), st.sampled_from(list(STEP)), st.booleans())
def test_a_sparse_linear_layer_is_the_dense_one(size, density, tokens, dtype, accumulate):
    check_linear(*size, density, tokens, dtype, accumulate)


@pytest.mark.parametrize("density", [0.6, 0.08])  # a bitmap, and gaps
@pytest.mark.parametrize("tokens", [1, 20, 64, 130])
@pytest.mark.parametrize("size", [(170, 450), (1100, 70)])  # wide, and tall: rows and columns are decoded in other ways
def test_so_is_one_of_many_channels_and_more_nonzeros_than_are_decoded_at_a_time(size, tokens, density, threads):
    check_linear(*size, density, (tokens,), torch.float32)


@pytest.mark.parametrize("density", [0.02, 0.95])
def test_so_is_one_of_more_inputs_than_21_bits_count(density, threads):
    check_linear(2, 2_200_000, density, (3,), torch.float32, step=1e-5)  # sums of two million terms


@pytest.mark.parametrize("density", [0.02, 0.95])
def test_so_is_one_of_more_outputs_than_21_bits_count(density, threads):
    check_linear(2_200_000, 2, density, (3,), torch.float32, step=1e-5)


def test_a_layer_whose_scratch_32_bits_cannot_count_is_refused_before_anything_is_allocated():
    with FakeTensorMode():
        x, values = torch.empty(64, 2**27), torch.empty(10)
        with pytest.raises(ShoestringError, match=r"\(3, 134217728\) over .* is too large.*leave this layer dense"):
            sparse_linear_forward(x, values, torch.empty(10, dtype=torch.uint8), 3)


def test_tokens_need_not_be_contiguous(threads):
    values, index = matrix(30, 20, 0.5, torch.float32)
    x = torch.randn(20, 9).t()
    found = sparse_linear_forward(x, values, index, 30)
    torch.testing.assert_close(found, sparse_linear_forward(x.contiguous(), values, index, 30))


@quick
@given(SIZES, st.floats(0, 1), st.sampled_from(TOKENS), st.sampled_from(list(STEP)), st.booleans())
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


def test_an_embedding_sums_the_gradients_of_tokens_that_share_a_row(threads):
    values, index = matrix(50, 12, 0.3, torch.float32)
    ids, dy = torch.tensor([[7, 7, 0], [49, 7, 0]], dtype=torch.int32), torch.randn(2, 3, 12)
    gradient, expected = torch.empty_like(values), torch.empty_like(values)
    sparse_embedding_gradient(ids, dy, index, 50, 12, out=gradient)
    reference_rows.embedding_gradient(expected, ids.long(), dy, index, 50, 12, False)
    torch.testing.assert_close(gradient, expected)


def test_wrong_input_is_refused():
    values, index = matrix(6, 5, 0.5, torch.float32)
    with pytest.raises(ShoestringError, match=r"cannot be those of a weight of 2 x 5 = 10"):
        sparse_linear_forward(torch.randn(3, 5), values, index, 2)
    with pytest.raises(ShoestringError, match="takes one dtype"):
        sparse_linear_weight_gradient(torch.randn(3, 5), torch.randn(3, 6).half(), index, out=values)
    with pytest.raises(ShoestringError, match="not of the same tokens"):
        sparse_linear_weight_gradient(torch.randn(3, 5), torch.randn(2, 6), index, out=values)
    with pytest.raises(ShoestringError, match="make it contiguous"):
        sparse_linear_forward(torch.randn(3, 5), values.repeat(2)[::2], index, 6)
    with pytest.raises(ShoestringError, match="do not have gradients"):
        sparse_embedding_gradient(torch.tensor([1]), torch.randn(2, 5), index, 6, 5, out=values)
    with pytest.raises(ShoestringError, match="outside of the embedding's 6 rows"):
        sparse_embedding_forward(torch.tensor([6]), values, index, 6, 5)
    with pytest.raises(ShoestringError, match="which are integers"):
        sparse_embedding_forward(torch.tensor([1.0]), values, index, 6, 5)
