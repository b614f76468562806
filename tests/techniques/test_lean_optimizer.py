"""Lean optimizers: torch.optim's steps on narrow state, saved and restored, profiled, and without gradients."""

import copy
import math

import pytest
import torch
from torch import nn

import shoestring
from shoestring import SGD, Adam, Plan, ShoestringError, Task
from shoestring.errors import NoEffect
from shoestring.kernels.moments import Moment, read_moment
from shoestring.profiling import profile
from shoestring.runs.state import OptimizerState, pack, unpack
from shoestring.step import Stepper
from shoestring.techniques.optimizer import LeanSettings, Settings, apply, lean_update, options, risk
from shoestring.techniques.optimizer.base import SMALL
from shoestring.techniques.optimizer.factored import SM3, Adafactor
from shoestring.techniques.precision.loss_scale import Scaling
from shoestring.techniques.technique import Risk

HEAVY_BALL = SGD(lr=0.05, momentum=0.9, weight_decay=0.01)
NESTEROV = SGD(lr=0.05, momentum=0.9, nesterov=True)
PLAIN = SGD(lr=0.05)
ADAM, ADAMW = Adam(lr=0.01, weight_decay=0.01), Adam(lr=0.01, weight_decay=0.1, decoupled=True)
RULES = [PLAIN, HEAVY_BALL, NESTEROV, ADAM, ADAMW]
FORMS = ["fp16", "bf16", "8bit"]


def loss(model, batch):
    return (model(batch) - batch[:, :3]).square().mean()


def make(**changes) -> Task:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 3))
    fields = {"model": model, "loss": loss, "batch": torch.randn(24, 20), "optimizer": HEAVY_BALL}
    return Task(**(fields | changes))


def train(task: Task, steps: int = 5) -> list[float]:
    stepper = Stepper(task)
    return [float(stepper.step(task.batch)) for _ in range(steps)]


def weights(task: Task) -> list[torch.Tensor]:
    return [p.detach().clone() for p in task.model.parameters()]


# -- the numbers ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_in_fp32_a_lean_optimizer_is_torchs(rule, clip):
    plain, lean = make(optimizer=rule, clip=clip), make(optimizer=lean_update(make(optimizer=rule)), clip=clip)
    torch.testing.assert_close(train(plain), train(lean), rtol=1e-5, atol=1e-7)
    for a, b in zip(weights(plain), weights(lean), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form, error", [("fp16", 2e-3), ("bf16", 2e-2), ("8bit", 0.05)])
@pytest.mark.parametrize("rule", [HEAVY_BALL, NESTEROV, ADAM, ADAMW], ids=str)
def test_narrow_state_trains_as_wide_state_does(rule, form, error):
    plain, lean = make(optimizer=rule), apply(make(optimizer=rule), Settings(form))
    ours, wanted = train(lean, 40), train(plain, 40)
    assert ours[-1] < 0.7 * ours[0]
    assert abs(ours[-1] - wanted[-1]) < error * wanted[0]


def test_the_learning_rate_is_that_of_the_group():
    task = apply(make(), Settings("8bit"))
    stepper = Stepper(task)
    before = weights(task)
    stepper.optimizer.param_groups[0]["lr"] = 0.0
    stepper.step(task.batch)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(task), strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_16_bit_weights_train_without_a_master_copy(form, dtype):
    def narrow_loss(model, batch):
        out = torch.func.functional_call(model, {n: p.float() for n, p in model.named_parameters()}, (batch,))
        return (out - batch[:, :3]).square().mean()

    task = make(optimizer=LeanSettings(HEAVY_BALL, form), loss=narrow_loss)
    task.model.to(dtype)
    losses = train(task, 40)
    assert losses[-1] < 0.6 * losses[0]
    assert all(p.dtype == dtype for p in task.model.parameters())


def test_unscaled_fp16_moments_underflow_and_diverge_where_scaled_ones_do_not():
    """A small task of gradients about 1e-4, whose squares FP16 cannot hold: Adam then divides by nothing."""

    def trained(update):
        torch.manual_seed(0)
        weight = torch.randn(SMALL)
        for step in range(1, 301):
            update(weight, 1e-4 * (weight - 1 + 0.1 * torch.randn(SMALL)), step)
        return (weight - 1).abs().max().item()

    def unscaled(weight, gradient, step):
        first.copy_(0.9 * first.float() + 0.1 * gradient)
        second.copy_(0.999 * second.float() + 0.001 * gradient.square())
        root = (second.float() / (1 - 0.999**step)).sqrt()
        weight -= 0.03 * first.float() / (1 - 0.9**step) / (root + 1e-8)

    def optimized(weight, gradient, step):
        parameter.data, parameter.grad = weight, gradient
        optimizer.step()

    first, second, parameter = torch.zeros(SMALL).half(), torch.zeros(SMALL).half(), nn.Parameter(torch.zeros(SMALL))
    assert trained(unscaled) > 100
    optimizer = torch.optim.Adam([parameter], lr=0.03)
    wanted = trained(optimized)
    optimizer = lean_update(make(optimizer=Adam(lr=0.03)), "fp16")([parameter])
    assert trained(optimized) == pytest.approx(wanted, rel=0.05) and wanted < 0.5
    assert optimizer.state[parameter]["exp_avg_sq"].dtype == torch.float16


# -- what the state occupies ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "rule, form, bytes_each",
    [
        (HEAVY_BALL, "fp16", 2.02),
        (HEAVY_BALL, "8bit", 1.03),
        (ADAM, "fp16", 4.04),
        (ADAM, "bf16", 4),
        (ADAM, "8bit", 2.05),
        (Adafactor(), "fp32", 0.1),
        (SM3(), "8bit", 1.1),
        (SM3(momentum=0), "fp32", 0.1),
    ],
    ids=str,
)
def test_the_profiler_counts_the_bytes_of_the_state(rule, form, bytes_each):
    task = Task(
        nn.Linear(512, 512, bias=False), lambda m, b: m(b).mean(), torch.randn(4, 512), LeanSettings(rule, form)
    )
    ledger = profile(task).ledger
    second_pass = max(e.born for e in ledger.entries if e.phase == "forward")
    predicted = ledger.bytes_by(lambda e: str(e.category), second_pass)["optimizer_state"]
    real = Stepper(task)
    real.step(task.batch)
    parts = real.optimizer.state[task.model.weight].values()
    occupied = sum(part.nbytes for part in parts if isinstance(part, torch.Tensor))
    assert 0 < occupied <= bytes_each * 512 * 512 + 8
    assert predicted == occupied


