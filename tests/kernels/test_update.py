"""Updates in place: torch.optim's numbers in FP32, and FP32 arithmetic on every narrower storage."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shoestring.errors import ShoestringError
from shoestring.kernels.core import core
from shoestring.kernels.define import scratch_of
from shoestring.kernels.moments import Moment, new_moment, random_bits, read_moment, write_moment
from shoestring.kernels.references import moments as reference_moments
from shoestring.kernels.references import update as reference_update
from shoestring.kernels.references.moments import BLOCK, CHUNK, threefry
from shoestring.kernels.update import adam_update, sgd_accumulate, sgd_apply_momentum, sgd_update

WEIGHTS = [torch.float32, torch.float16, torch.bfloat16]
FORMS = ["fp32", "fp16", "bf16", "8bit"]
SGD = [
    {"mu": 0.0},
    {"mu": 0.9},
    {"mu": 0.9, "nesterov": True},
    {"mu": 0.9, "weight_decay": 0.1},
    {"mu": 0.9, "nesterov": True, "weight_decay": 0.1},
]
ADAM = [{}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled": True}, {"betas": (0.8, 0.95), "eps": 1e-4}]
SIZES = [1, 7, 256, 300, 5000]


def numbers(numel, seed=0, dtype=torch.float32):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def torchs(optimizer, weight, gradients, **settings):
    """The weight after torch.optim's own steps."""
    parameter = torch.nn.Parameter(weight.clone())
    taken = optimizer([parameter], lr=0.1, foreach=False, **settings)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        taken.step()
    return parameter.detach()


def run_sgd(weight, gradients, form="fp32", number=0, **settings):
    momentum = new_moment(weight, form) if settings["mu"] else None
    for step, gradient in enumerate(gradients, 1):
        sgd_update(weight, gradient, momentum, lr=0.1, noise=(3, number, step), **settings)
    return momentum


def run_adam(weight, gradients, form="fp32", seed=3, lr=0.1, **settings):
    moments = new_moment(weight, form), new_moment(weight, form, positive=True)
    for step, gradient in enumerate(gradients, 1):
        adam_update(weight, gradient, *moments, step=step, lr=lr, noise=(seed, 0, step), **settings)
    return moments


