"""An index names the nonzeros exactly, costs less than the paper's bits, and is refused when damaged."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.errors import ShoestringError
from shoestring.kernels.references import sparse_conv as reference_sparse
from shoestring.kernels.sparse_index import bitmap_bytes, decode, encode, from_bitmap, to_bitmap, validate

quick = settings(max_examples=40, deadline=None, derandomize=True)


def random_positions(numel, density, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(numel, generator=generator) < density).nonzero().flatten()


@quick
@given(st.integers(0, 3000), st.sampled_from([0, 0.001, 0.02, 0.1, 0.3, 1]), st.integers(0, 9))
def test_positions_come_back_as_they_were(numel, density, seed):
    positions = random_positions(numel, density, seed)
    index = encode(positions, numel)
    validate(index, numel, positions.numel())
    assert index.numel() <= bitmap_bytes(numel)
    assert decode(index, numel).tolist() == positions.tolist()
    assert reference_sparse.positions(index, numel).tolist() == positions.tolist()


@quick
@given(numel=st.integers(1, 2000), density=st.sampled_from([0.01, 0.2]), cut=st.integers(0, 2000))
def test_a_piece_is_decoded_without_the_rest(numel, density, cut):
    positions = random_positions(numel, density)
    index = encode(positions, numel)
    assert decode(index, numel, cut).tolist() == positions[positions >= cut].tolist()
    assert decode(index, numel, 0, cut).tolist() == positions[positions < cut].tolist()


def test_gaps_longer_than_a_byte_are_escaped():
    positions = torch.tensor([0, 255, 256, 256 + 255 + 1, 40_000, 99_999])
    index = encode(positions, 100_000)
    assert index.numel() < bitmap_bytes(100_000)
    assert torch.equal(index, reference_sparse.gaps(positions))
    assert decode(index, 100_000).tolist() == positions.tolist()


@pytest.mark.parametrize("density", [0.01, 0.3])
def test_a_bitmap_may_be_changed_and_made_an_index_again(density):
    positions = random_positions(5000, density)
    bits = to_bitmap(encode(positions, 5000), 5000)
    bits[0] |= 1
    assert decode(from_bitmap(bits, 5000), 5000).tolist() == sorted({0, *positions.tolist()})


@pytest.mark.parametrize("out, inside", [(32, 16), (32, 32), (64, 32), (64, 64), (128, 64), (128, 128)])
@pytest.mark.parametrize("density", [0.5, 0.4, 0.3, 0.2, 0.15, 0.125, 0.1, 0.07, 0.05])
def test_the_index_costs_no_more_than_the_papers_bits(out, inside, density):
    numel = out * inside * 9
    count = round(numel * density)
    positions = torch.randperm(numel, generator=torch.Generator().manual_seed(0))[:count].sort().values
    column_bits = count * math.ceil(math.log2(inside * 9))
    pointer_bits = (out + 1) * math.ceil(math.log2(numel + 1))
    assert encode(positions, numel).numel() * 8 <= column_bits + pointer_bits


@pytest.mark.parametrize("positions", [[3, 3], [4, 2], [-1, 2], [2, 10]])
def test_positions_that_are_unsorted_double_or_outside_are_refused(positions):
    with pytest.raises(ShoestringError, match="positions"):
        encode(torch.tensor(positions), 10)


def damaged():
    gaps, bits = encode(torch.tensor([1, 200, 900]), 1001), encode(torch.arange(0, 1001, 2), 1001)
    yield "a gap that leads beyond the end", torch.cat([gaps, gaps.new_tensor([255])]), 3
    yield "an escape beyond the end", torch.cat([gaps, gaps.new_tensor([254])]), 4
    yield "too few nonzeros", gaps[:2], 3
    yield "another density", encode(torch.tensor([1, 900]), 1001), 3
    yield "longer than a bitmap", torch.cat([bits, bits[:1]]), 501
    yield "a bit beyond the end", torch.cat([bits[:-1], bits.new_tensor([255])]), 508
    yield "a bit flipped", torch.cat([bits[:1] ^ 2, bits[1:]]), 501
    yield "not bytes", bits.to(torch.int32), 501


@pytest.mark.parametrize("what, index, count", list(damaged()))
def test_a_damaged_index_is_refused(what, index, count):
    with pytest.raises(ShoestringError, match="index"):
        validate(index, 1001, count)
