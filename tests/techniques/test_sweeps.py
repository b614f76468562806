"""Sweeps (checkpoint residual-M**): blocks run a few samples at a time, and give plain PyTorch's numbers."""

import copy
import gc

import pytest
import torch
from torch import nn

import shoestring
from shoestring import profile
from shoestring.errors import ShoestringError
from shoestring.kernels.norm import batch_norm_backward
from shoestring.ledger import Category, Phase
from shoestring.measuring.allocator import measure_allocator
from shoestring.models.images import classification_loss
from shoestring.models.resnet import ResNet18
from shoestring.passes import sweeps
from shoestring.planning.timing import work_of
from shoestring.step import Stepper
from shoestring.task import SGD, Task
from shoestring.techniques.activations.gradients import gradients
from shoestring.techniques.registry import apply_settings


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(sweeps, "PIECE_BYTES", 1)


def double_task(name="wrn-10-1", batch=5):
    task = shoestring.builtin(name, batch=batch, image=16)
    task.model.double()
    return task.with_(batch=(task.batch[0].double(), task.batch[1]))


def found(task, settings):
    """Gradients and buffers of one pass on a copy of the model."""
    copied = task.with_(model=copy.deepcopy(task.model))
    lean = apply_settings(copied, settings) if settings else copied
    return gradients(lean, task.batch), dict(lean.model.named_buffers())


@pytest.mark.parametrize("strategy", ["residual-1**", "residual-2**", "residual-3**"])
def test_gradients_and_buffers_are_plain_pytorchs(strategy):
    task = double_task()
    (plain, buffers), (swept, changed) = found(task, {}), found(task, {"checkpoint": strategy})
    assert plain.keys() == swept.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(swept[name], gradient, rtol=1e-10, atol=1e-12)
    for name, buffer in buffers.items():
        torch.testing.assert_close(changed[name], buffer, rtol=1e-12, atol=1e-12)


def test_blocks_with_norms_side_by_side_are_exact():
    model = ResNet18()
    model.blocks, model.fc = model.blocks[:3], nn.Linear(128, 10)  # the third has a norm in its shortcut
    batch = torch.randn(3, 3, 12, 12).double(), torch.tensor([0, 1, 2])
    task = Task(model.double(), classification_loss, batch, SGD(lr=0.1))
    (plain, _), (swept, _) = found(task, {}), found(task, {"checkpoint": "residual-1**"})
    for name, gradient in plain.items():
        torch.testing.assert_close(swept[name], gradient, rtol=1e-9, atol=1e-11)


def test_it_takes_less_memory_than_the_star_alone():
    peaks = {}
    for strategy in ("residual-2*", "residual-2**"):
        lean = apply_settings(shoestring.builtin("wrn-10-2", batch=8), {"checkpoint": strategy})
        stepper = Stepper(lean)
        stepper.step(lean.batch)
        peaks[strategy] = measure_allocator(lambda s=stepper, t=lean: s.step(t.batch)).peak_bytes
    assert peaks["residual-2**"] < peaks["residual-2*"]


def test_a_trace_that_runs_two_pieces_for_all_tells_the_same(monkeypatch):
    lean = apply_settings(shoestring.builtin("wrn-10-1", batch=7), {"checkpoint": "residual-2**"})
    quick = profile(lean, brief=True)
    monkeypatch.setattr(sweeps, "turns", lambda pieces: [(piece, 1) for piece in pieces])
    whole = profile(lean, brief=True)
    assert (quick.peak_bytes, quick.flops) == (whole.peak_bytes, whole.flops)
    assert len(quick.ledger.entries) < 0.7 * len(whole.ledger.entries)
    assert work_of(quick, lean).calls == pytest.approx(work_of(whole, lean).calls, rel=0.1)
    assert work_of(quick, lean).born_bytes == pytest.approx(work_of(whole, lean).born_bytes, rel=0.1)


def test_what_the_stem_made_is_freed_though_the_models_code_holds_it():
    """As an argument of the Sequential it would live as long as all blocks."""
    task = shoestring.builtin("wrn-10-1", batch=4)
    lean = apply_settings(task, {"checkpoint": "residual-2**"})
    alive = [entry for entry in profile(lean, brief=True).ledger.entries if entry.module == "conv"]
    first = next(entry for entry in alive if entry.phase == Phase.FORWARD and entry.bytes == 4 * 16 * 32 * 32 * 4)
    assert first.died is not None
    later = (e for e in profile(lean, brief=True).ledger.entries if e.module == "blocks.2" and e.phase == Phase.FORWARD)
    assert first.died < next(later).born


