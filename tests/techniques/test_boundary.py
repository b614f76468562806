"""A model in 16 bits is a module like any other: whatever of it is called, in a step or not, takes and gives FP32."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shoestring
from shoestring import SGD, Plan, Task, apply, builtin, train
from shoestring.ambient import Ambient
from shoestring.passes.boundary import CastInputs, CastOutputs
from shoestring.passes.mode import hooked_modules
from shoestring.training.evaluate import Evaluation, mean_loss
from shoestring.training.resumable import as_data

FORMS = {"fp16": torch.float16, "bf16": torch.bfloat16}
NEAR = {"fp16": 5e-3, "bf16": 5e-2}


class Mixed(nn.Module):
    """Every norm, recurrence, attention, convolution; FP32 is made on the way; keywords go in and a dict comes out."""

    def __init__(self):
        super().__init__()
        self.conv, self.batch = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.group, self.instance = nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, affine=True)
        self.layer, self.rms = nn.LayerNorm(8), nn.RMSNorm(8)
        self.lstm, self.attention = nn.LSTM(8, 8, batch_first=True), nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, images, *, shift=0.0):
        x = self.instance(self.group(F.relu(self.batch(self.conv(images))))).mean(2).transpose(1, 2)
        x = self.rms(self.layer(x))
        x = x + self.lstm(x)[0]
        x = x + self.attention(x, x, x, need_weights=False)[0]
        pooled = x.mean(1) + torch.linspace(0, 1, 8)  # FP32
        return {"scores": self.head(pooled) + shift, "pooled": (pooled, "words")}


class Coder(nn.Module):
    """Parts that a loss may call, and methods that call layers one by one, one with an embedding's own weight."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(3))
        self.head = nn.Linear(16, 20)

    def forward(self, ids):
        x = self.encoder(self.embed(ids))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def scores(self, ids):
        x = self.encoder(self.embed(ids))
        for block in self.blocks:
            x = x + block(x)
        return F.linear(x, self.embed.weight)


def by_model(model, ids):
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def by_parts(model, ids):
    """The parts are called one by one, on FP32 that the loss made."""
    noise = torch.linspace(-1, 1, 16)
    x = model.encoder(F.one_hot(ids % 16, 16).float() + noise)
    assert x.dtype == torch.float32
    for block in model.blocks:
        x = x + block(x)
    scores = model.head(x)
    assert scores.dtype == torch.float32
    return F.cross_entropy(scores.flatten(0, 1), ids.flatten())


def by_method(model, ids):
    return F.cross_entropy(model.scores(ids).float().flatten(0, 1), ids.flatten())


IDS = torch.randint(20, (6, 7), generator=torch.Generator().manual_seed(0))


def coder(loss=by_model, **plan):
    torch.manual_seed(0)
    return apply(Task(Coder(), loss, IDS, SGD(0.05)), Plan(**plan))


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("form", FORMS)
def test_outside_a_step_the_model_answers_in_fp32_and_nearly_as_before(form, mode):
    torch.manual_seed(0)
    model, images = Mixed(), torch.randn(4, 3, 8, 8)
    wanted = getattr(copy.deepcopy(model), mode)()(images, shift=torch.ones(5))
    lean = apply(Task(model, lambda m, x: m(x)["scores"].mean(), images, SGD()), Plan(precision=form))
    found = getattr(lean.model, mode)()(images, shift=torch.ones(5))
    assert lean.model.head.weight.dtype == FORMS[form]
    for a, b in ((found["scores"], wanted["scores"]), (found["pooled"][0], wanted["pooled"][0])):
        torch.testing.assert_close(a, b, rtol=0, atol=NEAR[form])  # and FP32, as it was
    found["scores"].sum().backward()
    assert all(p.grad is not None for p in lean.model.parameters())
    lean.model.zero_grad()
    assert lean.step(images).isfinite()


WAYS = [
    (loss, plan)
    for loss in (by_model, by_parts, by_method)
    for plan in ({}, {"checkpoint": "residual-1"}, {"microbatch": 2}, {"nonzero": 50})
    if not (loss is by_method and "nonzero" in plan)  # a sparse embedding has no weight that could be read
]


