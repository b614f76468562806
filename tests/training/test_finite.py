"""A step whose loss, gradient or statistics are not finite changes nothing: weights, optimizer state and buffers."""

import math
from contextlib import contextmanager

import pytest
import torch
from small import Noise, loss, right_answers, task
from torch import nn

from shoestring import SGD, Adam, Plan, ShoestringError, Task, apply, builtin, finite, train
from shoestring.errors import Diverged
from shoestring.profiling import profile
from shoestring.step import Stepper

PLANS = [
    {},
    {"nonzero": 30},
    {"precision": "fp16"},
    {"precision": "bf16"},
    {"optimizer": "8bit"},
    {"checkpoint": "residual-2*", "microbatch": 2},
    {"nonzero": 30, "precision": "fp16", "checkpoint": "residual-2*", "microbatch": 2},
]


def held(stepper) -> list[torch.Tensor]:
    """Copies of all that a step may change."""
    model = stepper.task.model
    state = [value for part in stepper.optimizer.state.values() for value in part.values()]
    tensors = [*model.parameters(), *model.buffers(), *(t for t in state if isinstance(t, torch.Tensor))]
    return [t.detach().clone() for t in tensors]


def same(before, after) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def started(plan: dict, **changes) -> Stepper:
    """A small WRN under a plan, after one good step."""
    given = builtin("wrn-10-1", batch=4, image=8).with_(**changes)
    stepper = apply(given, Plan(**plan)).stepper
    stepper.step(given.batch)
    return stepper


@contextmanager
def spoiled_gradient(stepper):
    """A batch that is fine, and one number of the first parameter's gradient that is not."""
    parameter = next(stepper.task.model.parameters())

    def spoil(gradient):
        gradient = gradient.clone()
        gradient.view(-1)[0] = math.nan
        return gradient

    with parameter.register_hook(spoil):
        yield stepper.task.batch


@contextmanager
def spoiled_batch(stepper):
    """A batch whose second half has one infinite pixel: a first microbatch is fine."""
    images, labels = stepper.task.batch
    images = images.clone()
    images[-1, 0, 0, 0] = math.inf
    yield images, labels


@pytest.mark.parametrize("spoil", [spoiled_gradient, spoiled_batch])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_in_every_precision_a_bad_step_raises_or_is_skipped_and_no_bit_is_changed(plan, spoil):
    raising, skipping = started(plan), started(plan, on_nonfinite="skip")
    for stepper in (raising, skipping):
        before = held(stepper)
        with spoil(stepper) as batch:
            if stepper is skipping or (plan.get("precision") == "fp16" and spoil is spoiled_gradient):
                stepper.step(batch)
                assert stepper.skipped
            else:
                with pytest.raises(Diverged, match=r"not finite|the loss is nan"):
                    stepper.step(batch)
        assert same(before, held(stepper))
        assert all(p.grad is None for p in stepper.task.model.parameters())
        stepper.step(stepper.task.batch)
        assert not stepper.skipped and not same(before, held(stepper))  # the run goes on


def test_statistics_that_overflow_are_found_where_loss_and_gradients_are_finite():
    """Activations of 1e30 have an infinite variance, and an output of zeros."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    stepper = Stepper(Task(model, lambda m, x: m(x).square().mean(), torch.randn(6, 3), SGD(0.1)))
    stepper.step(torch.randn(6, 3))
    before = held(stepper)
    with pytest.raises(Diverged, match="a running statistic of batch norm is not finite"):
        stepper.step(1e30 * torch.randn(6, 3))
    assert same(before, held(stepper))


class Remembering(nn.Module):
    """Buffers that are changed in place, replaced, and large: all by the forward pass."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("book", torch.zeros(finite.SMALL, 3))
        self.register_buffer("nothing", None)

    def forward(self, x):
        self.count += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.book[0].lerp_(x.detach().mean(0), 0.5)
        return self.linear(x)


def test_every_kind_of_buffer_is_put_back():
    model = Remembering()
    stepper = Stepper(Task(model, lambda m, x: m(x).square().mean(), torch.randn(6, 3), SGD(0.1)))
    stepper.step(torch.randn(6, 3))
    before, mean = held(stepper), model.mean
    with pytest.raises(Diverged):
        stepper.step(torch.full((6, 3), math.nan))
    assert same(before, held(stepper)) and model.mean is mean
    assert set(model.state_dict()) == {"linear.weight", "linear.bias", "count", "mean", "book"}


def test_a_step_that_breaks_off_for_another_reason_leaves_statistics_alone_too():
    stepper = Stepper(task())
    before = held(stepper)

    def breaking(model, batch):
        loss(model, batch)
        raise KeyError("a label")

    stepper.task = stepper.task.with_(loss=breaking)
    with pytest.raises(KeyError):
        stepper.step(stepper.task.batch)
    assert same(before, held(stepper))


def test_the_copy_of_the_statistics_is_in_the_prediction():
    """One of 16 MB, so that nothing else could account for it."""
    norm = nn.BatchNorm1d(2**21)
    batch = torch.zeros(2, 2**21)
    made = Task(norm, lambda m, x: m(x).mean(), batch, SGD())
    without = profile(made.with_(model=nn.BatchNorm1d(2**21, track_running_stats=False)))
    statistics = norm.running_mean.nbytes + norm.running_var.nbytes
    for brief in (False, True):
        assert profile(made, brief=brief).peak_bytes - without.peak_bytes == pytest.approx(2 * statistics, rel=1e-3)


# -- optimizers in backward ------------------------------------------------------------------------------------
def chain(optimizer) -> Task:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    return Task(model, lambda m, x: m(x).square().mean(), torch.randn(6, 3), optimizer)


