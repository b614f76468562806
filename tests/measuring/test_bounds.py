"""Scratch that cannot be measured here is bounded: never less than what the call is found to need elsewhere."""

from math import prod

import pytest
import torch
from torch import nn

import shoestring
from shoestring import SGD, Task
from shoestring.measuring import calibration
from shoestring.measuring.allocator import measure_allocator
from shoestring.measuring.bounds import bounds_of
from shoestring.measuring.calibration import calibrate, load_cache
from shoestring.profiling import profile
from shoestring.rates import Rates
from shoestring.signature import Bound, signature_of

aten = torch.ops.aten
RATES = Rates(1e11, 8e10, 1e10, 1e-5)


@pytest.fixture(autouse=True)
def fresh_cache_and_one_thread(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch.set_num_threads(1)  # put back by the fixture of all tests


@pytest.fixture
def little_memory(monkeypatch):
    """A machine on which no call can be made."""
    monkeypatch.setattr(calibration, "memory_left_bytes", lambda: 4)


def image_model(**how):
    layers = [nn.Conv2d(3, 16, 3, **how), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2, groups=4)]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(2), nn.Flatten())


class Last(nn.Module):
    """A recurrent layer's outputs alone."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


MODELS = {
    "images": lambda: (image_model(padding=1), torch.randn(4, 3, 20, 20)),
    "wide kernels": lambda: (nn.Conv2d(8, 4, 7, dilation=2), torch.randn(2, 8, 32, 32)),
    "channels last": lambda: (image_model().to(memory_format=torch.channels_last), torch.randn(4, 3, 20, 20)),
    "transposed": lambda: (nn.ConvTranspose2d(8, 16, 4, stride=2), torch.randn(2, 8, 12, 12)),
    "volumes": lambda: (nn.Conv3d(2, 8, 3), torch.randn(2, 2, 8, 8, 8)),
    "sound": lambda: (nn.Conv1d(4, 8, 9), torch.randn(2, 4, 400)),
    "half precision": lambda: (nn.Conv2d(8, 8, 3, dtype=torch.bfloat16), torch.randn(2, 8, 24, 24).bfloat16()),
    "attention": lambda: (nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), torch.randn(4, 40, 32)),
    "lstm": lambda: (Last(nn.LSTM(32, 64, batch_first=True)), torch.randn(8, 20, 32)),
    "gru": lambda: (Last(nn.GRU(16, 32, batch_first=True)), torch.randn(64, 3, 16)),
    "upsampling": lambda: (nn.Sequential(nn.Conv2d(3, 4, 1), nn.Upsample(scale_factor=2, mode="bilinear")),
                           torch.randn(2, 3, 16, 16)),
}  # fmt: skip


def task(name):
    model, batch = MODELS[name]()
    return Task(model, lambda model, batch: model(batch).float().square().mean(), batch, SGD())


@pytest.mark.parametrize("name", MODELS)
def test_no_call_of_a_step_needs_more_than_its_bound(name):
    calls = calibration.calibrated(lambda table: profile(task(name), table)).signatures
    measured = load_cache()
    assert len(measured) > len(calls) / 2, "most can be made"
    bounds = {key: size for call in calls for key, size in bounds_of(call).items()}
    assert [key for key, size in measured.items() if size > bounds.get(key, 0)] == []


@pytest.mark.parametrize("name", MODELS)
def test_a_profile_on_a_machine_that_can_measure_nothing_is_no_less_than_what_a_run_takes(name, little_memory):
    bounded = shoestring.profile(task(name))
    assert any("could not be made here: bounds of up to" in words for words in bounded.unseen)
    made = task(name)

    def step():
        made.loss(made.model, made.batch).backward()

    reading = measure_allocator(step, held=[*made.model.parameters(), *made.model.buffers(), made.batch])
    assert bounded.peak_bytes >= reading.peak_bytes
    assert bounded.workspace_peak_bytes > 0


def test_a_plan_counts_scratch_that_could_not_be_measured(little_memory):
    made = task("images")
    tensors = profile(made).peak_bytes
    plan = shoestring.plan(made, tensors * 40, rates=RATES)
    assert plan.predicted_bytes["workspace"] > 0


def test_no_plan_is_given_that_fits_only_without_scratch_that_could_not_be_measured(little_memory):
    made = task("images")
    tensors = profile(made).peak_bytes
    with pytest.raises(shoestring.NoPlanFits):
        shoestring.plan(made, round(tensors * 1.02), rates=RATES, risk="exact")


def test_a_view_moves_nothing_and_needs_nothing():
    call = signature_of(aten.view.default, [torch.empty(100, 100), [10000]])
    assert bounds_of(call) == {str(call): 0}


def test_a_call_with_an_argument_that_cannot_be_written_down_is_bounded_by_the_others():
    indices, values = torch.zeros(1, 500, dtype=torch.int64), torch.zeros(500, 64)
    sparse = torch.sparse_coo_tensor(indices, values, (1000, 64), check_invariants=False)
    call = signature_of(aten.add_.Tensor, [torch.empty(1000, 64), sparse])
    bound = calibrate([call])[str(call)]
    assert isinstance(bound, Bound) and bound >= prod((1000, 64)) * 4 + values.numel() * 4