def test_small_fp32_tensors_keep_fp32_state():
    task = apply(make(), Settings("8bit"))
    stepper = Stepper(task)
    stepper.step(task.batch)
    state = stepper.optimizer.state
    kinds = {n: state[p]["momentum_buffer"].dtype for n, p in task.model.named_parameters()}
    assert kinds == {
        "0.weight": torch.int8,
        "0.bias": torch.float32,
        "2.weight": torch.float32,
        "2.bias": torch.float32,
    }


# -- saves ------------------------------------------------------------------------------------------------------
RECIPES = [LeanSettings(rule, form) for rule in (HEAVY_BALL, ADAM) for form in ("fp32", *FORMS)]
RECIPES += [SM3(), Adafactor(), LeanSettings(SM3(), "8bit"), LeanSettings(HEAVY_BALL, "8bit", in_backward=True)]


@pytest.mark.parametrize("how", ["state_dict", "saved"])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_run_that_is_saved_goes_on_to_the_bit(recipe, how):
    task = make(optimizer=recipe)
    task.model.bfloat16() if isinstance(recipe, LeanSettings) and recipe.state == "bf16" else None
    task = task.with_(batch=task.batch.to(task.model[0].weight.dtype))
    stepper = Stepper(task)
    for _ in range(3):
        stepper.step(task.batch)
    other = task.with_(model=copy.deepcopy(task.model))
    resumed = Stepper(other)
    if how == "state_dict":
        resumed.optimizer.load_state_dict(copy.deepcopy(stepper.optimizer.state_dict()))
    else:  # as the trainer does; without tensors there is no file to read
        state = OptimizerState(stepper.optimizer).state()
        packed, tensors = pack(state)
        assert packed and tensors
        OptimizerState(resumed.optimizer).restore(copy.deepcopy(state))
    for _ in range(3):
        assert torch.equal(stepper.step(task.batch), resumed.step(task.batch))
    assert all(torch.equal(a, b) for a, b in zip(weights(task), weights(other), strict=True))


def test_state_of_another_form_is_refused():
    one, other = (lean_update(make(optimizer=ADAM), form)(make().model.parameters()) for form in ("8bit", "fp16"))
    with pytest.raises(ShoestringError, match="the saved state is 8bit and the optimizer's is fp16"):
        other.load_state_dict(one.state_dict())


