"""The peak that is predicted is the peak that is measured, whatever the model and the plan."""

import pytest
from table import CELLS, STATELESS, lean

from metering import measured, predicted
from shoestring.planning.search import Representative


@pytest.mark.parametrize(("model", "plan"), CELLS)
def test_the_predicted_peak_is_the_measured_one(model, plan):
    task = lean(model, plan)
    traced = task.with_(split=Representative(task.split))  # at most two pieces of one shape: the rest looks the same
    steps = 1 if task.optimizer == STATELESS else 2
    assert predicted(traced, steps).peak_bytes == pytest.approx(measured(task, steps).peak_bytes, rel=0.02)