@pytest.mark.parametrize("optimizer", [SGD(0.1), SGD(0.1, 0.9), Adam()], ids=str)
def test_where_gradients_are_used_up_the_last_of_them_is_found_before_it_is_used(optimizer):
    """It is the first layer's; the others were used, so the optimizer refuses to go on or to be saved."""
    lean = apply(chain(optimizer), Plan(optimizer="no-gradient"))
    first = lean.model[0].weight.detach().clone()
    lean.model[0].weight.register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(Diverged, match=r"gradient of 0.weight is not finite; [45] others had been applied"):
        lean.step(lean.task.batch)
    assert torch.equal(first, lean.model[0].weight)
    assert all(p.isfinite().all() for p in lean.model.parameters())
    for go_on in (lambda: lean.step(lean.task.batch), lean.stepper.optimizer.state_dict):
        with pytest.raises(ShoestringError, match="between two updates"):
            go_on()


def test_where_the_first_gradient_is_bad_nothing_was_used_up_and_the_run_may_go_on():
    lean = apply(chain(Adam()), Plan(optimizer="no-gradient"))
    before = held(lean.stepper)

    def spoiled(model, batch):
        value = model(batch)
        value.register_hook(lambda gradient: gradient * math.inf)
        return value.square().mean()

    lean.stepper.task = lean.task.with_(loss=spoiled)
    with pytest.raises(Diverged, match="is not finite; the weights are as before"):
        lean.step(lean.task.batch)
    assert same(before, held(lean.stepper))
    lean.stepper.task = lean.task
    assert lean.step(lean.task.batch).isfinite()


def test_a_task_that_skips_keeps_its_gradients():
    with pytest.raises(ShoestringError, match="a step that may be skipped must see all"):
        apply(chain(Adam()).with_(on_nonfinite="skip"), Plan(optimizer="no-gradient"))


def test_a_word_that_is_not_known_is_refused():
    with pytest.raises(ShoestringError, match="on_nonfinite='ignore' is not known: use 'raise' or 'skip'"):
        task(on_nonfinite="ignore")


# -- runs -------------------------------------------------------------------------------------------------------
class Spoiled(Noise):
    """Noise of which some updates, from 1 on, meet a batch with a value that is not finite."""

    def __init__(self, bad, batches=4):
        super().__init__(batches)
        self.bad = bad

    def read(self, epoch, number):
        images, labels = super().read(epoch, number)
        if epoch * self.batches + number + 1 in self.bad:
            images[0, 0, 0, 0] = math.inf
        return images, labels


@pytest.mark.parametrize("plan", [{}, {"precision": "bf16"}, {"nonzero": 50}], ids=str)
def test_a_run_stops_with_its_weights_and_statistics_as_the_last_good_update_left_them(tmp_path, plan):
    good, bad = (apply(task(), Plan(**plan)) for _ in range(2))
    train(good, Noise(4), updates=6)
    with pytest.raises(Diverged, match=r"update 7, learning rate 0.05; the save of update 4 is good") as error:
        train(bad, Spoiled({7}), epochs=3, run=tmp_path / "run")
    assert error.value.exit_code == 5
    for name, value in good.model.state_dict().items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(bad.model.state_dict()[name])), name


def test_a_run_that_skips_goes_on_logs_why_and_is_resumed_to_the_bit(tmp_path):
    how = {"epochs": 2, "evaluation": right_answers()}
    whole = task(on_nonfinite="skip")
    train(whole, Spoiled({3, 6}), run=tmp_path / "whole", **how)
    log = (tmp_path / "whole" / "log.jsonl").read_text().splitlines()
    assert sum('"skipped": "the loss is nan' in line for line in log) == 2 and "NaN" not in "".join(log)

    class Killed(Exception):
        pass

    def kill(event):
        if getattr(event, "update", 0) == 6:
            raise Killed

    with pytest.raises(Killed):
        train(task(on_nonfinite="skip"), Spoiled({3, 6}), run=tmp_path / "run", listeners=[kill], **how)
    resumed = task(on_nonfinite="skip")
    train(resumed, Spoiled({3, 6}), run=tmp_path / "run", resume=True, **how)
    assert same(whole.model.state_dict().values(), resumed.model.state_dict().values())
    assert log == (tmp_path / "run" / "log.jsonl").read_text().splitlines()


def test_a_run_that_would_skip_for_ever_stops():
    with pytest.raises(Diverged, match=f"{finite.MOST_SKIPPED} steps in a row were skipped, the last because the loss"):
        train(task(on_nonfinite="skip"), Spoiled(range(3, 1000)), epochs=100)


@pytest.mark.parametrize(
    "poison, words",
    [
        (lambda lean: lean.model.head.bias.data.fill_(math.inf), "weights are"),
        (lambda lean: lean.model.blocks[0].norm.running_var.fill_(math.nan), "statistics of batch norm are"),
        (lambda lean: [s["exp_avg_sq"].fill_(math.inf) for s in lean.stepper.optimizer.state.values()], "state is"),
    ],
)
def test_nothing_that_is_not_finite_follows_a_good_save(tmp_path, poison, words):
    lean = apply(task(Adam()), Plan())

    def spoil(event):
        if getattr(event, "update", 0) == 8 and hasattr(event, "loss"):
            poison(lean)

    with pytest.raises(Diverged, match=f"{words} no longer finite at update 8.*the save of update 4 is good"):
        train(lean, Noise(4), epochs=3, run=tmp_path / "run", listeners=[spoil])
    (save,) = (tmp_path / "run" / "saves").iterdir()
    assert save.name.endswith("4")