def test_a_save_of_version_0_1_with_one_scale_for_a_whole_fp16_moment_is_read():
    def stepped(optimizer, weight, steps):
        for seed in steps:
            weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
            optimizer.step()

    def made():
        weight = nn.Parameter(torch.zeros(SMALL + 100))
        return weight, lean_update(make(optimizer=ADAM), "fp16")([weight])

    one, other = made(), made()
    stepped(one[1], one[0], range(3))
    saved = copy.deepcopy(one[1].state_dict())
    state = saved["state"][0]
    for name in ("exp_avg", "exp_avg_sq"):  # as one scale would have kept them
        wide = read_moment(Moment(state[name], state[f"{name}_scales"]))
        state[f"{name}_scales"] = torch.tensor([2.0**-14])
        state[name] = (wide * 2.0**14).half()
        one[1].state[one[0]][name].copy_(state[name])
        one[1].state[one[0]][f"{name}_scales"].fill_(2.0**-14)
    with torch.no_grad():
        other[0].copy_(one[0])
    other[1].load_state_dict(saved)
    stepped(one[1], one[0], range(3, 6))
    stepped(other[1], other[0], range(3, 6))
    assert torch.equal(one[0], other[0])


# -- no gradient buffer -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_gradients_that_are_used_up_make_the_same_step(rule):
    plain, lean = make(optimizer=rule), apply(make(optimizer=rule), Settings("no-gradient"))
    torch.testing.assert_close(train(plain), train(lean), rtol=1e-5, atol=1e-7)
    for a, b in zip(weights(plain), weights(lean), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_heavy_ball_momentum_gathers_microbatches():
    split = {"split": lambda batch: batch.split(7)}
    plain, lean = make(**split), apply(make(**split), Settings("no-gradient"))
    torch.testing.assert_close(train(plain), train(lean), rtol=1e-5, atol=1e-7)
    for a, b in zip(weights(plain), weights(lean), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pieces", [1, 3])
def test_at_no_time_is_there_more_than_one_gradient(pieces):
    task = apply(make(split=lambda batch: batch.chunk(pieces)), Settings("no-gradient"))
    seen = []

    def count(parameter):
        seen.append(sum(p.grad is not None for p in task.model.parameters()))

    hooks = [p.register_post_accumulate_grad_hook(count) for p in task.model.parameters()]
    train(task, 1)
    assert seen == [1] * 4 * pieces
    for hook in hooks:
        hook.remove()
    timeline = profile(task).ledger.stacked_timeline()["gradient"]
    assert max(timeline) == 4 * (300 * 20 + 300)  # a layer's weight and bias, for one operator makes both


@pytest.mark.parametrize(
    "rule, changes, words",
    [
        (
            ADAM,
            {"split": lambda b: b.split(12)},
            "no-gradient cannot be used with 2 microbatches.* square of their sum",
        ),
        (NESTEROV, {"split": lambda b: b.split(12)}, "Nesterov's momentum needs the sum"),
        (PLAIN, {"split": lambda b: b.split(12)}, "needs the sum of all microbatches"),
        (Adafactor(), {"split": lambda b: b.split(12)}, "square of their sum"),
        (ADAM, {"clip": 1.0}, "clipping to 1 needs the norm"),
        (HEAVY_BALL, {"clip": 0.5}, "clipping to 0.5 needs the norm"),
        (HEAVY_BALL, {"scaling": Scaling()}, "a loss scale must see"),
    ],
)
def test_where_it_would_not_be_exact_it_is_refused_with_the_reason(rule, changes, words):
    task = make(optimizer=LeanSettings(rule, in_backward=True), **changes)
    before = weights(task)
    with pytest.raises(ShoestringError, match=words):
        Stepper(task).step(task.batch)
    with pytest.raises(ShoestringError, match=words):
        profile(task)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(task), strict=True))


def test_what_is_known_before_the_step_is_refused_before_it():
    for changes in ({"clip": 1.0}, {"scaling": Scaling()}):
        with pytest.raises(ShoestringError, match="no-gradient cannot be used"):
            apply(make(**changes), Settings("no-gradient"))


def test_a_parameter_whose_gradient_comes_in_two_parts_is_refused_unless_it_gathers():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            for _ in range(2):
                x = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=True)
            return x

    batch = torch.randn(5, 4, requires_grad=True)
    task = Task(Shared(), lambda m, b: m(b).square().mean(), batch, LeanSettings(ADAM, in_backward=True))
    with pytest.raises(ShoestringError, match="got its gradient in two parts"):
        Stepper(task).step(batch)
    gathered = Task(Shared(), task.loss, batch, LeanSettings(HEAVY_BALL, in_backward=True))
    plain = Task(copy.deepcopy(gathered.model), task.loss, batch, HEAVY_BALL)
    torch.testing.assert_close(train(plain), train(gathered), rtol=1e-5, atol=1e-7)


