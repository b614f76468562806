import json
import re

import pytest
import torch

from shoestring import Plan
from shoestring.ledger import Ledger

WRN = ("profile", "wrn-10-1", "--batch", 4, "--no-calibrate")
PAPER = ("profile", "wrn-28-2", "--rules", "paper", "--batch", 100)


def answer_of(shoestring, *arguments) -> dict:
    answer = shoestring(*arguments, "--json")
    assert answer.code == 0, answer
    return json.loads(answer.out)


def test_the_json_has_the_promised_shape(shoestring):
    data = answer_of(shoestring, *WRN)
    assert data["rules"] == "real" and data["task"] == "wrn-10-1" and data["settings"] == {"batch": 4}
    assert set(data["bytes"]) == {"model", "optimizer", "activations", "workspace", "total"}
    assert set(data["flops"]) == {"forward", "backward", "recompute", "ratio"}
    assert set(data["peak"]) >= {"bytes", "phase", "module"}
    assert data["bytes"]["total"] == data["peak"]["bytes"] == sum(data["by_category"].values())
    assert sum(row["bytes"] for row in data["by_module"]) == data["bytes"]["total"]


def test_all_settings_of_a_technique_can_be_said_and_are_told(shoestring):
    words = ("--nonzero", "30,method=set,layers=conv+blocks.*", "--microbatch", "2,by=examples")
    settings = answer_of(shoestring, *WRN, *words)["settings"]
    assert settings["nonzero"] == {"nonzero": 30, "method": "set", "layers": ["conv", "blocks.*"]}
    assert settings["microbatch"] == {"size": 2, "by": "examples"}
    told = shoestring(*WRN, *words).out.replace("\n", " ").replace("\u00a0", " ")
    assert "nonzero 30,method=set,layers=conv+blocks.*" in told and "microbatch 2,by=examples" in told


def test_the_page_tells_what_the_json_tells(shoestring):
    data = answer_of(shoestring, *WRN)
    page = shoestring(*WRN).out
    assert f"{data['bytes']['total'] / 1e6:.3f}" in page
    assert all(row["module"][-20:] in page for row in data["by_module"][:10] if row["module"])


