"""Quantised numbers are right on average, within a step of what they were, and the same with any number of threads."""

import pytest
import torch

from shoestring.errors import ShoestringError
from shoestring.kernels.quantise import BITS, GROUP, dequantise, is_whole, quantise
from shoestring.kernels.references import quantise as reference

KEY = (7, 11)
LENGTHS = [1, 3, 63, 255, 256, 257, 1000]


def back(x, bits, key=KEY):
    codes, ranges = quantise(x, bits, key)
    return dequantise(codes, ranges, x.shape[1], bits, x.dtype), ranges


def steps(x, bits):
    """The step of each element's group, as a matrix like x."""
    _, ranges = quantise(x, bits, KEY)
    step = (ranges[..., 1].double() - ranges[..., 0].double()) / (2**bits - 1)
    return step.repeat_interleave(GROUP, 1)[:, : x.shape[1]]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_what_comes_back_is_within_a_step_and_takes_the_bytes_that_were_promised(bits, length, dtype):
    x = (3 * torch.randn(5, length) + 1).to(dtype)
    codes, ranges = quantise(x, bits, KEY)
    got = dequantise(codes, ranges, length, bits, dtype)
    room = 1.001 * steps(x, bits) + torch.finfo(dtype).eps * x.double().abs().amax()
    assert ((got.double() - x.double()).abs() <= room).all()
    assert codes.nbytes == 5 * (length // GROUP * (GROUP * bits // 8) + -(-(length % GROUP) * bits // 8))
    assert ranges.nbytes == 5 * -(-length // GROUP) * 4


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("length", LENGTHS)
def test_the_compiled_kernel_equals_the_reference_implementation(bits, length):
    x = torch.randn(7, length)
    codes, ranges = quantise(x, bits, KEY)
    codes2, ranges2 = reference.quantise(x, bits, KEY)
    assert torch.equal(ranges, ranges2)
    got, wanted = torch.empty_like(x), torch.empty_like(x)
    reference.dequantise(got, codes, ranges, bits)
    reference.dequantise(wanted, codes2, ranges2, bits)
    different = got != wanted  # the sums are rounded otherwise: an element in many thousands falls on the other side
    assert different.float().mean() <= 1e-3 and (got - wanted).abs().max() <= 1.001 * steps(x, bits).max()
    torch.testing.assert_close(dequantise(codes, ranges, length, bits, x.dtype), got, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits", BITS)
def test_the_mean_of_many_roundings_is_the_number_itself(bits):
    """10,000 roundings of one group; its ends are no BF16 numbers, and a bias of a thousandth of a step would show."""
    x = torch.linspace(-0.7123, 1.3337, GROUP)[None]
    count, total = 10_000, torch.zeros(1, GROUP, dtype=torch.float64)
    for number in range(count):
        total += back(x, bits, (number, 3))[0]
    error = (total / count - x) / steps(x, bits)
    assert error.abs().max() < 5 * 0.5 / count**0.5  # five standard deviations of the worst element
    assert error.mean().abs() < 5 * 0.5 / (count * GROUP) ** 0.5


def test_the_ends_of_a_group_lie_within_its_stored_range():
    x = 1e3 * torch.randn(200, 40).exp() * torch.randn(200, 1).sign()
    _, ranges = quantise(x, 4, KEY)
    assert (ranges[:, 0, 0].float() <= x.amin(1)).all() and (ranges[:, 0, 1].float() >= x.amax(1)).all()
    assert ((ranges[:, 0, 0].float() - x.amin(1)).abs() <= 2**-7 * x.amin(1).abs()).all()


@pytest.mark.parametrize("bits", BITS)
def test_threads_change_no_bit_and_another_key_does(bits):
    x = torch.randn(64, 3000)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = quantise(x, bits, KEY)
        torch.set_num_threads(2)
        two = quantise(x, bits, KEY)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])
    assert not torch.equal(quantise(x, bits, (7, 12))[0], one[0])


@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, 0.1, 1e-30, -1e30])
def test_a_constant_group_comes_back_within_a_hundredth(value):
    got, _ = back(torch.full((2, 300), value), 4)
    torch.testing.assert_close(got, torch.full((2, 300), value), rtol=1e-2, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3.4e38])
def test_a_group_that_is_not_finite_is_told_and_spoils_no_other(bad):
    x = torch.randn(2, 3 * GROUP)
    x[1, GROUP + 5] = bad
    _, ranges = quantise(x, 4, KEY)
    assert not is_whole(ranges)
    told = ranges.isnan().all(-1)
    assert told.tolist() == [[False, False, False], [False, True, False]]
    assert is_whole(quantise(x[:1], 4, KEY)[1])


@pytest.mark.parametrize("call", [
    lambda: quantise(torch.zeros(2, 2), 3, KEY),
    lambda: quantise(torch.zeros(2, 2, dtype=torch.int64), 4, KEY),
    lambda: quantise(torch.zeros(2, 2, 2), 4, KEY),
])  # fmt: skip
def test_what_cannot_be_quantised_is_refused(call):
    with pytest.raises(ShoestringError):
        call()
