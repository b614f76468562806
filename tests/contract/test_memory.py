"""The peak that is predicted is the peak that is measured, whatever the model and the plan."""

import pytest
from table import CELLS, PLANS, task

from metering import measured, predicted
from shoestring import apply
from shoestring.planning.search import Representative


@pytest.mark.parametrize(("model", "plan"), CELLS)
def test_the_predicted_peak_is_the_measured_one(model, plan):
    lean = apply(task(model), PLANS[plan][1]).task
    traced = lean.with_(split=Representative(lean.split))  # at most two pieces of one shape: the rest looks the same
    assert predicted(traced).peak_bytes == pytest.approx(measured(lean).peak_bytes, rel=0.02)