def test_a_plan_is_shown_beside_the_model(shoestring, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    file = tmp_path / "plan.json"
    file.write_text(Plan(checkpoint="no-bn", microbatch=2).to_json())
    data = answer_of(shoestring, *WRN, "--compare", file)
    assert data["compared"]["settings"] == {"batch": 4, "checkpoint": "no-bn", "microbatch": 2}
    assert data["compared"]["bytes"]["total"] < data["bytes"]["total"] == answer_of(shoestring, *WRN)["bytes"]["total"]
    lines = shoestring(*WRN, "--compare", file).out.splitlines()
    peak = next(line.split() for line in lines if line.startswith("peak "))
    assert peak[1:3] == [f"{each['bytes']['total'] / 1e6:.3f}" for each in (data, data["compared"])]
    assert max(len(line) for line in lines if not line.startswith("Peak")) <= 80
    rows = [re.findall(r" (\d+\.\d{3})", line) for line in lines]
    *parts, whole, _ = (float(row[1]) for row in rows if len(row) == 2)
    assert sum(parts) == pytest.approx(whole, abs=0.005) and whole == float(peak[2])


def test_what_cannot_be_compared_is_refused_before_the_work(shoestring, tmp_path):
    other = tmp_path / "other.json"
    other.write_text(Plan(task="wrn-16-1", checkpoint="no-bn").to_json())
    assert "plan for wrn-16-1" in shoestring(*WRN, "--compare", other).err
    assert "cannot be read" in shoestring(*WRN, "--compare", tmp_path / "none.json").err
    assert "leave out --rules" in shoestring(*PAPER, "--compare", other).err


def test_the_page_fits_eighty_columns_and_a_screen(shoestring, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = shoestring(*WRN).out.splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 80
    assert not any(line.endswith(" ") for line in lines)


def test_an_uncalibrated_workspace_is_unknown_and_not_nothing(shoestring):
    assert answer_of(shoestring, *WRN)["bytes"]["workspace"] is None
    lines = shoestring(*WRN).out.splitlines()
    assert any(line.startswith("workspace") and "unknown" in line for line in lines)


def test_a_calibrated_workspace_is_a_number_and_part_of_the_peak(shoestring):
    data = answer_of(shoestring, "profile", "wrn-10-1", "--batch", 4)
    assert data["bytes"]["workspace"] == data["by_category"]["workspace"] >= 0
    assert data["bytes"]["total"] == sum(data["by_category"].values())
    assert data["peak"]["bytes"] >= answer_of(shoestring, *WRN)["peak"]["bytes"]


def test_the_threads_asked_for_are_those_that_calibrate(shoestring):
    before = torch.get_num_threads()
    try:
        assert shoestring(*WRN, "--threads", 1).code == 0
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_techniques_are_applied_and_told(shoestring):
    plain = answer_of(shoestring, *WRN)
    lean = answer_of(shoestring, *WRN, "--microbatch", 1, "--checkpoint", "residual-1")
    assert lean["settings"] == {"batch": 4, "checkpoint": "residual-1", "microbatch": 1}
    assert lean["bytes"]["activations"] < plain["bytes"]["activations"] / 2
    assert lean["flops"]["recompute"] > 0


def test_the_papers_rules_give_the_papers_total(shoestring):
    baseline = answer_of(shoestring, *PAPER)
    assert baseline["rules"] == "paper"
    assert round(baseline["bytes"]["total"] / 1e6, 1) == 404.8
    lean = ("--nonzero", 30, "--microbatch", 10, "--precision", "fp16", "--checkpoint", "residual-2*")
    assert round(answer_of(shoestring, *PAPER, *lean)["bytes"]["total"] / 1e6, 1) == 6.7


def test_the_papers_rules_have_a_page_and_a_figure_too(shoestring, tmp_path):
    pytest.importorskip("matplotlib")
    answer = shoestring(*PAPER, "--figure", tmp_path / "out.svg")
    assert "404.802" in answer.out and "paper rules" in answer.out
    assert (tmp_path / "out.svg").stat().st_size > 5000


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_a_figure_is_drawn(shoestring, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"out.{suffix}"
    answer = shoestring(*WRN, "--json", "--figure", path)
    assert answer.code == 0 and path.stat().st_size > 5000
    assert str(path) in answer.err and json.loads(answer.out)


def test_the_ledger_is_written_and_gives_the_peak_again(shoestring, tmp_path):
    answer = shoestring(*WRN, "--json", "--ledger", tmp_path / "out.json")
    ledger = Ledger.from_json((tmp_path / "out.json").read_text())
    assert ledger.peak().bytes == json.loads(answer.out)["bytes"]["total"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--batch", "-1"), "--batch: -1 is out of range"),
        (("--batch", "0"), "--batch: 0 is out of range"),
        (("--batch", "10**3"), "--batch: '10**3' is not a whole number"),
        (("--batch", "1000000000000"), "out of range: it must be from 1 to 1,000,000,000"),
        (("--batch", "900000000"), "batch 900000000 is out of range"),
        (("--batch", "3", "--tokens", "3"), "not allowed with"),
        (("--tokens", "3"), "tokens"),
        (("--figure", "out.doc"), "--figure: 'out.doc' must end in .svg or .png"),
        (("--figure", "no/such/folder/out.svg"), "there is no folder 'no/such/folder'"),
        (("--ledger", "out.txt"), "must end in .json"),
        (("--threads", "0"), "--threads: 0 is out of range"),
        (("--rules", "mine"), "--rules: invalid choice: 'mine'"),
        (("--checkpoint", "residual"), "there is no checkpoint strategy 'residual'"),
        (("--microbatch", "1000"), "microbatch of 1000"),
        (("--nonzero", "0"), "--nonzero: 0 is out of range"),
        (("--nonzero", "many"), "--nonzero: 'many' is not a percentage"),
        (("--precision", "fp8"), "--precision: invalid choice: 'fp8'"),
        (("--nonzero", "30,metod=set"), "--nonzero: nonzero has no setting 'metod': after its value come method"),
        (("--rules", "paper", "--activations", "offload"), "the paper's rules know no --activations offload"),
        (("--rules", "paper", "--nonzero", "30,method=set"), "the paper's rules know no --nonzero 30,method=set"),
        (("--rules", "paper", "--checkpoint", "residual-0"), "residual-0"),
        (("--rules", "paper", "--microbatch", "1000"), "microbatch 1000 is out of range"),
    ],
)
def test_a_wrong_argument_is_told_in_one_line(shoestring, arguments, words):
    answer = shoestring("profile", "wrn-10-1", *arguments)
    assert answer.code == 2
    assert words in answer.complaint


def test_a_budget_is_drawn_into_the_figure_and_told(shoestring, tmp_path):
    pytest.importorskip("matplotlib")
    answer = shoestring("profile", "wrn-10-0.5", "--batch", 4, "--budget", "20MB", "--figure", tmp_path / "a.svg")
    assert answer.code == 0 and "of a budget of 20.00 MB" in answer.out
    assert "budget 20.0 MB" in (tmp_path / "a.svg").read_text()
