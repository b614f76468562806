"""Results of a study as files: ours beside the paper's, and trials that another store takes over."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from shoestring.errors import ShoestringError
from shoestring.records import read_object
from shoestring.reporting.page.data import study_data
from shoestring.reporting.pareto_figure import front, trained_points
from shoestring.reporting.results import index_text, write_results
from shoestring.reporting.results_figure import results_figure
from shoestring.studies.jobs import Store, identify
from shoestring.studies.results import import_results, report, steps, trials
from shoestring.studies.runner import memory_job, training_jobs
from shoestring.studies.study import load, names, parse

DOCS = Path(__file__).parents[2] / "docs" / "results"

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
    trained, measured_steps = trials(study, "small", store, data), steps(study, "small", store)
    return write_results(tmp_path / "results", study, found, trained, measured_steps)


def test_the_page_has_the_papers_figures_beside_ours_what_differs_and_the_verdicts(tmp_path, study, data):
    page = written(tmp_path, study, data)[2].read_text()
    assert "| dense | 4.10 | 4.10 | 94.00 ± 0.10 | 80.10 ± 0.20 | 2 |" in page
    assert "| sparse | 1.90 | 1.90 | 93.00 | 78.50 | 1 |" in page
    assert "Trained 2 epochs on cifar-10, images averaged to 16 x 16; the paper trained 200 epochs on cifar-10" in page
    assert "CPU: a CPU." in page and "confirmed: sparse costs less than two points" in page


def test_rows_that_were_trained_at_other_learning_rates_say_so(tmp_path, study, data):
    alike = written(tmp_path, study, data)[2].read_text()
    dense, sparse = study.rows
    study = replace(study, rows=(dense, replace(sparse, settings=sparse.settings | {"lr_multiplier": 4})))
    other = written(tmp_path / "other", study, data)[2].read_text()
    assert "learning rate" not in alike.lower() and "Learning rates are the recipe's times" in other
    assert "| sparse | 1.90 | 1.90 | x 4 |" in other


def test_a_study_that_asks_for_it_shows_the_quality_after_each_epoch(tmp_path, study, data):
    assert len(written(tmp_path, study, data)) == 4
    *_, page, _, curves = written(tmp_path, replace(study, by_epoch=True), data)
    assert curves.name == "two.small.epochs.svg" and f"]({curves.name})" in page.read_text()
    assert "dense: 50.00, 80.20; sparse: 50.00, 78.50." in curves.read_text()


def test_a_study_that_asks_for_it_shows_the_quality_by_memory_and_what_none_beats(tmp_path, study, data):
    *_, page, _, picture = written(tmp_path, replace(study, pareto=True), data)
    assert picture.name == "two.small.pareto.svg" and f"]({picture.name})" in page.read_text()
    assert "sparse: 1.9 MB, 78.50; dense: 4.1 MB, 80.10." in picture.read_text()


def test_the_front_has_the_rows_that_no_smaller_one_beats():
    rows = [
        {"label": label, "measured_bytes": size, "quality": {"accuracy": accuracy} if accuracy else {}}
        for label, size, accuracy in
        [("large", 9, 80.0), ("small", 1, 70.0), ("worse", 5, 69.0), ("untrained", 2, None), ("middle", 4, 75.0),
         ("as good", 6, 75.0), ("not measured", None, 99.0)]
    ]  # fmt: skip
    points = trained_points(rows, "accuracy")
    assert [row["label"] for row in points] == ["small", "middle", "worse", "as good", "large"]
    assert [row["label"] for row in front(points, "accuracy")] == ["small", "middle", "large"]


def test_the_papers_bytes_are_not_put_beside_those_of_smaller_images(tmp_path, study, data):
    store = finished(tmp_path, study, data)
    found = report(study, "small", store, data)
    assert found["smaller"] and [row["rules_bytes"] for row in found["rows"]] == [None, None]
    _, picture, page, _ = write_results(tmp_path / "results", study, found, [])
    assert "| predicted, MB | heap, MB |" in page.read_text() and "for the paper's sizes see" in page.read_text()
    assert "paper's rules" not in page.read_text() + picture.read_text()
    assert [row["paper_bytes"] for row in study_data(found)["rows"]] == [None, None]
    assert [row["paper_bytes"] for row in study_data(found | {"smaller": False})["rows"]] == [4e6, 2e6]


def test_a_study_about_flops_shows_them(tmp_path, study):
    row = {"label": "a", "settings": {}, "paper": {}, "quality": {}, "rules_bytes": 4_000_000,
           "predicted_bytes": 4_000_000, "measured_bytes": 4_000_000, "seeds": [], "failed": []}  # fmt: skip
    other = row | {"label": "b", "settings": {"checkpoint": "no-bn"}, "rules_flops_ratio": 1.311}
    rows = [row | {"rules_flops_ratio": 1.0, "flops_ratio": 1.0}, other]
    claim = {"claim": "b adds 30%", "metric": "rules_flops_percent", "row": "b", "paper": 30.0, "percent": 5.0}
    about = replace(study, quality="", claims=[claim])
    found = {"scale": "memory", "smaller": False, "rows": rows, "claims": []}
    _, picture, page, _ = write_results(tmp_path, about, found, [])
    assert "| b | 4.00 | 4.00 | 4.00 | 1.311x |  |" in page.read_text()
    assert "% more FLOPs" in picture.read_text()


def measured(tmp_path, study, size=4_000_000):
    """The report of a study at the scale `memory`, everything measured."""
    store = Store(tmp_path / "store")
    for row in study.rows:
        store.adopt(
            memory_job(study, row, None), {"rules_bytes": None, "predicted_bytes": size, "measured_bytes": size}
        )
    return report(study, "memory", store)


def test_a_study_of_the_parts_of_memory_shows_them_and_judges_their_shares(tmp_path):
    study, store = load("figure1"), Store(tmp_path / "store")
    parts = {"model": 5_000_000, "optimizer": 11_000_000, "activations": 384_000_000}
    sizes = dict.fromkeys(("rules_bytes", "predicted_bytes", "measured_bytes"), 400_000_000)
    counted = sizes | {"rules_parts": parts, "predicted_parts": parts | {"activations": 10_000_000}}
    store.adopt(memory_job(study, study.rows[0], None), counted)
    found = report(study, "memory", store)
    _, picture, page, _ = write_results(tmp_path, study, found, [])
    assert "| plain | 404.8 | 400.0 | 400.0 | 400.0 | 5.00 | 11.00 | 384.0 | 5.00 | 11.00 | 10.00 |" in page.read_text()
    verdicts = {claim["metric"]: (claim["verdict"], claim["ours"]) for claim in found["claims"]}
    assert verdicts["rules_activations_percent"] == ("confirmed", pytest.approx(96.0))
    assert verdicts["predicted_activations_percent"] == ("not confirmed", pytest.approx(1000 / 26))
    assert "activations 384.00 MB" in picture.read_text()


def test_rows_that_differ_in_their_schedule_alone_have_one_step_to_measure_and_are_shown_once(tmp_path):
    for name, shown in (("table6", 7), ("table7", 4), ("table8", 1), ("table9", 1)):
        study = load(name)
        assert len({identify(memory_job(study, row, None)) for row in study.rows}) == shown
        found = measured(tmp_path / name, study)
        _, picture, page, _ = write_results(tmp_path / "results", study, found, [])
        assert page.read_text().count("| 4.00 | 4.00 |") == shown
        assert "Rows that have the same step are one." in page.read_text()
        assert "lr_multiplier" not in picture.read_text() and "rewire_" not in picture.read_text()
    assert len(found["rows"]) == 36  # the data has all of them


def test_rules_of_one_paper_are_not_called_those_of_another(tmp_path):
    study = load("head-to-head")
    found = measured(tmp_path, study)
    found["rows"][0]["rules_bytes"] = 404_800_000
    _, picture, page, _ = write_results(tmp_path, study, found, [])
    assert "rules" not in page.read_text() + picture.read_text()


def test_columns_without_a_figure_are_left_out(tmp_path, study):
    _, _, page, _ = write_results(tmp_path, study, measured(tmp_path, study), [])
    assert "|  | paper, MB | predicted, MB | heap, MB | paper: accuracy |\n" in page.read_text()
    assert "counted by the paper's rules" not in page.read_text()


def test_a_step_that_could_not_be_measured_is_told_with_the_reason(tmp_path, study):
    store = Store(tmp_path / "store")
    store.add(memory_job(study, study.rows[1], None))
    store.claim([identify(memory_job(study, study.rows[1], None))], "me").fail("the disk was full")
    _, _, page, _ = write_results(tmp_path, study, report(study, "memory", store), [])
    assert "## Failed\n- sparse: the disk was full" in page.read_text()


def test_the_index_has_every_study_and_what_of_it_is_recorded(tmp_path):
    study = load("figure5")
    index = write_results(tmp_path / "results", study, measured(tmp_path, study), [])[3].read_text()
    assert "| [memory](figure5.memory.md): 4 rows | `shoestring study run figure5` |" in index
    for name in names():
        assert f"`shoestring study run {name}`" in index
    assert index.count("nothing yet") == len(names()) - 1
    assert index.index("| Figure 9 |") < index.index("| Figure 10 |")


def test_the_index_of_our_results_is_what_the_command_writes():
    assert (DOCS / "README.md").read_text() == index_text(DOCS)


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


def test_the_figure_has_its_title_whole_plain_numbers_and_no_name_of_what_it_does_not_show(tmp_path, study):
    pytest.importorskip("matplotlib")
    row = {"paper": {}, "quality": {}, "rules_bytes": 404_000_000, "measured_bytes": 399_000_000}
    rows = [row | {"label": "a name that is as long as some of ours are"}, row | {"label": "b"}]
    long = replace(study, title="Accuracy by the percentage of nonzeros, WRN-28-2 on CIFAR-10, and by others")
    results_figure(tmp_path / "a.svg", long, {"scale": "full", "rows": rows, "smaller": False})
    text = (tmp_path / "a.svg").read_text()
    assert f"<title>{long.place}: {long.title}</title>" in text and "Measured heap: a name" in text
    assert ">400</text>" in text and ">0</text>" in text and "times" not in text and ">paper<" not in text
    texts = [float(place) for place in re.findall(r"text-anchor: (?:start|end)[^>]*?translate\((-?[\d.]+)", text)]
    assert all(place >= 0 for place in texts)


def test_another_store_takes_trials_and_measured_steps_over_once(tmp_path, study, data):
    path, other = written(tmp_path, study, data)[0], Store(tmp_path / "other")
    kept = read_object(path.read_bytes())
    assert import_results(path, other) == len(kept["trials"]) + len(kept["steps"]) == 3 + len(study.rows)
    assert import_results(path, other) == 0
    again = report(study, "small", other, data)
    assert again["rows"][0]["quality"]["accuracy"] == pytest.approx(80.1)
    assert again == {key: value for key, value in kept.items() if key not in ("trials", "steps")}


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"trials": [1]}', b'{"trials": [{"job": {}}]}', b'{"trials": [], "steps": 1}']
)
def test_a_file_that_holds_no_results_is_refused(tmp_path, content):
    path = tmp_path / "results.json"
    path.write_bytes(content)
    with pytest.raises(ShoestringError, match=r"is no results file \(.+\): make one with `shoestring study report"):
        import_results(path, Store(tmp_path / "store"))