# -- the formulas ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("settings", SGD, ids=str)
def test_sgd_is_torchs(settings, numel):
    weight, gradients = numbers(numel), [numbers(numel, seed) for seed in range(1, 6)]
    names = {"mu": "momentum"}
    wanted = torchs(torch.optim.SGD, weight, gradients, **{names.get(k, k): v for k, v in settings.items()})
    run_sgd(weight, gradients, **settings)
    torch.testing.assert_close(weight, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("settings", ADAM, ids=str)
def test_adam_and_adamw_are_torchs(settings, numel):
    weight, gradients = numbers(numel), [numbers(numel, seed) for seed in range(1, 6)]
    kind = torch.optim.AdamW if settings.get("decoupled") else torch.optim.Adam
    plain = {"weight_decay": 0.0} | {k: v for k, v in settings.items() if k != "decoupled"}
    wanted = torchs(kind, weight, gradients, **plain)
    run_adam(weight, gradients, **settings)
    torch.testing.assert_close(weight, wanted, rtol=1e-6, atol=1e-6)


def test_fp64_weights_keep_fp64():
    weight, gradients = numbers(300).double(), [numbers(300, s).double() for s in range(1, 6)]
    wanted = torchs(torch.optim.Adam, weight, gradients)
    first, _ = run_adam(weight, gradients)
    assert first.values.dtype == torch.float64
    torch.testing.assert_close(weight, wanted, rtol=1e-14, atol=1e-14)


def test_the_factor_takes_the_loss_scale_out():
    plain, scaled = numbers(300), numbers(300)
    gradient = numbers(300, 1)
    sgd_update(plain, gradient, lr=0.1)
    sgd_update(scaled, gradient * 2**16, lr=0.1, factor=2**-16)
    assert torch.equal(plain, scaled)


def test_a_momentum_that_gathers_microbatches_and_is_then_followed_is_heavy_ball():
    weight, whole = numbers(700), numbers(700)
    momentum, wanted = new_moment(weight, "fp32"), new_moment(weight, "fp32")
    for step in range(3):
        pieces = [numbers(700, 10 * step + piece) for piece in range(4)]
        sgd_update(whole, sum(pieces), wanted, lr=0.1, mu=0.9, weight_decay=0.1)
        for number, piece in enumerate(pieces):
            first = {"mu": 0.9, "weight_decay": 0.1} if number == 0 else {}
            sgd_accumulate(weight, piece, momentum, **first)
        sgd_apply_momentum(weight, momentum, lr=0.1)
    torch.testing.assert_close(weight, whole, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(momentum.values, wanted.values, rtol=1e-6, atol=1e-6)


# -- narrow storage -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("gradients", WEIGHTS, ids=str)
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_a_narrow_weight_takes_one_rounding_of_the_fp32_update(weights, gradients):
    weight, gradient = numbers(1000, 0, weights), numbers(1000, 1, gradients)
    wide = weight.float()
    sgd_update(wide, gradient.float(), lr=0.1)
    sgd_update(weight, gradient, lr=0.1)
    step = torch.finfo(weights).eps * wide.abs().clamp(min=1e-3)
    assert ((weight.float() - wide).abs() <= step).all()


@pytest.mark.parametrize("form, error", [("fp32", 1e-6), ("fp16", 1e-3), ("bf16", 1e-2), ("8bit", 0.06)])
def test_a_narrow_momentum_loses_only_its_rounding(form, error):
    weight, wide = numbers(3000), numbers(3000)
    gradients = [numbers(3000, seed) for seed in range(1, 20)]
    momentum, wanted = run_sgd(weight, gradients, form, mu=0.9), run_sgd(wide, gradients, mu=0.9)
    got = read_moment(momentum)
    assert (got - wanted.values).norm() / wanted.values.norm() < error
    assert (weight - wide).norm() / wide.norm() < error


@pytest.mark.parametrize("form, error", [("fp16", 3e-3), ("bf16", 2e-2), ("8bit", 0.1)])
def test_narrow_adam_moments_follow_the_wide_ones_over_sizes_that_differ_by_orders(form, error):
    """Gradients whose sizes spread over six orders of magnitude in one tensor, and change with time."""
    sizes, weight, wide = (numbers(3000, 5) * 2).exp() * 1e-6, numbers(3000), numbers(3000)
    gradients = [numbers(3000, seed) * sizes ** (1 - seed / 400) for seed in range(1, 101)]
    start = weight.clone()
    run_adam(weight, gradients, form, lr=1e-3)
    run_adam(wide, gradients, lr=1e-3)
    assert ((weight - wide).norm() / (wide - start).norm()) < error


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e-7, 1.0, 1e12, 1e30])
@pytest.mark.parametrize("form", ["fp16", "8bit"])
def test_the_scale_of_a_moment_follows_its_values(form, size):
    weight, momentum = torch.zeros(1000), new_moment(torch.zeros(1000), form)
    gradient = numbers(1000) * size
    sgd_update(weight, gradient, momentum, lr=0.0, mu=0.9)
    error = (read_moment(momentum) - gradient).double().norm() / gradient.double().norm()
    assert error < (1e-3 if form == "fp16" else 0.05)


@pytest.mark.parametrize("form, error", [("fp16", 1e-3), ("8bit", 0.05)])
def test_a_block_of_small_values_is_not_lost_beside_one_of_large_values(form, error):
    weight, momentum = torch.zeros(3 * BLOCK + 5), new_moment(torch.zeros(3 * BLOCK + 5), form)
    gradient = numbers(3 * BLOCK + 5)
    for number, part in enumerate(gradient.split(BLOCK)):
        part *= 1e-10**number
    sgd_update(weight, gradient, momentum, lr=0.0, mu=0.9)
    for got, wanted in zip(read_moment(momentum).split(BLOCK), gradient.split(BLOCK), strict=True):
        assert (got - wanted).double().norm() < error * wanted.double().norm()


def test_a_second_moment_in_8_bits_is_never_zero_where_there_was_a_gradient():
    weight, gradient = torch.zeros(512), torch.full((512,), 1e-12)
    gradient[::256] = 1.0
    _, second = run_adam(weight, [gradient], "8bit")
    assert (second.values > 0).all()
    assert weight.abs().max() <= 0.1 * 1.001


@pytest.mark.parametrize(
    "form, bytes_each", [("fp32", 4), ("fp16", 2 + 4 / BLOCK), ("bf16", 2), ("8bit", 1 + 4 / BLOCK)]
)
def test_moments_take_the_bytes_that_their_form_says(form, bytes_each):
    moment = new_moment(torch.empty(BLOCK * 1000), form)
    taken = sum(part.nbytes for part in moment if part is not None)
    assert taken == pytest.approx(bytes_each * BLOCK * 1000, abs=4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("positive", [False, True])
def test_a_moment_that_is_read_and_written_stays_as_it_is(form, positive):
    moment = new_moment(torch.empty(5, 130), form, positive)
    write_moment(moment, numbers(650).abs().view(5, 130) * 1e-9)
    again = Moment(*(None if part is None else part.clone() for part in moment))
    write_moment(again, read_moment(moment))
    assert all(a is b or torch.equal(a, b) for a, b in zip(moment, again, strict=True))


# -- rounding by chance ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "key, counter, words",
    [
        ((0, 0), (0, 0), (0x9D1C5EC6, 0x8BD50731)),
        ((2**32 - 1, 2**32 - 1), (2**32 - 1, 2**32 - 1), (0xFD36D048, 0x2D17272C)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xBA3E4725, 0xF27D669E)),
    ],
)
def test_random_bits_are_those_of_threefry(key, counter, words):
    assert threefry(key, counter) == words


