"""Study files: those that there are say what the papers printed, and a mistake is named with its key and line."""

import pytest

from shoestring import ShoestringError
from shoestring.paper import paper_profile
from shoestring.studies import runner
from shoestring.studies.plans import plan_of
from shoestring.studies.study import load, names, parse

GOOD = """title = "t"
paper = "sohoni"
place = "Table 0"
model = "wrn-10-1"
batch = 10
quality = "accuracy"

[[rows]]
label = "a"

[[rows]]
label = "b"
microbatch = 5

[scales.small]
epochs = 1

[[claims]]
claim = "b is no worse"
metric = "accuracy"
row = "b"
minus = "a"
at_least = 0.0
"""


def wrong(before: str, after: str) -> str:
    """A mistake in a good file -> what is said of it."""
    assert before in GOOD
    with pytest.raises(ShoestringError) as refusal:
        parse(GOOD.replace(before, after, 1), "mine", "mine.toml")
    return str(refusal.value)


@pytest.mark.parametrize("name", names())
def test_every_study_that_is_shipped_is_read(name):
    study = load(name)
    assert study.rows and study.title and study.claims
    if study.quality:
        assert {"small", "full"} <= set(study.scales)


def test_every_table_and_figure_of_the_report_has_its_study():
    figures = {f"figure{n}" for n in (1, 3, 4, 5, 6, 7, 8, 9, 10)}
    assert figures | {f"table{n}" for n in (2, 3, 4, 6, 7, 8, 9)} <= set(names())


def test_the_uncompressed_row_beside_compressed_activations_is_trained_by_the_dense_jobs_of_table_3(monkeypatch):
    monkeypatch.setattr(runner, "find_data", lambda name, root: name)
    monkeypatch.setattr(runner, "fingerprint", lambda folder: "0")

    def jobs(name, label, scale):
        study = load(name)
        (row,) = [row for row in study.rows if row.label == label]
        return runner.training_jobs(study, row, study.scales[scale], None)

    for scale in ("small", "full"):
        assert jobs("accuracy-compressed", "uncompressed", scale) == jobs("table3", "dense FP32", scale)
        assert [job["seed"] for job in jobs("accuracy-compressed", "int4", scale)] == [0, 1, 2]


def test_what_changes_no_gradient_of_a_translation_network_is_measured_but_may_be_left_out_of_its_training(monkeypatch):
    monkeypatch.setattr(runner, "find_data", lambda name, root: name)
    monkeypatch.setattr(runner, "fingerprint", lambda folder: "0")
    study = load("figure9")
    row, scale = study.rows[0], study.scales["small"]
    measured, trained = runner.memory_job(study, row, scale), runner.training_jobs(study, row, scale, None)[0]
    assert measured["settings"] == {"checkpoint": "residual-1", "microbatch": 250, **trained["settings"]}
    assert runner.training_jobs(study, row, study.scales["full"], None)[0]["settings"] == measured["settings"]


@pytest.mark.parametrize("name", ["memory-by-pool", "accuracy-compressed"])
def test_rows_of_the_second_paper_change_what_is_stored_and_nothing_else(name):
    study = load(name)
    plain, *rest = study.rows
    assert study.paper == "barley" and "activations" not in plain.settings
    for row in (row for row in rest if row.label != "100x"):  # which has all other techniques beside
        assert row.settings == plain.settings | {"activations": row.label}
        assert plan_of(row.settings, 100).techniques() == {"activations": row.label}


def test_a_good_file_is_read():
    study = parse(GOOD, "mine", "mine.toml")
    assert [row.label for row in study.rows] == ["a", "b"]
    assert study.rows[1].settings == {"microbatch": 5}
    assert study.scales["small"].seeds == (0,)


def test_a_grid_is_every_combination_over_the_defaults():
    text = (
        GOOD[: GOOD.index("[[rows]]")]
        + '[defaults]\nprecision = "fp16"\n[grid]\nnonzero = [100, 30]\nmicrobatch = [10, 5]\n'
    )
    rows = parse(text, "mine", "mine.toml").rows
    assert [row.label for row in rows][:2] == ["nonzero 100, microbatch 10", "nonzero 100, microbatch 5"]
    assert rows[3].settings == {"precision": "fp16", "nonzero": 30, "microbatch": 5}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("microbatch = 5", "microbach = 5", "mine.toml, line 13: microbach is not known in rows"),
        ("microbatch = 5", 'microbatch = "5"', "line 13: microbatch of rows is '5', and must be int"),
        ("microbatch = 5", "microbatch = true", "line 13: microbatch of rows is True, and must be int"),
        ('label = "b"', 'label = "a"', "label 'a' is there twice"),
        ('paper = "sohoni"', 'paper = "me"', "line 2: paper is 'me': use sohoni or barley"),
        ('place = "Table 0"', "", "place is missing"),
        ("epochs = 1", "epochs = 0", "line 16: epochs of small is 0"),
        ("epochs = 1", "", "small needs either epochs or updates"),
        ("epochs = 1", "epochs = 1\nseeds = [0, 0]", "seeds are [0, 0]: give different whole numbers"),
        ("epochs = 1", 'epochs = 1\nuntrained = ["microbatch"]', "untrained are ['microbatch']: give"),
        ("epochs = 1", 'epochs = 1\ntokens = 9\nuntrained = [["microbatch"]]', "some of checkpoint, microbatch"),
        ("[scales.small]", "[scales.huge]", "huge is no scale that is trained"),
        ('row = "b"', 'row = "c"', "row 'c' of a claim is no label of a row"),
        ("at_least = 0.0", "", "does not say how it is judged"),
        ('quality = "accuracy"', 'quality = "speed"', "quality is 'speed': use accuracy or bleu"),
        ("[[rows]]", "[grid]\nnonzero = []\n[[rows]]", "give either rows or a grid"),
        ('title = "t"', "title = ", "mine.toml is not TOML"),
    ],
)
def test_a_mistake_is_named_with_its_key_and_line(before, after, said):
    assert said in wrong(before, after)


def test_an_impossible_grid_is_refused():
    text = GOOD[: GOOD.index("[[rows]]")] + "[grid]\nnonzero = []\n"
    with pytest.raises(ShoestringError, match="line 9: nonzero of the grid is an empty list"):
        parse(text, "mine", "mine.toml")


def test_the_rows_of_table_3_are_the_papers_to_the_printed_digit():
    for row in load("table3").rows:
        settings = {"batch": 100} | row.settings
        assert round(paper_profile("wrn-28-2", **settings).peak_bytes / 1e6, 1) == row.paper["memory_mb"], row.label


def test_the_rows_of_table_4_are_the_papers_within_1_percent():
    for row in load("table4").rows:
        counted = paper_profile("dynamicconv-iwslt", tokens=4000, **row.settings).peak_bytes / 1e6
        assert counted == pytest.approx(row.paper["memory_mb"], rel=0.01), row.label
