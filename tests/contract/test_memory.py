"""The peak that is predicted is the peak that is measured, whatever the model and the plan."""

import pytest
from table import CELLS, STATELESS, lean

from metering import measured
from shoestring import profile
from shoestring.measuring import calibrated


@pytest.mark.parametrize(("model", "plan"), CELLS)
def test_the_predicted_peak_is_the_measured_one(model, plan):
    task = lean(model, plan)
    predicted = calibrated(lambda table: profile(task, table, brief=True))
    steps = 1 if task.optimizer == STATELESS else 2
    assert predicted.peak_bytes == pytest.approx(measured(task, steps).peak_bytes, rel=0.02)
