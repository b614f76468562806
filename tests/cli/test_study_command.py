"""`shoestring study` as a user meets it."""

import json


def test_the_studies_are_listed_and_shown(shoestring):
    listed = shoestring("study", "list")
    assert listed.code == 0 and "table3" in listed.out and "Figure 10" in listed.out
    shown = shoestring("study", "show", "table3")
    assert "arXiv 1904.10631" in shown.out and "30%, 10" in shown.out


def test_a_figure_is_run_at_the_scale_of_memory_and_told_as_json(shoestring, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'title = "t"\npaper = "sohoni"\nplace = "p"\nmodel = "wrn-10-1"\nbatch = 4\n[[rows]]\nlabel = "a"\n'
        '[[claims]]\nclaim = "c"\nmetric = "measured_mb"\nrow = "a"\nat_most = 100.0\n'
    )
    answer = shoestring("study", "run", path, "--json", "--nice", 0, "--store", tmp_path / "store")
    assert answer.code == 0
    found = json.loads(answer.out)
    assert (found["study"], found["scale"]) == ("mine", "memory")
    (row,) = found["rows"]
    assert row["settings"]["model"] == "wrn-10-1"
    assert 0.9 < row["predicted_bytes"] / row["measured_bytes"] <= 1
    assert row["rules_bytes"] > 0 and row["quality"] == {} and row["seeds"] == []
    assert found["claims"][0]["verdict"] == "confirmed"
    assert "done memory wrn-10-1" in answer.err
    assert json.loads(shoestring("study", "status", path, "--json", "--store", tmp_path / "store").out)["done"] == 1
    assert "heap, MB" in shoestring("study", "report", path, "--store", tmp_path / "store").out


def test_what_cannot_be_is_told_in_one_line(shoestring, tmp_path):
    assert "there is no study 'tabel3'" in shoestring("study", "show", "tabel3").complaint
    assert "needs a study" in shoestring("study", "run").complaint
    assert "is not trained at scale small" in shoestring("study", "run", "figure5", "--scale", "small").complaint
    away = shoestring("study", "run", "table3", "--scale", "small", "--store", tmp_path)
    assert "needs its data: name the folder that holds cifar-10-batches-bin with --data" in away.complaint


def test_a_report_keeps_what_another_store_has_recorded_in_its_file(shoestring, tmp_path):
    path, results = tmp_path / "mine.toml", tmp_path / "results"
    path.write_text(
        'title = "t"\npaper = "sohoni"\nplace = "p"\nmodel = "wrn-10-1"\nbatch = 4\n[[rows]]\nlabel = "a"\n'
        '[[claims]]\nclaim = "c"\nmetric = "measured_mb"\nrow = "a"\nat_most = 100.0\n'
    )
    there = "study", "run", path, "--nice", 0, "--store", tmp_path / "there", "--output", results
    assert shoestring(*there).code == 0
    recorded = (results / "mine.memory.json").read_text()
    here = shoestring("study", "report", path, "--store", tmp_path / "here", "--output", results)
    assert here.code == 0 and "took over 1 trials and measured steps" in here.err
    assert (results / "mine.memory.json").read_text() == recorded


def test_results_are_not_overwritten_by_a_store_that_has_none(tmp_path, shoestring):
    kept = tmp_path / "results" / "figure5.memory.json"
    kept.parent.mkdir()
    kept.write_text("{}")
    answer = shoestring("study", "report", "figure5", "--store", tmp_path / "store", "--output", kept.parent)
    assert answer.code == 2 and "nothing of figure5 at memory is done" in answer.err
    assert kept.read_text() == "{}" and list(kept.parent.iterdir()) == [kept]
