"""Predicted = measured: tensors, scratch and their peak, for the kinds of models that users bring."""

import pytest

import zoo
from metering import measured, predicted
from shoestring import builtin

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
