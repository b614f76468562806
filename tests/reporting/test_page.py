import fcntl
import json

import pytest
from pages import FIDELITY, HOSTILE, MB, STORED, STUDY, Reader, long_ledger, profile_of, write_run

from shoestring import Plan, builtin
from shoestring.errors import ShoestringError
from shoestring.reporting.page import (
    MOST_BYTES,
    page_data,
    page_html,
    run_data,
    step_data,
    stored_data,
    study_data,
    with_fidelity,
)
from shoestring.reporting.page.data import thinned
from shoestring.techniques.registry import apply_settings


def read(data: dict) -> Reader:
    return Reader(page_html(data))


def said(run: dict) -> str:
    return " ".join([run["state"], *run["notes"]])


def test_a_page_is_one_whole_document_that_asks_the_network_for_nothing(tmp_path, ledger):
    page = read(page_data("a run", [run_data(write_run(tmp_path / "run", ledger))]))
    assert page.open == page.wrong == []
    addresses = [value for _, attributes in page.tags for name, value in attributes.items() if name in ("src", "href")]
    assert all(address.startswith(("#", "data:")) for address in addresses)
    policy = next(attributes["content"] for _, attributes in page.tags if "http-equiv" in attributes)
    assert "default-src 'none'" in policy
    assert {"title", "main", "h1", "nav"} <= {tag for tag, _ in page.tags}


def test_the_data_of_a_page_is_read_back_from_it(tmp_path, ledger):
    data = page_data("a run", [run_data(write_run(tmp_path / "run", ledger))], study_data(STUDY))
    assert read(data).data == json.loads(json.dumps(data))


def test_the_timeline_and_what_is_alive_add_up_to_the_same_peak(ledger):
    step = step_data(profile_of(ledger))
    at = step["peak_column"]
    assert sum(sizes[at] for sizes in step["parts"].values()) == step["totals"][at] == ledger.peak().bytes
    assert sum(row["bytes"] for row in step["alive"]) == sum(row["bytes"] for row in step["modules"]) == 213 * MB
    assert {(row["module"], row["operation"]) for row in step["alive"]} >= {("second", "threshold_backward")}


@pytest.mark.parametrize("columns", (3, 50, 600))
def test_a_long_trace_is_thinned_and_its_peak_is_kept(columns):
    ledger = long_ledger()
    step = step_data(profile_of(ledger), columns=columns)
    assert len(step["totals"]) == columns and step["events"] == ledger.time + 1
    assert max(step["totals"]) == step["totals"][step["peak_column"]] == 95 * MB
    assert step["spans"][-1]["end"] == columns


def test_of_very_many_storages_the_small_ones_are_summed_and_none_is_lost(ledger):
    from shoestring.ledger import Category, Phase

    for number in range(2000):
        ledger.birth(MB + number, Category.ACTIVATION, f"layer{number}", "mm", Phase.FORWARD)
    step = step_data(profile_of(ledger))
    assert len(step["alive"]) < 400
    assert sum(row["bytes"] for row in step["alive"]) == ledger.peak().bytes


def test_a_long_log_is_thinned_and_keeps_its_extremes_and_its_end():
    points = [(update, 100.0 if update == 777 else 1.0) for update in range(1, 10_001)]
    curve = thinned(points, 100)
    assert len(curve) == 100 and curve[-1]["x"] == 10_000
    assert max(point["high"] for point in curve) == 100.0 and min(point["low"] for point in curve) == 1.0
    assert thinned([]) == []


def test_a_page_of_two_long_runs_stays_under_its_limit(tmp_path):
    runs = [run_data(write_run(tmp_path / name, long_ledger(), updates=20_000)) for name in ("a", "b")]
    assert len(page_html(page_data("both", runs)).encode()) < MOST_BYTES / 2


def test_a_page_over_its_limit_is_refused_with_its_size():
    rows = [STUDY["rows"][0] | {"label": "x" * 3000}] * 1000
    with pytest.raises(ShoestringError, match=r"the page would have .* over 2,000,000"):
        page_html(page_data("large", study=study_data(STUDY | {"rows": rows})))


def test_nothing_in_a_run_folder_is_read_as_html_or_script(tmp_path, ledger):
    hostile = {"task": HOSTILE, "settings": {HOSTILE: HOSTILE}, "quality_name": HOSTILE}
    run = run_data(write_run(tmp_path / "run", ledger, **hostile))
    clean, page = read(page_data("a run", [run])), read(page_data(HOSTILE, [run]))
    assert page.open == page.wrong == []
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in clean.tags]
    assert page.data["runs"][0]["record"]["settings"] == {HOSTILE: HOSTILE}
    assert page.data["title"] == HOSTILE


def test_several_settings_of_a_technique_are_shown_as_the_command_line_says_them(tmp_path):
    techniques = {"nonzero": {"nonzero": 30, "method": "set", "layers": ["a", "b"]}, "microbatch": 10}
    folder = write_run(tmp_path / "run", settings={"updates": 4, "techniques": techniques})
    (folder / "plan.json").write_text(Plan(**techniques).to_json())
    data, words = run_data(folder), {"nonzero": "30,method=set,layers=a+b", "microbatch": 10}
    assert data["techniques"] == words and data["record"]["settings"] == {"updates": 4, "techniques": words}


def test_numbers_that_json_has_no_word_for_are_unknown(tmp_path):
    path = write_run(tmp_path / "run", quality=float("nan"), best_quality=float("inf"))
    record = read(page_data("a run", [run_data(path)])).data["runs"][0]["record"]
    assert record["quality"] is record["best_quality"] is None


