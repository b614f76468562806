"""Loops of one's own: `lean.backward(batch)`, then `lean.optimizer.step()`, with schedulers and clipping between."""

import copy
import io
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import lr_scheduler

from shoestring import SGD, Adam, Plan, ShoestringError, Task, apply

BATCH = torch.linspace(-2, 3, 48).view(8, 6), torch.arange(8) % 3
PLANS = {
    "plain": Plan(),
    "microbatch": Plan(microbatch=3),
    "checkpoint": Plan(checkpoint="every-2"),
    "8bit": Plan(optimizer="8bit", microbatch=4),
    "fp16": Plan(precision="fp16", microbatch=4),
    "bf16": Plan(precision="bf16"),
    "no-gradient": Plan(optimizer="no-gradient"),
    "sparse": Plan(nonzero={"nonzero": 50, "updates": 6}),
}


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0].float()), batch[1])


def a_task(optimizer=None, **changes):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
    )
    return Task(model, loss, BATCH, optimizer or Adam(lr=0.05), microbatches=True, **changes)


def a_lean(plan, optimizer=None, **changes):
    return apply(a_task(optimizer, **changes), PLANS[plan] if isinstance(plan, str) else plan)


def weights_of(lean):
    return {name: tensor.clone() for name, tensor in lean.model.state_dict().items()}


def same(one, other):
    torch.testing.assert_close(weights_of(one), weights_of(other), rtol=0, atol=0)


# -- the two halves ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("optimizer", [Adam(lr=0.05), SGD(lr=0.1, momentum=0.9)], ids=["adam", "sgd"])
def test_the_halves_of_a_step_are_the_step(plan, optimizer):
    whole, halves = a_lean(plan, optimizer), a_lean(plan, optimizer)
    for _ in range(4):
        expected = whole.step(BATCH)
        found = halves.backward(BATCH)
        assert found == expected
        halves.optimizer.step()
    same(whole, halves)


def test_pytorchs_own_loop_gives_the_same_numbers():
    lean, plain = a_lean("plain", lambda p: torch.optim.AdamW(p, lr=0.01)), a_task().model
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for _ in range(3):
        lean.optimizer.zero_grad()
        lean.backward(BATCH)
        clip_grad_norm_(lean.model.parameters(), 0.5)
        lean.optimizer.step()
        theirs.zero_grad()
        loss(plain, BATCH).backward()
        clip_grad_norm_(plain.parameters(), 0.5)
        theirs.step()
    torch.testing.assert_close(lean.model.state_dict(), plain.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("plan", ["plain", "microbatch", "8bit", "fp16"])
def test_batches_before_a_step_add_up_by_their_weights(plan):
    """Two calls of half weight leave twice the half of the gradient: the update of one call."""
    once, twice = a_lean(plan), a_lean(plan)
    once.backward(BATCH)
    twice.backward(BATCH, weight=0.5)
    twice.backward(BATCH, weight=0.5)
    for one, other in zip(once.model.parameters(), twice.model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-2, atol=1e-6 if plan != "fp16" else 1.0)
    twice.optimizer.step()
    assert all(parameter.grad is None for parameter in twice.model.parameters())


def test_gradients_are_there_to_be_read_between_the_halves():
    lean = a_lean("microbatch")
    lean.backward(BATCH)
    assert all(parameter.grad is not None for parameter in lean.model.parameters())


def test_zero_grad_drops_a_batch_that_is_not_to_be_learned():
    one, other = a_lean("microbatch"), a_lean("microbatch")
    one.backward((BATCH[0] * 7, BATCH[1]))
    one.optimizer.zero_grad()
    one.backward(BATCH)
    one.optimizer.step()
    other.step(BATCH)
    torch.testing.assert_close(dict(one.model.named_parameters()), dict(other.model.named_parameters()), rtol=0, atol=0)


def test_a_step_without_gradients_says_what_is_missing():
    with pytest.raises(ShoestringError, match=r"call lean.backward\(batch\)"):
        a_lean("plain").optimizer.step()


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, math.nan])
def test_a_weight_that_is_none_is_refused(weight):
    with pytest.raises(ShoestringError, match="weighted by"):
        a_lean("plain").backward(BATCH, weight)


