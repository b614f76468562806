"""What is kept of saved tensors by rules: which tensors a rule takes, in what form, and what comes back."""

import errno
import gc
import os

import pytest
import torch
import torch.nn.functional as F
from runs import distance, run
from torch import nn
from torch._subclasses import FakeTensor

from shoestring import SGD, Plan, ShoestringError, Task, apply
from shoestring.errors import NoEffect
from shoestring.techniques import activations as saved
from shoestring.techniques.activations import Rule, SavedPass, Settings, rehearsals
from shoestring.techniques.activations.codecs import Half, OnDisk, Spill
from shoestring.techniques.technique import Risk

WIDTH, ROWS = 64, 512  # a map is 128 KB
MAP = 4 * WIDTH * ROWS


class Net(nn.Module):
    """Two linear layers, each with an activation, and a normalisation between them."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.norm = nn.LayerNorm(WIDTH)
        self.second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid())

    def forward(self, x):
        return self.second(self.norm(self.first(x)))


def task(model=None, rows=ROWS):
    torch.manual_seed(0)
    return Task(model or Net(), lambda m, b: m(b).square().mean(), torch.randn(rows, WIDTH), SGD(lr=0.1))


def gradients(task):
    return run(task, 1).gradients[0]


def spilled(rules, loss, model=None):
    """Runs a forward pass under rules -> the bytes in the file, and how many tensors were taken."""
    model = model or nn.Module()
    with SavedPass(Settings(rules).parsed)(model) as saver:
        kept = loss()
        keeper = saver.stores["offload"]
        assert kept is not None
        return keeper.args[0].end, saver.taken


# -- words ----------------------------------------------------------------------------------------------------------
def test_a_plans_words_are_rules_in_order():
    settings = Settings("blocks.*=offload, head:softmax=half,whole")
    assert settings.parsed == (
        Rule("blocks.*", "*", "offload"),
        Rule("head", "softmax", "half"),
        Rule("*", "*", "whole"),
    )
    assert Settings(":softmax=half").parsed == (Rule("*", "softmax", "half"),)
    assert Settings("masks").masks
    assert not Settings("masks").parsed


@pytest.mark.parametrize("text", ["zip", "blocks.*=zip", "", "offload,"])
def test_an_unknown_codec_is_refused_with_those_that_exist(text):
    with pytest.raises(ShoestringError, match=r"there is no codec .*: use offload, half, masks"):
        apply(task(), Plan(activations=text))


def test_a_module_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(ShoestringError, match=r"no module 'third\.\*' .* its modules are first, first\.0"):
        apply(task(), Plan(activations="third.*=offload"))


def test_the_risk_is_that_of_the_worst_codec():
    assert saved.risk(task(), "offload") == saved.risk(task(), "masks") == Risk.EXACT
    assert saved.risk(task(), "first=half,offload") == Risk.APPROXIMATE


def test_where_nothing_large_is_saved_it_has_no_effect():
    with pytest.raises(NoEffect, match=r"for its backward pass has 65\.54 KB, the least"):
        apply(task(rows=8), Plan(activations="offload"))


def test_a_rule_for_an_operation_that_saves_nothing_has_no_effect():
    with pytest.raises(NoEffect):
        apply(task(), Plan(activations=":conv2d=offload"))


# -- what is taken --------------------------------------------------------------------------------------------------
def test_rules_choose_by_module():
    model, x = Net(), torch.randn(ROWS, WIDTH)
    assert spilled("first=offload", lambda: model(x), model) == (0, 0)  # the container itself saves nothing
    assert spilled("first.*=offload", lambda: model(x), model) == (MAP, 1)  # tanh's output; x is the caller's
    assert spilled("second.*=offload", lambda: model(x), model) == (2 * MAP, 2)  # the linear's input, sigmoid's output


def test_rules_choose_by_operation():
    model, x = Net(), torch.randn(ROWS, WIDTH)
    assert spilled(":tanh=offload", lambda: model(x), model) == (MAP, 1)
    assert spilled("*:linear=offload", lambda: model(x), model) == (MAP, 1)
    assert spilled("second.0:linear=offload", lambda: model(x), model) == (MAP, 1)
    assert spilled("first.0:linear=offload", lambda: model(x), model) == (0, 0)


def test_the_first_rule_that_fits_decides():
    model, x = Net(), torch.randn(ROWS, WIDTH)
    assert (
        spilled("second.*=whole,offload", lambda: model(x), model)[1] == 2
    )  # tanh's output, for tanh and for the norm


def test_a_tensor_that_two_operations_save_is_in_the_file_once():
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    y = x * 2
    assert spilled("offload", lambda: (y.tanh(), y.sin(), y.cos())) == (2 * MAP, 3)  # tanh's output, and y once


def test_what_the_model_holds_and_is_called_with_stays():
    model, x = nn.Linear(WIDTH, 2 * ROWS), torch.randn(ROWS, WIDTH)
    assert model.weight.nbytes >= saved.SMALL_BYTES
    assert spilled("offload", lambda: F.linear(x.requires_grad_(), model.weight.t().t()), model)[0] == MAP
    assert spilled("offload", lambda: model(x.detach()), model) == (0, 0)


def test_of_a_view_the_smaller_is_kept_the_view_or_its_base():
    base = torch.randn(4, ROWS, WIDTH, requires_grad=True) * 1
    assert spilled("offload", lambda: base[1].sin()) == (MAP, 1)  # a quarter of the base
    assert spilled("offload", lambda: base.transpose(0, 1).sin()) == (4 * MAP, 1)
    row = torch.randn(ROWS, WIDTH, requires_grad=True) * 1
    assert spilled("offload", lambda: row.expand(8, ROWS, WIDTH).sin()) == (MAP, 1)  # the base is an eighth


def test_views_come_back_with_their_strides():
    x = torch.randn(ROWS, WIDTH)
    with SavedPass(Settings("offload").parsed)(nn.Module()) as saver:
        back = saver.keep(x.t()).take()
    assert torch.equal(back, x.t())
    assert back.stride() == x.t().stride()


def test_a_small_view_does_not_hold_its_base():
    x = torch.randn(ROWS, WIDTH)
    with SavedPass(Settings("offload").parsed)(nn.Module()) as saver:
        back = saver.keep(x[0]).take()
    assert torch.equal(back, x[0])
    assert back.untyped_storage().nbytes() == 4 * WIDTH


# -- what comes back ------------------------------------------------------------------------------------------------
def test_a_step_that_pages_out_has_the_same_bits():
    plain, lean = gradients(task()), gradients(apply(task(), Plan(activations="offload")).task)
    assert all(torch.equal(a, b) for a, b in zip(plain, lean, strict=True))


def test_a_step_in_16_bits_is_near():
    plain, lean = gradients(task()), gradients(apply(task(), Plan(activations="half")).task)
    assert 0 < distance(lean, plain) < 1e-3


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int64", "bool"])
@pytest.mark.parametrize("form", ["whole", "strided", "permuted"])
def test_every_type_and_layout_comes_back_from_the_file(tmp_path, dtype, form):
    x = (torch.randn(50, 30, 20) * 3).to(getattr(torch, dtype))
    x = {"whole": x, "strided": x[:, ::2, 3:9], "permuted": x.permute(2, 0, 1)}[form]
    spill = Spill(str(tmp_path))
    first, second = OnDisk(spill, x), OnDisk(spill, x.flip(0))
    assert torch.equal(first.take(), x)
    assert torch.equal(second.take(), x.flip(0))
    spill.file.close()


def test_values_beyond_fp16_are_kept_in_bf16():
    x = torch.tensor([1.0, 1e6, -3e38])
    torch.testing.assert_close(Half(x).take(), x, rtol=0.01, atol=0)
    assert Half(torch.tensor([1.0, 60000.0])).copy.dtype == torch.float16


def test_masks_keep_a_bit_and_the_gradients_to_the_bit():
    def model():
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.ReLU(), nn.Dropout(0.1))

    lean = apply(task(model()), Plan(activations="masks")).task
    assert saved.saved_bytes(lean) < 0.5 * saved.saved_bytes(task(model()))
    torch.manual_seed(0)
    plain_model, lean_model = model(), model()
    lean_model.load_state_dict(plain_model.state_dict())
    plain, found = gradients(task(plain_model)), gradients(apply(task(lean_model), Plan(activations="masks")).task)
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


def test_masks_without_relu_or_dropout_have_no_effect():
    with pytest.raises(NoEffect, match=r"Net would save .* no ReLU or dropout"):
        apply(task(), Plan(activations="masks"))


def test_masks_beside_checkpointing_have_no_effect():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3)))
    with pytest.raises(NoEffect, match="already"):
        apply(task(model), Plan(checkpoint="residual-1", activations="masks"))


def test_what_a_region_keeps_goes_to_the_file_too():
    def blocks():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))

    lean = apply(task(blocks()), Plan(checkpoint="residual-1", activations="offload")).task
    assert rehearsals.saved(lean).taken == 4  # three blocks' inputs (the first one's is the caller's), and the square's
    plain, found = gradients(task(blocks())), gradients(lean)
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


# -- files ----------------------------------------------------------------------------------------------------------
def test_the_file_has_no_name_and_is_gone_after_the_pass(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    model, x = Net(), torch.randn(ROWS, WIDTH)
    with SavedPass(Settings("offload").parsed)(model) as saver:
        loss = model(x).sum()
        assert not list(tmp_path.iterdir())
        loss.backward()
    assert saver.stores["offload"].args[0].file.closed


def test_a_full_disk_is_told_and_the_next_step_works(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    lean = apply(task(), Plan(activations="offload"))
    real, left = os.pwrite, [MAP]

    def pwrite(file, data, offset):
        """A disk with room for one map; it takes what fits, as a real one does."""
        fits = min(left[0], len(data))
        left[0] -= fits
        if not fits:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data[:fits], offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(ShoestringError, match=f"activations to {tmp_path}.*free: No space left.*TMPDIR"):
        lean.step(lean.task.batch)
    left[0] = 10**12
    assert torch.isfinite(lean.step(lean.task.batch))


def test_a_folder_that_is_missing_is_told(monkeypatch):
    monkeypatch.setenv("TMPDIR", "/nowhere/at/all")
    with pytest.raises(ShoestringError, match="cannot offload activations to /nowhere/at/all"):
        apply(task(), Plan(activations="offload"))


def test_a_file_that_ends_early_is_told(tmp_path):
    spill = Spill(str(tmp_path))
    kept = OnDisk(spill, torch.ones(1000))
    os.ftruncate(spill.file.fileno(), 100)
    with pytest.raises(ShoestringError, match="the file ends early"):
        kept.take()
    spill.file.close()


@pytest.mark.parametrize("codec", ["offload", "half", ":linear=int4"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_a_look_at_what_would_be_saved_leaves_no_graph_behind(precision, codec):
    apply(task(), Plan(precision=precision, activations=codec))
    before = fakes()
    apply(task(), Plan(precision=precision, activations=codec))
    assert fakes() == before


def fakes():
    gc.collect()
    return sum(isinstance(one, FakeTensor) for one in gc.get_objects())