def test_no_hook_is_left_behind_even_by_a_step_that_breaks_off():
    def breaking(model, batch):
        value = loss(model, batch)
        if len(taken):
            raise KeyError("the second microbatch")
        taken.append(1)
        return value

    taken: list[int] = []
    task = apply(make(loss=breaking, split=lambda batch: batch.split(12)), Settings("no-gradient"))
    stepper = Stepper(task)
    with pytest.raises(KeyError):
        stepper.step(task.batch)
    loss(task.model, task.batch).backward()
    assert all(p.grad is not None for p in task.model.parameters())  # nobody took them
    for go_on in (stepper.optimizer.state_dict, lambda: stepper.step(task.batch)):
        with pytest.raises(ShoestringError, match="a step failed after 4 gradients"):
            go_on()


# -- SM3 and Adafactor ------------------------------------------------------------------------------------------
def quadratic(recipe, steps=200, dtype=torch.float32):
    """Distance from a minimum in 600 dimensions of very different curvature, before and after."""
    generator = torch.Generator().manual_seed(0)
    goal = torch.randn(20, 30, generator=generator)
    curvature = torch.logspace(-2, 1, 20)[:, None] * torch.logspace(-1, 0, 30)
    weight = nn.Parameter(torch.zeros(20, 30, dtype=dtype))
    optimizer = recipe([weight])
    for _ in range(steps):
        weight.grad = (curvature * (weight.detach().float() - goal)).to(dtype)
        optimizer.step()
    return goal.norm().item(), (weight.detach().float() - goal).norm().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "recipe",
    [SM3(lr=0.3), SM3(lr=0.3, momentum=0), Adafactor(lr=0.3, relative=False), LeanSettings(SM3(lr=0.3), "fp16"),
     LeanSettings(SM3(lr=0.3), "bf16")],
    ids=str,
)  # fmt: skip
def test_factored_optimizers_come_near_the_minimum(recipe, dtype):
    before, after = quadratic(recipe, dtype=dtype)
    assert after < 0.2 * before


def test_adafactor_is_torchs_on_a_matrix_and_on_a_vector():
    for shape in ((40, 30), (50,)):
        ours, theirs = (nn.Parameter(torch.linspace(-1, 1, math.prod(shape)).view(shape)) for _ in range(2))
        lean = Adafactor(lr=0.01, weight_decay=0.1)([ours])
        plain = torch.optim.Adafactor([theirs], lr=0.01, weight_decay=0.1, foreach=False)
        generator = torch.Generator().manual_seed(0)
        for _ in range(20):
            theirs.grad = torch.randn(shape, generator=generator)
            ours.grad = theirs.grad.clone()
            lean.step()
            plain.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_sm3_follows_its_formula():
    weight = nn.Parameter(torch.zeros(2, 2))
    optimizer = SM3(lr=1.0, momentum=0.0)([weight])
    weight.grad = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    optimizer.step()
    torch.testing.assert_close(weight.detach(), -torch.tensor([[1.0, 1.0], [0.0, 1.0]]))
    state = optimizer.state[weight]
    assert state["rows"].tolist() == [16.0, 1.0] and state["columns"].tolist() == [9.0, 16.0]
    weight.grad = torch.tensor([[0.0, 3.0], [2.0, 0.0]])  # least of row and column: [[9, 16], [1, 1]]
    optimizer.step()
    wanted = -torch.tensor([[1.0, 1 + 3 / 5], [2 / math.sqrt(5), 1.0]])
    torch.testing.assert_close(weight.detach(), wanted)


@pytest.mark.parametrize("recipe", [SM3(lr=0.05), Adafactor(lr=0.02), LeanSettings(SM3(lr=0.05), "8bit")], ids=str)
def test_factored_optimizers_train_a_network(recipe):
    losses = train(make(optimizer=recipe), 60)
    assert losses[-1] < 0.5 * losses[0]


def test_rows_in_several_chunks_make_the_same_update():
    def updated(recipe):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(700, 100))
        optimizer = recipe([weight])
        for _ in range(3):
            weight.grad = torch.randn(700, 100)
            optimizer.step()
        return weight.detach()

    for recipe in (SM3(), Adafactor()):
        chunked = updated(recipe)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shoestring.techniques.optimizer.factored.CHUNK", 1 << 20)
            torch.testing.assert_close(updated(recipe), chunked)