def test_a_backward_that_fails_leaves_nothing_behind():
    lean = a_lean("microbatch")
    before = weights_of(lean)
    with pytest.raises(IndexError):
        lean.backward((BATCH[0], BATCH[1] + 100))
    torch.testing.assert_close(weights_of(lean), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in lean.model.parameters())
    lean.step(BATCH)


# -- schedulers ----------------------------------------------------------------------------------------------------
SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=8),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("plan", ["plain", "8bit", "fp16", "no-gradient"])
def test_a_scheduler_of_torch_drives_the_learning_rate(plan, scheduler, recwarn):
    lean, plain = a_lean(plan), torch.optim.Adam(a_task().model.parameters(), lr=0.05)
    ours, theirs = (SCHEDULERS[scheduler](optimizer) for optimizer in (lean.optimizer, plain))
    for _ in range(4):
        lean.backward(BATCH)
        lean.optimizer.step()
        plain.step()
        ours.step()
        theirs.step()
        assert ours.get_last_lr() == theirs.get_last_lr() == [group["lr"] for group in lean.optimizer.param_groups]
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]


def test_a_learning_rate_of_zero_changes_no_weight_and_that_of_a_group_is_its_own():
    def groups(named_parameters):
        parameters = list(named_parameters)
        first, rest = [p for n, p in parameters if n.startswith("0.")], [p for n, p in parameters if n[:2] != "0."]
        return torch.optim.AdamW([{"params": first, "lr": 0.1, "weight_decay": 0.5}, {"params": rest, "lr": 0.2}])

    lean = a_lean(Plan(optimizer="8bit"), groups)
    lean.optimizer.param_groups[0]["lr"] = 0.0
    before = weights_of(lean)
    lean.backward(BATCH)
    lean.optimizer.step()
    after = weights_of(lean)
    moved = [name for name in before if name.endswith("weight") and not torch.equal(before[name], after[name])]
    assert moved == ["1.weight", "3.weight", "5.weight"]


# -- clipping ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("plan", ["plain", "microbatch", "8bit", "bf16", "fp16", "sparse"])
@pytest.mark.parametrize("largest", [0.01, 1e9])
def test_clipping_between_the_halves_is_the_tasks_clipping(plan, largest):
    mine, tasks = a_lean(plan, SGD(0.1, 0.9)), a_lean(plan, SGD(0.1, 0.9), clip=largest)
    for _ in range(2):
        mine.backward(BATCH)
        norm = mine.clip_grad_norm_(largest)
        mine.optimizer.step()
        tasks.step(BATCH)
    assert 0.01 < norm < 10  # not that of a loss multiplied by 65,536
    torch.testing.assert_close(weights_of(mine), weights_of(tasks))


@pytest.mark.parametrize("clip", [lambda p: clip_grad_norm_(p, 1.0), lambda p: clip_grad_value_(p, 0.1)])
def test_torchs_clipping_of_gradients_that_hold_a_loss_scale_is_refused(clip):
    lean = a_lean("fp16")
    before = weights_of(lean)
    lean.backward(BATCH)
    clip(lean.model.parameters())
    with pytest.raises(ShoestringError, match=r"65,536 times too large .* lean.clip_grad_norm_"):
        lean.optimizer.step()
    torch.testing.assert_close(weights_of(lean), before, rtol=0, atol=0)
    lean.backward(BATCH)
    lean.optimizer.step()


@pytest.mark.parametrize(
    "read",
    [
        lambda lean: clip_grad_norm_(lean.model.parameters(), 1.0),
        lambda lean: clip_grad_norm_(lean.model.parameters(), 1.0, foreach=False),
        lambda lean: clip_grad_value_(lean.model.parameters(), 0.1),
        lambda lean: lean.clip_grad_norm_(1.0),
        lambda lean: [parameter.grad.norm() for parameter in lean.model.parameters()],
    ],
    ids=["norm", "norm, one by one", "value", "ours", "logged"],
)
def test_gradients_that_were_used_up_in_the_backward_pass_are_refused_with_the_reason(read):
    lean, other = a_lean("no-gradient"), a_lean("no-gradient")
    lean.backward(BATCH)
    with pytest.raises(ShoestringError, match=r"no-gradient .* Task\(clip"):
        read(lean)
    lean.optimizer.step()
    other.step(BATCH)
    same(lean, other)
    assert all(parameter.grad is None for parameter in lean.model.parameters())


