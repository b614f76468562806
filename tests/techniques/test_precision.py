"""16-bit training: every tensor but normalisation's in 16 bits, losses like FP32's, no copy of the weights."""

import pytest
import torch
from torch import nn

import zoo
from shoestring import SGD, Adam, Plan, ShoestringError, Task, apply, builtin
from shoestring.profiling import profile
from shoestring.step import Stepper
from shoestring.techniques.precision import NORMS, Settings, convert, options, risk
from shoestring.techniques.precision import apply as with_precision
from shoestring.techniques.technique import Risk

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def losses(task, steps=3):
    stepper = Stepper(task)
    return [float(stepper.step(task.batch)) for _ in range(steps)]


@pytest.mark.parametrize("form", DTYPES)
@pytest.mark.parametrize("plan", [{}, {"checkpoint": "residual-2*"}], ids=["plain", "residual-2*"])
def test_losses_are_those_of_fp32_to_a_spacing_of_the_16_bits(form, plan):
    expected = losses(builtin("wrn-10-1", batch=8, image=16))
    lean = apply(builtin("wrn-10-1", batch=8, image=16), Plan(precision=form, **plan))
    assert losses(lean.task) == pytest.approx(expected, rel=torch.finfo(DTYPES[form]).eps)


@pytest.mark.parametrize("form", DTYPES)
def test_weights_gradients_and_momenta_are_16_bits_and_normalisation_is_not(form):
    task = with_precision(builtin("wrn-10-1", batch=4, image=16), Settings(form))
    gradients = {}
    for name, parameter in task.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, n=name: gradients.__setitem__(n, p.grad.dtype))
    stepper = Stepper(task)
    stepper.step(task.batch)
    for path, module in task.model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            wanted = torch.float32 if isinstance(module, NORMS) else DTYPES[form]
            assert parameter.dtype == wanted == gradients[f"{path}.{name}"], path
    large = [t for s in stepper.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)
             and t.numel() > 4096]  # fmt: skip
    assert large and all(t.element_size() == 2 for t in large)


def test_a_transformer_trains_in_fp16():
    expected = losses(zoo.gpt(batch=4).with_(optimizer=SGD(0.1)))
    torch.manual_seed(0)
    assert expected[-1] < expected[0]
    lean = with_precision(zoo.gpt(batch=4).with_(optimizer=SGD(0.1)), Settings("fp16"))
    found = losses(lean)
    assert found[-1] < found[0]


def test_activations_take_half_the_bytes():
    plan = {"checkpoint": "residual-1*"}
    wide = profile(apply(builtin("wrn-10-2", batch=32, device="meta"), Plan(**plan)).task)
    narrow = profile(apply(builtin("wrn-10-2", batch=32, device="meta"), Plan(precision="fp16", **plan)).task)
    for part in ("activation", "gradient"):
        assert narrow.bytes_by_category[part] < 0.56 * wide.bytes_by_category[part]


def test_a_meta_model_that_others_hold_is_left_as_it_was():
    task = builtin("wrn-10-1", batch=4, device="meta")
    apply(task, Plan(precision="fp16"))
    assert {p.dtype for p in task.model.parameters()} == {torch.float32}


def test_tied_weights_stay_tied():
    task = zoo.tied(batch=2)
    convert(task.model, torch.float16)
    assert task.model.head.weight is task.model.embed.weight
    assert task.model.head.weight.dtype == torch.float16


class Odd(nn.Module):
    def __init__(self, parameter):
        super().__init__()
        self.odd = nn.Parameter(parameter, requires_grad=parameter.is_floating_point())
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        return self.linear(x)


@pytest.mark.parametrize(
    "parameter, words",
    [
        (torch.zeros(2, dtype=torch.int32), "odd is torch.int32"),
        (torch.zeros(2, dtype=torch.complex64), "odd is torch.complex64"),
        (torch.full((2,), 1e6), "odd has a value of 1e\\+06, and torch.float16 holds -65504 to 65504"),
        (torch.tensor([1.0, -7e4]), "odd has a value of -70000"),
        (torch.tensor([1.0, torch.nan]), "odd has a value of nan"),
        (torch.tensor([1.0, -torch.inf]), "odd has a value of -inf"),
    ],
)
def test_a_parameter_that_16_bits_cannot_hold_is_named(parameter, words):
    task = Task(Odd(parameter), lambda m, x: m(x).mean(), torch.randn(2, 2), SGD())
    with pytest.raises(ShoestringError, match=words):
        with_precision(task, Settings("fp16"))


def test_the_planner_is_offered_bf16_where_gradients_can_be_used_up():
    task = zoo.mlp()
    assert options(task) == ["fp16", "bf16"]
    assert options(task.with_(clip=1.0)) == options(task.with_(on_nonfinite="skip")) == ["fp16"]
    with pytest.raises(ShoestringError, match="the lean form of RMSprop is not known"):
        options(task.with_(optimizer=torch.optim.RMSprop))
    assert {risk(task, form) for form in options(task)} == {Risk.NEUTRAL}


@pytest.mark.parametrize("words", ["no-gradient", "8bit+no-gradient", "adafactor+no-gradient", "sm3+8bit+no-gradient"])
def test_in_bf16_gradients_are_used_up_as_they_are_made(words):
    def made(**plan):
        return apply(zoo.mlp().with_(optimizer=Adam(lr=1e-3)), Plan(**plan))

    lean = made(precision="bf16", optimizer=words)
    assert losses(lean.task, 5)[-1] < losses(made().task, 1)[0]
    gradients = profile(lean.task).ledger.stacked_timeline()["gradient"]
    kept = profile(made(precision="bf16").task).ledger.stacked_timeline()["gradient"]
    assert max(gradients) < 0.9 * max(kept)


def test_a_precision_that_does_not_exist_is_refused():
    with pytest.raises(ShoestringError, match="fp16 or bf16"):
        with_precision(zoo.mlp(), Settings("fp8"))


def test_normalisation_stays_fp32_and_so_may_have_any_value():
    norm = nn.LayerNorm(2)
    nn.init.constant_(norm.weight, 1e6)
    task = Task(nn.Sequential(norm, nn.Linear(2, 2)), lambda m, x: m(x).mean(), torch.randn(2, 2), SGD())
    assert with_precision(task, Settings("fp16")).model[0].weight.dtype == torch.float32