@pytest.mark.parametrize("part", [slice(0, 1), slice(0, 256), slice(256, 1000), slice(2**33, 2**33 + 300)])
@pytest.mark.parametrize("stream", [0, 2])
def test_random_bits_of_a_part_are_the_reference_s(part, stream):
    noise = (2**40 + 3, 5, 7)
    reference = reference_moments.random_bits(reference_moments.key_of(noise), stream, part, torch.device("cpu"))
    assert torch.equal(random_bits(noise, stream, part, torch.device("cpu")), reference)


def test_of_two_elements_that_share_random_bits_one_takes_the_complement():
    bits = random_bits((1, 2, 3), 1, slice(0, 1000 * BLOCK), torch.device("cpu")).view(1000, 2, BLOCK // 2)
    assert torch.equal(bits.sum(1), torch.full((1000, BLOCK // 2), 0xFFFF))
    assert bits[:, 0].double().mean() == pytest.approx(0x7FFF, rel=0.01)
    assert (bits[:, 0].double().mean(0) / 0x7FFF - 1).abs().max() < 0.1  # 5 standard deviations


def test_a_second_moment_in_8_bits_has_the_right_code_on_average():
    gradient, draws = numbers(BLOCK), 1000
    mean = torch.zeros(BLOCK)
    for seed in range(draws):
        _, second = run_adam(torch.zeros(BLOCK), [gradient], "8bit", seed=seed)
        mean += second.values / draws
    wanted = 255 * (gradient.abs() / gradient.abs().max()) ** 0.25
    assert (mean - wanted).abs().max() < 5 * 0.5 / draws**0.5
    assert (mean - wanted).mean().abs() < 5 * 0.5 / (draws * BLOCK) ** 0.5


def test_bf16_weights_move_by_the_mean_of_updates_too_small_for_them():
    weight = torch.ones(20_000, dtype=torch.bfloat16)
    for step in range(1, 33):  # each a 32nd of the spacing below 1
        sgd_update(weight, torch.ones(20_000), lr=2**-8 / 32, noise=(1, 0, step))
    assert weight.float().mean().item() == pytest.approx(1 - 2**-8, abs=1e-4)
    assert weight.unique().numel() > 1


def test_fp16_weights_are_rounded_to_nearest():
    weight = torch.ones(1000, dtype=torch.float16)
    sgd_update(weight, torch.ones(1000), lr=2**-13)
    assert torch.equal(weight, torch.ones(1000).half())


@pytest.mark.parametrize("change", [{"seed": 4}, {"number": 1}, {"step": 2}])
def test_other_seeds_tensors_and_steps_round_otherwise(change):
    def updated(seed=3, number=0, step=1):
        weight = numbers(1000, 0, torch.bfloat16)
        sgd_update(weight, numbers(1000, 1), lr=1e-3, noise=(seed, number, step))
        return weight

    assert torch.equal(updated(), updated())
    assert not torch.equal(updated(), updated(**change))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", WEIGHTS, ids=str)
def test_results_do_not_depend_on_the_number_of_threads(dtype, form):
    before, results = torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        weight = numbers(50_000, 0, dtype)
        moments = run_adam(weight, [numbers(50_000, s, dtype) for s in (1, 2)], form, lr=0.01)
        results.append([weight, *(part for moment in moments for part in moment if part is not None)])
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# -- references, layouts, fakes -------------------------------------------------------------------------------
def as_arguments(moments):
    return *(m.values for m in moments), *(m.scales for m in moments)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", WEIGHTS, ids=str)
def test_the_compiled_updates_equal_their_references(dtype, form):
    """Numbers that are exact in FP32, so that both round the same ones."""
    numel = 2 * CHUNK + 300
    whole = torch.randint(-8, 9, (numel,), generator=torch.Generator().manual_seed(1))
    ours, twins = (whole / 16 + 1).to(dtype), (whole / 16 + 1).to(dtype)
    gradient = (whole.roll(5) / 32).to(dtype)
    a, b = new_moment(ours, form), new_moment(ours, form)
    for step in (1, 2):
        noise = (5, 7, step)
        sgd_update(ours, gradient, a, lr=2**-10, mu=0.5, weight_decay=0.5, factor=0.25, noise=noise)
        reference_update.sgd_update(twins, gradient, None, *b, 2**-10, 0.5, False, 0.5, 0.25, True, False, noise)
    assert torch.equal(ours, twins)
    assert all(x is y or torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("settings", ADAM, ids=str)
def test_the_compiled_adam_is_close_to_its_reference(settings, form):
    ours, twins = numbers(1000), numbers(1000)
    gradients = [numbers(1000, seed) for seed in (1, 2)]
    run_adam(ours, gradients, form, **settings)
    moments = new_moment(twins, form), new_moment(twins, form, positive=True)
    plain = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "decoupled": False} | settings
    betas, eps, decay, decoupled = plain.values()
    for step, gradient in enumerate(gradients, 1):
        reference_update.adam_update(
            twins, gradient, None, *as_arguments(moments), 0.1, *betas, eps, decay, decoupled, 1.0, step, (3, 0, step)
        )
    # A value that lies on the border of two codes may fall to either side.
    assert (ours - twins).abs().median() < 1e-6
    assert (ours - twins).abs().max() < (0.02 if form == "8bit" else 1e-3)


def test_layouts_of_weight_and_gradient_may_differ():
    weight = torch.randn(8, 6, 3, 3).contiguous(memory_format=torch.channels_last)
    plain, gradient = weight.contiguous(), torch.randn(8, 6, 3, 3)
    a, b = new_moment(weight, "fp16"), new_moment(plain, "fp16")
    sgd_update(weight, gradient, a, lr=0.1, mu=0.9)
    sgd_update(plain, gradient, b, lr=0.1, mu=0.9)
    assert torch.equal(weight, plain) and torch.equal(a.values, b.values)
    assert weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("form", FORMS)
def test_a_nan_in_the_gradient_stays_visible(form):
    weight, gradient = numbers(1000), numbers(1000, 1)
    gradient[77] = math.nan
    first, second = run_adam(weight, [gradient], form)
    assert weight.isnan().nonzero().tolist() == [[77]]
    assert read_moment(first).isnan().any() and read_moment(second).isnan().any()


@pytest.mark.parametrize("form", FORMS)
def test_scratch_does_not_grow_with_the_tensor(form):
    def scratch(numel):
        with FakeTensorMode():
            weight = torch.empty(numel)
            moments = new_moment(weight, form), new_moment(weight, form, positive=True)
            gradient = torch.empty_like(weight)
            return scratch_of(lambda: adam_update(weight, gradient, *moments, lr=0.1, step=1))[1]

    assert scratch(2 * CHUNK) == scratch(8 * CHUNK)
    assert scratch(8 * CHUNK) == 0 or core is None  # the reference works in chunks, the core in registers


def test_a_weight_that_was_updated_is_not_used_by_a_backward_pass_that_saved_it():
    weight = torch.nn.Parameter(numbers(10))
    loss = (weight * weight).sum()
    with torch.no_grad():
        sgd_update(weight, numbers(10), lr=0.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_and_weights_that_do_not_fit_are_refused():
    weight = torch.zeros(4, 6)
    with pytest.raises(ShoestringError, match="dense one"):
        sgd_update(weight, torch.zeros(4, 6).to_sparse(), lr=0.1)
    with pytest.raises(ShoestringError, match="dense one"):
        sgd_update(weight, torch.zeros(6, 4), lr=0.1)
    with pytest.raises(ShoestringError, match="gaps"):
        sgd_update(weight[:, ::2], torch.zeros(4, 3), lr=0.1)


@pytest.mark.parametrize("one, other", [("8bit", "fp32"), ("fp32", "8bit"), ("bf16", "fp16")])
def test_moments_of_two_forms_are_refused(one, other):
    weight = torch.zeros(300)
    moments = new_moment(weight, one), new_moment(weight, other, positive=True)
    with pytest.raises(ShoestringError, match="of one form"):
        adam_update(weight, torch.zeros(300), *moments, lr=0.1, step=1)


@pytest.mark.parametrize("found", [0, 1])
@pytest.mark.parametrize("form", ["fp16", "8bit"])
def test_moments_without_all_their_scales_are_refused(form, found):
    weight, gradient = torch.zeros(300), torch.zeros(300)
    first, second = new_moment(weight, form), new_moment(weight, form, positive=True)
    lacking = Moment(second.values, torch.ones(1) if found else None)
    momentum = Moment(first.values, lacking.scales)
    reason = f"has {found} scales and needs 2: make it by new_moment"
    with pytest.raises(ShoestringError, match=reason):
        adam_update(weight, gradient, first, lacking, lr=0.1, step=1)
    with pytest.raises(ShoestringError, match=reason):
        sgd_update(weight, gradient, momentum, lr=0.1, mu=0.9)
    with pytest.raises(ShoestringError, match=reason):
        sgd_accumulate(weight, gradient, momentum)
    with pytest.raises(ShoestringError, match=reason):
        sgd_apply_momentum(weight, momentum, lr=0.1)
