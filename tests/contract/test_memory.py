"""The peak that is predicted is the peak that is measured, whatever the model and the plan."""

import pytest
from table import CELLS, STATELESS, lean

from metering import measured, predicted


@pytest.mark.parametrize(("model", "plan"), CELLS)
def test_the_predicted_peak_is_the_measured_one(model, plan):
    task = lean(model, plan)
    steps = 1 if task.optimizer == STATELESS else 2
    assert predicted(task, brief=True).peak_bytes == pytest.approx(measured(task, steps).peak_bytes, rel=0.02)


@pytest.mark.parametrize(("model", "plan"), [("mlp", "8bit"), ("wrn", "everything"), ("gpt", "residual-2*")])
def test_a_brief_prediction_is_that_of_whole_steps(model, plan):
    task = lean(model, plan)
    assert predicted(task, brief=True).peak_bytes == pytest.approx(predicted(task).peak_bytes, rel=0.001)
