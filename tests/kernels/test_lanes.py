"""The number of lanes does not show in what is stored, and narrow maps fill them all."""

from itertools import pairwise

import pytest
import torch

from shoestring.kernels import core, quantise, sparse_conv, update
from shoestring.kernels.moments import new_moment
from shoestring.kernels.sparse_index import encode

pytestmark = pytest.mark.skipif(core.core is None, reason="needs the compiled core")
CHANNELS = 8  # few enough for a whole sample to be in scratch
NAMES = [name for name in ("generic", "avx2", "lanes16", "avx512") if core.build("generic").supports(name)]


@pytest.fixture
def on(monkeypatch):
    """on(module, name): that module's kernels run on the core of that name."""
    return lambda module, name: monkeypatch.setattr(module, "core", core.build(name))


@pytest.mark.parametrize("length", [1, 37, 256, 1000])
@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_one_core_quantises_every_other_reads(on, length, bits, dtype):
    x = torch.randn(5, length, generator=torch.Generator().manual_seed(length)).to(dtype)
    written, read = [], []
    for name in NAMES:
        on(quantise, name)
        written.append(quantise.quantise(x, bits, (7, 9)))
        read.append(quantise.dequantise(*written[0], length, bits, dtype))
    for codes, ranges in written[1:]:
        assert torch.equal(ranges, written[0][1])
        assert (codes != written[0][0]).float().mean() < 0.01  # but where a sum is rounded to the next code
    for numbers in read[1:]:
        torch.testing.assert_close(numbers, read[0], rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)


@pytest.mark.parametrize("numel", [3, 255, 256, 1000])
@pytest.mark.parametrize("form", ["fp32", "fp16", "bf16", "8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_optimizer_goes_on_with_the_moments_that_another_core_has_left(on, numel, form, dtype):
    """Wherever the core changes between two updates, weights and moments are those of one core alone."""
    generator = torch.Generator().manual_seed(numel)
    start, *gradients = (torch.randn(numel, generator=generator) for _ in range(3))
    ended = []
    for first_core, second_core in [(NAMES[0], NAMES[0]), *pairwise(NAMES)]:
        weight = start.to(dtype)
        first, second = new_moment(weight, form), new_moment(weight, form, positive=True)
        for step, (name, gradient) in enumerate(zip((first_core, second_core), gradients, strict=True), 1):
            on(update, name)
            update.adam_update(weight, gradient.to(dtype), first, second, step=step, lr=0.01, noise=(1, 2, step))
        ended.append((weight, first, second))
    (weight, first, second), *others = ended
    for other, *moments in others:
        torch.testing.assert_close(other, weight, rtol=1e-2, atol=1e-4)
        for moment, wanted in zip(moments, (first, second), strict=True):
            apart = (moment.values.float() - wanted.values.float()).abs()
            one_code = 1 if form == "8bit" else 1e-2 * wanted.values.float().abs() + 1e-6
            assert (apart <= one_code).all()


@pytest.mark.parametrize("size", [(4, 4), (7, 7), (8, 8), (16, 16), (5, 3), (13, 8), (30, 4)])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", [1, 3])
def test_a_narrow_map_is_convolved_as_the_dense_weight_does(size, stride, kernel):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(9, 6, kernel, kernel, generator=generator)
    weight *= torch.rand(weight.shape, generator=generator) < 0.5
    x = torch.randn(2, 6, *size, generator=generator)
    index = encode(weight.flatten().nonzero().flatten(), weight.numel())
    values, geometry = weight[weight != 0], ([kernel] * 2, [stride] * 2, [kernel // 2] * 2, [1, 1])
    dense = weight.clone().requires_grad_()
    wide = x.clone().requires_grad_()
    y = torch.nn.functional.conv2d(wide, dense, None, *geometry[1:3])
    dy = torch.randn(y.shape, generator=generator)
    grad_x, grad_w = torch.autograd.grad(y, (wide, dense), dy)
    close = lambda got, wanted: torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)  # noqa: E731
    close(sparse_conv.sparse_conv2d_forward(x, values, index, 9, *geometry), y.detach())
    close(sparse_conv.sparse_conv2d_input_gradient(dy, values, index, list(x.shape), *geometry), grad_x)
    gradient = torch.empty_like(values)
    sparse_conv.sparse_conv2d_weight_gradient(x, dy, index, *geometry, out=gradient, accumulate=False)
    close(gradient, grad_w[weight != 0])


@pytest.mark.parametrize("name", NAMES)
def test_two_rows_of_a_narrow_map_share_a_vector(name):
    """Maps half as wide as a vector take half the scratch: no lane is left empty."""
    compiled = core.build(name)
    lanes = compiled.lanes

    def scratch(width):
        sizes = (1, CHANNELS, lanes, width, 8, lanes, width, 3, 3, 1, 1, 1, 1, 1, 1)
        return compiled.sparse_convolve_scratch(sizes, False, sizes[4], 100, 1)

    column = CHANNELS * lanes * torch.float32.itemsize
    assert scratch(lanes) - scratch(lanes // 2) > 0.9 * column * (lanes - lanes // 2)
