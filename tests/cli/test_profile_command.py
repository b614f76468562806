import json

import pytest

from shoestring.ledger import Ledger

WRN = ("profile", "wrn-10-1", "--batch", 4)


def test_the_json_has_the_promised_shape(shoestring):
    data = json.loads(shoestring(*WRN, "--json").out)
    assert data["rules"] == "real" and data["task"] == "wrn-10-1" and data["settings"] == {"batch": 4}
    assert set(data["bytes"]) == {"model", "optimizer", "activations", "workspace", "total"}
    assert set(data["flops"]) == {"forward", "backward", "recompute", "ratio"}
    assert set(data["peak"]) >= {"bytes", "phase", "module"}
    assert data["bytes"]["total"] == data["peak"]["bytes"] == sum(data["by_category"].values())
    assert sum(row["bytes"] for row in data["by_module"]) == data["bytes"]["total"]


def test_the_page_tells_what_the_json_tells(shoestring):
    data = json.loads(shoestring(*WRN, "--json").out)
    page = shoestring(*WRN).out
    assert f"{data['bytes']['total'] / 1e6:.3f}" in page
    assert all(row["module"][-20:] in page for row in data["by_module"][:10] if row["module"])


def test_the_page_fits_eighty_columns_and_a_screen(shoestring, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = shoestring(*WRN).out.splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 80
    assert not any(line.endswith(" ") for line in lines)


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
    ],
)
def test_a_wrong_argument_is_told_in_one_line(shoestring, arguments, words):
    answer = shoestring("profile", "wrn-10-1", *arguments)
    assert answer.code == 2
    assert words in answer.complaint