def test_a_second_backward_after_gradients_were_used_up_is_refused():
    lean = a_lean("no-gradient")
    lean.backward(BATCH)
    with pytest.raises(ShoestringError, match="second backward"):
        lean.backward(BATCH)
    with pytest.raises(ShoestringError, match="cannot be dropped"):
        lean.optimizer.zero_grad()


# -- skipped updates -----------------------------------------------------------------------------------------------
def test_an_overflow_halves_the_loss_scale_and_is_told():
    lean = a_lean("fp16")
    before, scale = weights_of(lean), lean.stepper.scale
    scale.value = 2.0**24
    lean.backward((BATCH[0] * 100, BATCH[1]))
    lean.optimizer.step()
    assert "overflowed at a loss scale" in lean.skipped and scale.value == 2.0**23
    torch.testing.assert_close(weights_of(lean), before, rtol=0, atol=0)
    scale.value = 2.0**10
    lean.backward(BATCH)
    lean.optimizer.step()
    assert not lean.skipped


def test_a_batch_that_is_not_finite_makes_the_whole_update_one_that_is_skipped():
    lean = a_lean("microbatch", on_nonfinite="skip")
    before = weights_of(lean)
    lean.backward(BATCH, 0.5)
    assert lean.backward((BATCH[0] * math.nan, BATCH[1]), 0.5).isnan()
    assert lean.backward(BATCH, 0.5).isnan()
    lean.optimizer.step()
    assert "not finite" in lean.skipped or "nan" in lean.skipped
    torch.testing.assert_close(weights_of(lean), before, rtol=0, atol=0)


# -- as an optimizer -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("plan", ["plain", "8bit", "fp16", "sparse"])
def test_a_loop_resumes_from_the_state_dicts_of_model_and_optimizer(plan):
    """With torch.save and torch.load(weights_only=True), as loops do, to the same bits."""
    through, first = a_lean(plan), a_lean(plan)
    for lean in (through, first):
        for _ in range(3):
            lean.step(BATCH)
    file = io.BytesIO()
    torch.save({"model": first.model.state_dict(), "optimizer": first.optimizer.state_dict()}, file)
    second = a_lean(plan)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second.model.load_state_dict(saved["model"])
    second.optimizer.load_state_dict(saved["optimizer"])
    for lean in (through, second):
        for _ in range(4):
            lean.step(BATCH)
    same(through, second)


def test_the_state_of_a_plain_optimizer_is_taken_too():
    plain = torch.optim.Adam(a_task().model.parameters(), lr=0.3)
    lean = a_lean("plain")
    lean.optimizer.load_state_dict(plain.state_dict())
    assert lean.optimizer.param_groups[0]["lr"] == 0.3


def test_it_is_an_optimizer_with_hooks_and_closures():
    lean, seen = a_lean("8bit"), []
    lean.optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    lean.optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    value = lean.optimizer.step(lambda: lean.backward(BATCH))
    assert isinstance(lean.optimizer, torch.optim.Optimizer) and seen == ["before", "after"] and value > 0
    assert lean.optimizer is lean.optimizer and lean.optimizer.state


def adds(optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


@pytest.mark.parametrize("wrong", [copy.deepcopy, adds])
def test_what_an_optimizer_of_a_plan_cannot_do_is_refused(wrong):
    with pytest.raises(ShoestringError, match=r"state_dict|was not planned"):
        wrong(a_lean("plain").optimizer)


def test_the_loop_of_the_page_runs():
    page = Path(__file__).parents[2] / "docs" / "integrations" / "own_loop.md"
    (code,) = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    found: dict = {}
    exec(code, found)
    assert found["value"] < 2.3 and found["scheduler"].get_last_lr() == pytest.approx([0.0])