def test_pieces_are_as_small_where_a_block_widens_its_input(monkeypatch):
    sample = 32 * 32 * 32 * 4  # of the first block's output; its input is half as large
    monkeypatch.setattr(sweeps, "PIECE_BYTES", sample)
    task = shoestring.builtin("wrn-10-2", batch=4)
    entries = profile(apply_settings(task, {"checkpoint": "residual-1**"}), brief=True).ledger.entries
    made = (e.bytes for e in entries if e.module == "blocks.0.conv1" and e.category == Category.ACTIVATION)
    assert max(made) == sample


def test_a_pass_leaves_no_garbage():
    lean = apply_settings(shoestring.builtin("wrn-10-1", batch=4), {"checkpoint": "residual-2**"})
    stepper = Stepper(lean)
    stepper.step(lean.batch)
    gc.collect()
    gc.disable()
    try:
        stepper.step(lean.batch)
        assert gc.collect() == 0
    finally:
        gc.enable()


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.second(torch.dropout(torch.relu(self.first(x)), 0.5, True))


class Skipping(nn.Module):
    """What the first block returns is read again after the second."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
                                    for _ in range(3))  # fmt: skip

    def forward(self, x):
        first = self.blocks[0](self.stem(x))
        second = self.blocks[1](first)
        return (self.blocks[2](second) + first).mean((1, 2, 3))


def test_an_input_that_is_read_again_is_not_written_over():
    batch = (torch.randn(4, 3, 8, 8).double(),)
    task = Task(Skipping().double(), lambda model, batch: model(batch[0]).square().mean(), batch, SGD(lr=0.1))
    settings = {"strategy": "residual-1**", "blocks": ("blocks.*",)}
    (plain, _), (swept, _) = found(task, {}), found(task, {"checkpoint": settings})
    for name, gradient in plain.items():
        torch.testing.assert_close(swept[name], gradient, rtol=1e-10, atol=1e-12)


def test_a_block_that_draws_random_numbers_is_refused():
    model = nn.Sequential(nn.Linear(8, 8), Noisy(), Noisy())
    batch = (torch.randn(4, 8),)
    task = Task(model, lambda model, batch: model(batch[0]).square().mean(), batch, SGD(lr=0.1))
    with pytest.raises(ShoestringError, match="random numbers"):
        lean = apply_settings(task, {"checkpoint": {"strategy": "residual-1**", "blocks": ("1", "2")}})
        Stepper(lean).step(batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batch_norm_of_some_samples_with_known_sums_is_a_part_of_the_whole(dtype):
    x, grad = torch.randn(2, 6, 5, 4, 4, dtype=dtype).unbind()
    mean, invstd = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0).add(1e-5).rsqrt()
    whole, *sums = batch_norm_backward(grad, x, mean, invstd, relu=True)
    known = {"sums": torch.stack(sums), "count": 6 * 16}
    parts = [batch_norm_backward(g, p, mean, invstd, relu=True, **known)[0]
             for g, p in zip(grad.split(2), x.split(2), strict=True)]  # fmt: skip
    torch.testing.assert_close(torch.cat(parts), whole)


def test_gradients_add_up_in_8_bits():
    """The sum of ten microbatches' gradients is near the exact one, and the update uses it."""
    task = shoestring.builtin("wrn-10-1", batch=20)
    start = copy.deepcopy(task.model.state_dict())
    moved = {}
    for words in ("8bit", "8bit+8bit-gradient"):
        task.model.load_state_dict(start)
        lean = apply_settings(task, {"microbatch": 2, "optimizer": words})
        Stepper(lean).step(task.batch)
        moved[words] = torch.cat([(p.detach() - start[n]).flatten() for n, p in task.model.named_parameters()])
    exact, summed = moved.values()
    assert torch.cosine_similarity(exact, summed, 0) > 0.99
    assert not torch.equal(exact, summed)
    assert (summed.norm() / exact.norm()).item() == pytest.approx(1, abs=0.03)


class Coupled(nn.Module):
    """A block whose samples depend on each other, or that reads a parameter of another module."""

    def __init__(self, other=None):
        super().__init__()
        self.layer, self.other = nn.Linear(8, 8), [other]

    def forward(self, x):
        y = self.layer(x)
        return y - y.mean(0) if self.other[0] is None else y * self.other[0].weight.sum()


@pytest.mark.parametrize(("other", "reason"), [(None, "beside others"), (nn.Linear(8, 8), "of another module")])
def test_a_block_that_cannot_run_apart_is_refused(other, reason):
    model = nn.Sequential(nn.Linear(8, 8), *(Coupled(other) for _ in range(4)))
    task = Task(model, lambda model, x: model(x).square().mean(), torch.randn(6, 8), SGD(lr=0.1))
    with pytest.raises(ShoestringError, match=reason):
        lean = apply_settings(task, {"checkpoint": "residual-2**"})
        gradients(lean, task.batch)
