"""A mask packed into bits comes back as it was, at an eighth of a byte an element."""

import pytest
import torch

from shoestring.errors import ShoestringError
from shoestring.kernels.bitmask import pack_bits, positive_bits, unpack_bits, where_bits
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("numel", [0, 1, 15, 16, 17, 40_003])
def test_what_relu_lets_pass_and_its_gradient_are_those_of_their_references(dtype, numel):
    x, grad = torch.randn(2, numel).to(dtype)
    for special in (0.0, -0.0, torch.inf, -torch.inf, torch.nan):
        x[torch.randint(max(numel, 1), (numel // 9,))], grad[torch.randint(max(numel, 1), (numel // 9,))] = (
            special,
            special,
        )
    bits = positive_bits(x)
    assert torch.equal(bits, reference.positive_bits(x))
    assert torch.equal(unpack_bits(bits, numel), ~(x <= 0))
    wanted, got = torch.where(~(x <= 0), grad, 0), torch.full_like(grad, 7)
    where_bits(got, grad, bits)
    assert torch.equal(got.nan_to_num(5), wanted.nan_to_num(5))
    where_bits(grad, grad, bits)
    assert torch.equal(grad.nan_to_num(5), wanted.nan_to_num(5))


def test_bits_of_a_map_in_another_layout_are_in_the_order_of_its_elements():
    x = torch.randn(3, 4, 5, 6).contiguous(memory_format=torch.channels_last)
    assert torch.equal(positive_bits(x), positive_bits(x.contiguous()))
    with pytest.raises(ShoestringError, match="x has strides"):
        where_bits(torch.empty(3, 4, 5, 6), x, positive_bits(x))
