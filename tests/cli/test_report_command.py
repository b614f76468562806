import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "reporting"))
from pages import FIDELITY, STUDY, Reader, long_ledger, write_run


def data_of(path: Path) -> dict:
    return Reader(path.read_text()).data


def test_a_page_of_a_run_is_written(shoestring, tmp_path):
    run, page = write_run(tmp_path / "run"), tmp_path / "page.html"
    answer = shoestring("report", run, "-o", page)
    assert answer.code == 0 and str(page) in answer.out
    assert [one["name"] for one in data_of(page)["runs"]] == [str(run)]


def test_a_page_is_utf_8_in_any_locale(tmp_path):
    words = ["report", str(write_run(tmp_path / "run")), "-o", str(tmp_path / "page.html")]
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-m", "shoestring", *words], env=os.environ | locale, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert "\u2026" in (tmp_path / "page.html").read_text("utf-8")  # of the script


def test_two_runs_are_compared_on_one_page(shoestring, tmp_path):
    runs, page = [write_run(tmp_path / name) for name in ("a", "b")], tmp_path / "page.html"
    told = json.loads(shoestring("report", *runs, "-o", page, "--json").out)
    assert told == {"page": str(page), "bytes": page.stat().st_size, "runs": 2}
    assert [one["name"] for one in data_of(page)["runs"]] == list(map(str, runs))


def test_a_page_of_a_study_is_written_from_its_report(shoestring, tmp_path):
    (tmp_path / "study.json").write_text(json.dumps(STUDY))
    assert shoestring("report", tmp_path / "study.json", "-o", tmp_path / "page.html").code == 0
    assert len(data_of(tmp_path / "page.html")["study"]["rows"]) == 3


def test_a_study_of_which_nothing_was_run_yet_has_a_page_with_what_the_paper_printed(shoestring, tmp_path):
    answer = shoestring("report", "table3", "--store", tmp_path / "store", "-o", tmp_path / "page.html")
    assert answer.code == 0, answer.err
    study = data_of(tmp_path / "page.html")["study"]
    assert study["rows"][0]["paper_bytes"] == 404.8e6 and study["rows"][0]["measured_bytes"] is None


def test_a_measured_fidelity_is_shown_beside_the_runs_codecs(shoestring, tmp_path):
    run, page, measured = (
        write_run(tmp_path / "run", long_ledger(9)),
        tmp_path / "page.html",
        tmp_path / "fidelity.json",
    )
    measured.write_text(json.dumps(FIDELITY))
    assert shoestring("report", run, "--fidelity", measured, "-o", page).code == 0
    assert data_of(page)["runs"][0]["steps"]["lean"]["stored"][0]["cosine"] == 0.9987


def test_a_fidelity_that_tells_nothing_of_the_run_is_refused(shoestring, tmp_path):
    run, page, measured = (
        write_run(tmp_path / "run", long_ledger(9)),
        tmp_path / "page.html",
        tmp_path / "fidelity.json",
    )
    others = json.dumps({"layers": [FIDELITY["layers"][0] | {"codec": "int8"}]})
    for text, reason in (
        ("{", "is no fidelity of layers"), ('{"layers": [{}]}', "is no fidelity of layers"),
        ('{"layers": [{"module": "a", "codec": "int4", "cosine": "1"}]}', "a layer has no module, codec and cosine"),
        (others, "knows no layer of"),
    ):  # fmt: skip
        measured.write_text(text)
        assert reason in shoestring("report", run, "--fidelity", measured, "-o", page).complaint
    assert "cannot be read" in shoestring("report", run, "--fidelity", tmp_path / "none", "-o", page).complaint
    assert "not a study" in shoestring("report", "table3", "--fidelity", measured, "-o", page).complaint
    assert not page.exists()


def test_what_cannot_be_shown_is_refused_in_one_line(shoestring, tmp_path):
    run, page = write_run(tmp_path / "run"), tmp_path / "page.html"
    (tmp_path / "text.json").write_text("nonsense")
    (tmp_path / "empty").mkdir()
    for subjects, reason in (
        ([tmp_path / "empty"], "holds no run"),
        ([tmp_path / "none"], "neither the folder of a run, nor a study"),
        ([tmp_path / "text.json"], "is no JSON"),
        ([run, tmp_path / "text.json"], "only runs are compared"),
        ([run, run, run], "3 runs are named"),
    ):
        assert reason in shoestring("report", *subjects, "-o", page).complaint
    assert "must end in .html" in shoestring("report", run, "-o", tmp_path / "page.txt").complaint
    assert not page.exists()
