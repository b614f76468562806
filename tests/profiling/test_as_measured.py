"""Predicted = measured: tensors, scratch and their peak, for the kinds of models that users bring."""

import gc

import pytest
import torch
from exact_models import convolutions, layers, words

import zoo
from metering import measured, predicted
from shoestring import Plan, apply, builtin

BUILTIN = {
    "resnet18": lambda: builtin("resnet18", batch=2),
    "vit-tiny": lambda: builtin("vit-tiny", batch=2),
    "dynamicconv-iwslt": lambda: builtin("dynamicconv-iwslt", tokens=60),
}


def wrn():
    return builtin("wrn-10-1", batch=8)


def assert_as_predicted(task):
    prediction, reading = predicted(task), measured(task)
    assert prediction.tensor_peak_bytes == pytest.approx(reading.tensor_peak_bytes, rel=0.01)
    assert prediction.workspace_peak_bytes == pytest.approx(reading.workspace_peak_bytes, rel=0.1, abs=1000)
    assert prediction.peak_bytes == pytest.approx(reading.peak_bytes, rel=0.01)


@pytest.mark.parametrize("make", [*zoo.ZOO, wrn], ids=lambda make: make.__name__)
def test_the_predicted_peak_is_the_measured_one(make):
    assert_as_predicted(make())


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILTIN)
def test_the_predicted_peak_of_a_built_in_model_is_the_measured_one(name):
    assert_as_predicted(BUILTIN[name]())


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("make", [layers, words, lambda **how: convolutions(norm=torch.nn.BatchNorm2d, **how)])
def test_the_predicted_peak_is_the_measured_one_to_the_byte_if_the_pass_is_cut_into_regions(make, precision):
    """Small models, in which a widened bias, a generator's state or what a cycle keeps of the last pass is seen."""
    task = apply(make(examples=64), Plan(checkpoint="every-2", precision=precision)).task
    assert predicted(task).peak_bytes == pytest.approx(measured(task).peak_bytes, abs=16)


def test_a_pass_in_regions_leaves_no_cycle_that_keeps_tensors():
    task = convolutions(norm=torch.nn.BatchNorm2d, examples=16)
    lean = apply(task, Plan(checkpoint="every-2"))
    for _ in range(2):
        lean.step(task.batch)
    gc.collect()
    gc.disable()
    try:
        before = _tensors()
        lean.step(task.batch)
        assert _tensors() == before
    finally:
        gc.enable()


def _tensors() -> int:
    return sum(isinstance(one, torch.Tensor) for one in gc.get_objects())