@pytest.mark.parametrize(("loss", "plan"), WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_a_loss_may_call_the_model_its_parts_or_its_methods(form, loss, plan):
    wide, narrow = coder(loss, **plan), coder(loss, precision=form, **plan)
    expected, found = ([float(lean.step(IDS)) for _ in range(3)] for lean in (wide, narrow))
    assert found == pytest.approx(expected, rel=0.005) and found[-1] < found[0]


@pytest.mark.parametrize("form", FORMS)
def test_an_evaluation_of_the_users_own_runs_in_train_and_after_it(form):
    lean = coder(precision=form)
    seen = []

    def measure(model):
        seen.append(model.encoder(torch.ones(2, 16)).dtype)
        return float((model(IDS).argmax(-1) == IDS).float().mean())

    record = train(lean, [IDS, IDS], epochs=2, evaluation=Evaluation("accuracy", measure))
    assert record.finished and seen == [torch.float32] * 2
    with torch.no_grad():
        assert measure(lean.model.eval()) == pytest.approx(record.quality, abs=0.05)
        plain = float(by_model(lean.model, IDS))
    assert mean_loss(lean.task, as_data([IDS], 0))(lean.model) == pytest.approx(plain, rel=0.01)


def test_the_model_is_copied_pickled_loaded_and_named_as_before():
    lean = coder(precision="fp16")
    wanted = lean.model(IDS)
    for other in (copy.deepcopy(lean.model), pickle.loads(pickle.dumps(lean.model))):
        assert list(other.state_dict()) == list(Coder().state_dict())
        assert torch.equal(other(IDS), wanted)
        other.load_state_dict({name: torch.zeros_like(t) for name, t in lean.model.state_dict().items()})
        assert not other(IDS).any() and torch.equal(lean.model(IDS), wanted)
    plain = Coder()
    plain.load_state_dict(lean.model.state_dict())
    torch.testing.assert_close(plain(IDS), wanted, rtol=0, atol=5e-3)


def test_what_is_raised_inside_ends_the_call():
    lean = coder(precision="fp16")

    def fail(module, args):
        raise KeyError("in the middle")

    for place in (lean.model.blocks[1], lean.model.encoder[0], lean.model):
        with place.register_forward_pre_hook(fail), pytest.raises(KeyError):
            lean.model(IDS)
        assert Ambient.now().outside_call is None and lean.model(IDS).dtype == torch.float32


@pytest.mark.parametrize("call", [lambda lean: lean.model(IDS), lambda lean: lean.step(IDS)], ids=["call", "step"])
def test_after_an_interrupt_the_model_answers_in_fp32_and_trains_as_before(call):
    """PyTorch calls no hook for it: a step in a notebook may be stopped by Ctrl-C, and the next one begun."""

    def interrupt(module, args):
        raise KeyboardInterrupt

    left, other = coder(precision="fp16"), coder(precision="fp16")
    for place in ("blocks.1", "encoder.0", ""):
        with left.model.get_submodule(place).register_forward_pre_hook(interrupt), pytest.raises(KeyboardInterrupt):
            call(left)
        assert left.model(IDS).dtype == torch.float32 == left.step(IDS).dtype
        other.step(IDS)
    assert all(map(torch.equal, left.model.state_dict().values(), other.model.state_dict().values()))


class Tree(nn.Module):
    """A module that calls itself."""

    def __init__(self):
        super().__init__()
        self.linear, self.types = nn.Linear(4, 4), []

    def forward(self, x, depth=2):
        inner = self(x, depth - 1) + self(x, depth - 1) if depth else x
        self.types.append(inner.dtype)
        return self.linear(inner)


def test_a_module_that_calls_itself_has_one_boundary():
    model = Tree()
    lean = apply(Task(model, lambda m, x: m(x).square().mean(), torch.randn(3, 4), SGD()), Plan(precision="bf16"))
    lean.model.types.clear()
    assert lean.model(torch.randn(3, 4)).dtype == torch.float32
    assert lean.model.types == [torch.bfloat16] * 7


class Checkpointed(Coder):
    def forward(self, ids):
        x = self.encoder(self.embed(ids))
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def test_blocks_that_the_model_itself_runs_again_are_inside_when_they_do():
    def gradients(kind):
        torch.manual_seed(0)
        lean = apply(Task(kind(), by_model, IDS, SGD()), Plan(precision="bf16"))
        by_model(lean.model, IDS).backward()
        return [p.grad for p in lean.model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(gradients(Coder), gradients(Checkpointed), strict=True))


def test_there_is_one_boundary_and_none_is_taken_for_a_users_hook():
    """Also after the model was led back and made lean again."""
    task = builtin("wrn-10-1", batch=4, image=8)
    lean = apply(task, Plan(precision="fp16"))
    again = apply(task.with_(model=shoestring.plain(lean.model)), Plan(precision="bf16"))
    for module in again.model.modules():
        assert [type(hook) for hook in module._forward_pre_hooks.values()] == [CastInputs]
        assert [type(hook) for hook in module._forward_hooks.values()] == [CastOutputs]
    assert not hooked_modules(again.model)
    assert again.step(again.task.batch).isfinite()