# -- plans ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "words, wanted",
    [
        ("8bit", LeanSettings(ADAM, "8bit")),
        ("fp16+no-gradient", LeanSettings(ADAM, "fp16", in_backward=True)),
        ("no-gradient", LeanSettings(ADAM, in_backward=True)),
        ("adafactor", LeanSettings(Adafactor(0.01, relative=False, weight_decay=0.01))),
        ("sm3+8bit", LeanSettings(SM3(0.01, 0.9, 0.01), "8bit")),
    ],
)
def test_a_plan_names_the_optimizer_in_words(words, wanted):
    lean = shoestring.apply(make(optimizer=ADAM), Plan(optimizer=words))
    assert lean.task.optimizer == wanted
    assert lean.task.settings["optimizer"] == words
    assert lean.step(lean.task.batch).isfinite()


def test_a_form_given_before_stays_unless_another_is_asked_for():
    narrow = make(optimizer=lean_update(make(optimizer=ADAM), "bf16"))
    assert apply(narrow, Settings("no-gradient")).optimizer == LeanSettings(ADAM, "bf16", in_backward=True)
    assert apply(narrow, Settings("8bit")).optimizer == LeanSettings(ADAM, "8bit")


@pytest.mark.parametrize(
    "optimizer, words, error",
    [
        (ADAM, "4bit", "there is no lean optimizer '4bit'"),
        (ADAM, "8bit+fp16", "two forms of one thing"),
        (lambda parameters: torch.optim.RMSprop(parameters), "8bit", "lean form of RMSprop is not known"),
        (torch.optim.LBFGS, "no-gradient", "lean form of LBFGS is not known"),
        (HEAVY_BALL, "adafactor", "takes the place of Adam"),
    ],
)
def test_what_is_not_known_is_refused(optimizer, words, error):
    with pytest.raises(ShoestringError, match=error):
        apply(make(optimizer=optimizer), Settings(words))


@pytest.mark.parametrize("optimizer", [HEAVY_BALL, ADAM, lambda parameters: torch.optim.AdamW(parameters)])
@pytest.mark.parametrize("words", ["no-gradient", "8bit", "sm3"])
def test_complex_parameters_are_refused_by_name(optimizer, words):
    task = make(optimizer=optimizer)
    task.model.phases = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(ShoestringError, match=r"parameter phases is torch\.complex64"):
        apply(task, Settings(words))
    with pytest.raises(ShoestringError, match="complex64"):
        options(task)


def test_a_form_without_a_state_has_no_effect():
    with pytest.raises(NoEffect, match="keeps nothing"):
        apply(make(optimizer=PLAIN), Settings("8bit"))
    with pytest.raises(ShoestringError, match="no form '4bit'"):
        lean_update(make(optimizer=ADAM), "4bit")


def test_the_planner_is_offered_what_applies_with_its_risk():
    summed = "8bit+8bit-gradient"
    assert options(make()) == ["no-gradient", "8bit", "8bit+no-gradient", summed]
    assert options(make(clip=1.0)) == ["8bit"]
    factored = ["sm3+8bit", "sm3+8bit+no-gradient", "adafactor", "adafactor+no-gradient"]
    assert options(make(optimizer=ADAMW)) == ["no-gradient", "8bit", "8bit+no-gradient", *factored, summed]
    assert options(make(optimizer=ADAM, clip=1.0)) == ["8bit", "sm3+8bit", "adafactor"]
    assert {risk(make(optimizer=ADAM), words) for words in factored} == {Risk.APPROXIMATE}
    with pytest.raises(ShoestringError, match="the lean form of RMSprop is not known"):
        options(make(optimizer=lambda p: torch.optim.RMSprop(p, lr=0.1)))
    risks = [risk(make(), words) for words in ("no-gradient", "8bit+no-gradient", "sm3")]
    assert risks == [Risk.EXACT, Risk.NEUTRAL, Risk.APPROXIMATE]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_are_rounded_otherwise_than_by_pytorch_and_no_update_of_them_is_exact(dtype):
    task = make()
    task.model[0].to(dtype)
    assert risk(task, "no-gradient") == Risk.NEUTRAL


def test_packed_state_is_plain_data_and_tensors():
    stepper = Stepper(make(optimizer=LeanSettings(ADAM, "8bit")))
    stepper.step(stepper.task.batch)
    packed, tensors = pack(OptimizerState(stepper.optimizer).state())
    assert any(t.dtype == torch.uint8 for t in tensors.values())
    assert unpack(packed["own"]["param_groups"], None)[0]["form"] == "8bit"