def test_what_codecs_store_is_told_by_layer_with_its_bytes_before_and_after():
    task = builtin("wrn-10-1", batch=20)
    found = stored_data(apply_settings(task, {"activations": "blocks.1.*=int4,blocks.2.*=pool2"}))
    assert {(row["module"], row["operation"], row["codec"]) for row in found} == {
        (f"blocks.{block}.conv{number}", "conv2d", codec) for block, codec in ((1, "int4"), (2, "pool2"))
        for number in (1, 2)
    }  # fmt: skip
    assert all(row["stored_bytes"] == row["exact_bytes"] / 4 for row in found if row["codec"] == "pool2")
    assert all(1 / 8 < row["stored_bytes"] / row["exact_bytes"] < 1 / 6 for row in found if row["codec"] == "int4")
    assert stored_data(task) == stored_data(apply_settings(task, {"microbatch": 5})) == []


def test_a_measured_fidelity_stands_beside_the_layer_and_codec_that_it_is_of(tmp_path, ledger):
    run = run_data(write_run(tmp_path / "run", ledger))
    assert with_fidelity(run, FIDELITY) == 1
    assert [row.get("cosine") for row in run["steps"]["lean"]["stored"]] == [0.9987, None]


def test_a_run_that_was_killed_says_how_far_it_came(tmp_path, ledger):
    path = write_run(tmp_path / "run", ledger, updates=2, finished=False)
    with (path / "log.jsonl").open("a") as log:
        log.write('{"update": 3, "lo')  # killed in the middle of a line
    run = run_data(path)
    assert "not finished: it was stopped or killed after 2 of 4 updates" in said(run)
    assert "the last line of its log was cut off and is left out" in said(run)
    assert len(run["curves"]["loss"]) == 2 and run["steps"].keys() == {"plain", "lean"}
    read(page_data("killed", [run]))


def test_a_run_that_is_still_going_is_said_to_be(tmp_path):
    path = write_run(tmp_path / "run", updates=2, finished=False)
    with (path / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "still going: 2 of 4 updates" in run_data(path)["state"]
    assert "stopped or killed" in run_data(path)["state"]


def test_a_run_without_saves_log_record_or_steps_still_has_a_page(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / "plan.json").write_text("{")
    run = run_data(path)
    for words in ("no save", "record is not written", "no log", "its plan cannot be read", "a step is not shown"):
        assert words in said(run)
    assert read(page_data("empty", [run])).data["runs"][0]["steps"] == {}


OTHER_FORM = '{"version": 1, "settings": [], "task": 1, "environment": 0}'


@pytest.mark.parametrize("text", ("{", "[]", '{"version": 1}', OTHER_FORM))
def test_a_damaged_record_is_said_and_the_log_is_shown_all_the_same(tmp_path, text):
    path = write_run(tmp_path / "run")
    (path / "record.json").write_text(text)
    run = run_data(path)
    assert "record" in said(run) and len(run["curves"]["loss"]) == 4
    assert run["curves"]["quality_name"] == "accuracy"


CHANGES = (
    {"totals": []}, {"parts": {"model": [1]}}, {"parts": {"model": ["x"] * 9}}, {"peak": 1}, {"peak_column": 10**6},
    {"spans": [3]}, {"alive": 1}, {"modules": [{}]}, {"stored": [{}]}, {"stored": [STORED["lean"][0] | {"codec": 4}]},
)  # fmt: skip


@pytest.mark.parametrize("change", ("{", "[]", '{"lean": {}}', *CHANGES), ids=str)
def test_a_damaged_step_is_left_out_and_said(tmp_path, ledger, change):
    path = write_run(tmp_path / "run", ledger)
    damaged = change if isinstance(change, str) else json.dumps({"lean": step_data(profile_of(ledger)) | change})
    (path / "step.json").write_text(damaged)
    run = run_data(path)
    assert run["steps"] == {} and "step.json" in said(run)


def test_the_step_of_a_built_in_model_is_traced_again_where_the_run_left_none(tmp_path):
    path = write_run(tmp_path / "run", task="wrn-10-1", settings={"updates": 4, "batch": 20})
    run = run_data(path)
    assert run["steps"]["lean"]["peak"]["bytes"] < run["steps"]["plain"]["peak"]["bytes"]
    assert "traced again, without the scratch" in said(run)


@pytest.mark.parametrize("settings", ({"updates": 4}, {"updates": 4, "batch": 20}))
def test_a_task_that_cannot_be_made_again_is_said(tmp_path, settings):
    run = run_data(write_run(tmp_path / "run", task="mine", settings=settings))
    assert run["steps"] == {} and "mine cannot be rebuilt" in said(run)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ShoestringError, match="holds no run"):
        run_data(tmp_path)


def test_a_study_has_both_figures_of_each_row():
    study = study_data(STUDY)
    small, large = study["rows"][1:]
    assert (small["quality"], small["paper_quality"], small["paper_bytes"]) == (None, 92.0, 3e6)
    assert (large["quality"], large["quality_name"], large["measured_bytes"]) == (82.5, "accuracy", 40 * MB)


@pytest.mark.parametrize("found", ({}, {"rows": 3}, {"rows": [3]}, {"rows": [{}]}, {"rows": [], "claims": [1]}))
def test_what_is_no_report_of_a_study_is_refused(found):
    with pytest.raises(ShoestringError, match=r"is no report of a study: make one with"):
        study_data(found)


def test_a_page_says_why_less_was_measured_than_predicted(tmp_path):
    one = run_data(write_run(tmp_path / "one", updates=1, measured_peak_bytes=150 * MB))
    assert "made by the first update" in one["record"]["why_less"]
    as_predicted = run_data(write_run(tmp_path / "as predicted"))
    assert as_predicted["record"]["why_less"] == ""
