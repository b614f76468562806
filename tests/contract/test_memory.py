"""The peak that is predicted is the peak that is measured, whatever the model and the plan."""

import pytest
from runs import measured_peak
from table import CELLS, PLANS, task

from shoestring import apply, profile
from shoestring.measuring.calibration import calibrate, load_cache
from shoestring.planning.search import Representative


def predicted_peak(task):
    """The trace with the scratch of PyTorch's operators as calibrated; at most two pieces of a shape are traced."""
    task, known = task.with_(split=Representative(task.split)), load_cache()
    traced = profile(task, workspace=known)
    if all(str(signature) in known for signature in traced.signatures):
        return traced.peak_bytes
    return profile(task, workspace=calibrate(traced.signatures)).peak_bytes


@pytest.mark.parametrize(("model", "plan"), CELLS)
def test_the_predicted_peak_is_the_measured_one(model, plan):
    lean = apply(task(model), PLANS[plan][1]).task
    predicted, measured = predicted_peak(lean), measured_peak(lean)
    assert predicted == pytest.approx(measured, rel=0.02)
