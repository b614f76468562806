"""Results of a study as files: ours beside the paper's, and trials that another store takes over."""

import json

import pytest

from shoestring.errors import ShoestringError
from shoestring.reporting.results import write_results
from shoestring.studies.jobs import Store
from shoestring.studies.results import import_results, report, trials
from shoestring.studies.runner import memory_job, training_jobs
from shoestring.studies.study import parse

TEXT = """
title = "Two rows"
paper = "sohoni"
place = "Table 99"
model = "wrn-10-1"
quality = "accuracy"
[[rows]]
label = "dense"
seeds = [0, 1]
paper = {memory_mb = 4.0, accuracy = 94.0, interval = 0.1}
[[rows]]
label = "sparse"
nonzero = 30
paper = {memory_mb = 2.0, accuracy = 93.0}
[scales.small]
epochs = 2
image = 16
[scales.full]
epochs = 200
[[claims]]
claim = "sparse costs less than two points"
metric = "accuracy"
row = "sparse"
minus = "dense"
paper = -1.0
at_least = -2.0
"""


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    (folder / "data_batch_1.bin").write_bytes(b"1")
    return str(tmp_path)


@pytest.fixture
def study():
    return parse(TEXT, "two", "two.toml")


def finished(tmp_path, study, data):
    """A store in which everything of the study is done but one seed."""
    store, scale = Store(tmp_path / "store"), study.scale("small")
    for row, size in zip(study.rows, (4_100_000, 1_900_000), strict=True):
        store.adopt(
            memory_job(study, row, scale), {"rules_bytes": size, "predicted_bytes": size, "measured_bytes": size}
        )
        for job in training_jobs(study, row, scale, data)[:2]:
            quality = 80.0 - 1.5 * study.rows.index(row) + 0.2 * job["seed"]
            store.adopt(job, {"quality": quality, "by_epoch": [50.0, quality], "updates": 1000, "seconds": 60.0,
                              "environment": {"cpu_model": "a CPU"}})  # fmt: skip
    return store


def written(tmp_path, study, data):
    store = finished(tmp_path, study, data)
    found = report(study, "small", store, data)
    return write_results(tmp_path / "results", study, found, trials(study, "small", store, data))


def test_the_page_has_the_papers_figures_beside_ours_what_differs_and_the_verdicts(tmp_path, study, data):
    page = written(tmp_path, study, data)[2].read_text()
    assert "| dense | 4 | 4.10 | 4.10 | 4.10 | 94.00 ± 0.10 | 80.10 ± 0.20 | 2 |" in page
    assert "| sparse | 2 | 1.90 | 1.90 | 1.90 | 93.00 | 78.50 | 1 |" in page
    assert "Trained 2 epochs on cifar-10, images averaged to 16 x 16; the paper trained 200 epochs on cifar-10" in page
    assert "CPU: a CPU." in page and "confirmed: sparse costs less than two points" in page


def test_the_data_has_every_trial_with_its_settings_seed_and_memory(tmp_path, study, data):
    found = json.loads(written(tmp_path, study, data)[0].read_text())
    assert [(trial["settings"], trial["seed"], trial["accuracy"]) for trial in found["trials"]] == [
        ({}, 0, 80.0),
        ({}, 1, 80.2),
        ({"nonzero": 30}, 0, 78.5),
    ]
    assert [trial["measured_bytes"] for trial in found["trials"]] == [4_100_000, 4_100_000, 1_900_000]
    assert all(trial["epochs"] == 2 and trial["by_epoch"][0] == 50.0 for trial in found["trials"])


def test_the_figure_is_drawn_and_the_same_results_give_the_same_file(tmp_path, study, data):
    picture = written(tmp_path, study, data)[1].read_text()
    assert "<svg" in picture
    assert written(tmp_path, study, data)[1].read_text() == picture


def test_another_store_takes_the_trials_over_once(tmp_path, study, data):
    path, other = written(tmp_path, study, data)[0], Store(tmp_path / "other")
    assert (import_results(path, other), import_results(path, other)) == (3, 0)
    assert report(study, "small", other, data)["rows"][0]["quality"]["accuracy"] == pytest.approx(80.1)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"trials": [1]}', b'{"trials": [{"job": {}}]}'])
def test_a_file_that_holds_no_results_is_refused(tmp_path, content):
    path = tmp_path / "results.json"
    path.write_bytes(content)
    with pytest.raises(ShoestringError, match="is no results file: make one with `shoestring study report"):
        import_results(path, Store(tmp_path / "store"))
