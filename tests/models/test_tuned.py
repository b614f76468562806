"""The learning rates of the paper's networks: those that it printed, and the nearest of them for other sizes."""

import pytest

from shoestring.models.tuned import learning_rate_multiplier
from shoestring.studies.plans import lr_multiplier


@pytest.mark.parametrize(("nonzero", "multiplier"), [(100, 1.0), (50, 2.0), (30, 4.0), (10, 8.0)])
def test_the_translation_network_of_the_paper_has_the_rates_of_table_7(nonzero, multiplier):
    assert learning_rate_multiplier("dynamicconv-iwslt", nonzero) == multiplier
    assert learning_rate_multiplier("dynamicconv-iwslt", nonzero, 512) == multiplier


@pytest.mark.parametrize(("width", "multiplier"), [(384, 1.0), (256, 2.0), (128, 4.0), (88, 4.0), (64, 4.0)])
def test_a_narrower_one_has_that_of_the_nearest_width(width, multiplier):
    assert learning_rate_multiplier("dynamicconv-iwslt", 100, width) == multiplier


def test_fewer_weights_never_learn_at_a_lower_rate():
    for widths in ((512, 128), (256, 64)):
        for more, less in ((100, 50), (50, 30), (30, 10)):
            rates = [learning_rate_multiplier("dynamicconv-iwslt", *size) for size in
                     ((more, widths[0]), (less, widths[0]), (less, widths[1]))]  # fmt: skip
            assert rates == sorted(rates)


def test_a_studys_job_learns_at_its_own_rate_or_at_that_of_its_width():
    job = {"model": "dynamicconv-iwslt", "settings": {"precision": "fp16"}, "sizes": {"tokens": 1000, "width": 128}}
    assert lr_multiplier(job) == 4.0
    assert lr_multiplier(job | {"settings": {"lr_multiplier": 0.5}}) == 0.5
    assert lr_multiplier(job | {"sizes": {"tokens": 4000}}) == 1.0
