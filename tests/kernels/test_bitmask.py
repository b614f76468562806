"""A mask packed into bits comes back as it was, at an eighth of a byte an element."""

import pytest
import torch

from shoestring.kernels.bitmask import pack_bits, unpack_bits
from shoestring.kernels.references import bitmask as reference


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 1000, 300_001])
def test_bits_come_back_as_they_were(numel):
    mask = torch.rand(numel) > 0.5
    bits = pack_bits(mask)
    assert bits.numel() == (numel + 7) // 8
    assert torch.equal(unpack_bits(bits, numel), mask)


@pytest.mark.parametrize("numel", [1, 9, 70_000])
def test_the_compiled_kernel_equals_its_reference(numel):
    mask = torch.rand(numel) > 0.3
    bits = reference.pack_bits(mask)
    assert torch.equal(pack_bits(mask), bits)
    assert torch.equal(unpack_bits(bits, numel), reference.unpack_bits(bits, numel))


def test_a_view_that_is_not_contiguous_is_packed_in_its_own_order():
    mask = torch.rand(12, 10) > 0.5
    assert torch.equal(unpack_bits(pack_bits(mask.t()), 120), mask.t().reshape(-1))
