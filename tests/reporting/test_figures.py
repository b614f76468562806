import importlib.util
import re
from xml.etree import ElementTree

import pytest

import shoestring
from shoestring.errors import ShoestringError, how_to_install
from shoestring.reporting.comparison import Comparison, comparison_table
from shoestring.reporting.comparison_figure import comparison_figure
from shoestring.reporting.figures import beside_figure, overlay_figure, profile_figure, require_plot

ROWS = [
    Comparison("small", 1_000_000, 1_000_000),
    Comparison("large", 2_020_000_000, 2_000_000_000, 90_000_000, 100_000_000),
]


@pytest.fixture(params=[".svg", ".png"])
def path(request, tmp_path):
    pytest.importorskip("matplotlib")
    return tmp_path / f"figure{request.param}"


def is_picture(path) -> bool:
    start = path.read_bytes()[:400]
    return path.stat().st_size > 5000 and (b"<svg" in start or start.startswith(b"\x89PNG"))


def test_a_profile_is_drawn_with_its_ledger(path, data, ledger):
    profile_figure(path, data, ledger)
    assert is_picture(path)


def test_a_profile_without_a_ledger_is_drawn_as_a_pie(path, data):
    profile_figure(path, data)
    assert is_picture(path)


def test_two_ledgers_are_drawn_in_one_frame(path, ledger):
    overlay_figure(path, ledger, ledger, names=("before", "after"))
    assert is_picture(path)


def test_a_predicted_step_is_drawn_beside_a_measured_one(path, data, ledger):
    beside_figure(path, data, ledger, ledger)
    assert is_picture(path)


def test_predictions_are_drawn_against_measurements(path):
    comparison_figure(path, ROWS)
    assert is_picture(path)


def test_a_row_under_a_model_is_named_with_it_and_an_error_of_nothing_has_no_minus(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [Comparison("net, batch 100", 10**9, 10**9), Comparison("  microbatch 10", 10**9 - 1, 10**9)]
    comparison_figure(tmp_path / "a.svg", rows)
    text = (tmp_path / "a.svg").read_text()
    assert "net, microbatch 10" in text and "-0.000%" not in text + comparison_table(rows)


def test_the_same_data_gives_the_same_picture(tmp_path, data, ledger):
    pytest.importorskip("matplotlib")
    for name in ("a.svg", "b.svg"):
        profile_figure(tmp_path / name, data, ledger)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_suffix_that_is_no_picture_is_refused(tmp_path, data):
    with pytest.raises(ShoestringError, match=r"must end in \.svg"):
        profile_figure(tmp_path / "figure.doc", data)


def test_a_folder_that_does_not_exist_is_told_in_one_line(tmp_path, data):
    with pytest.raises(ShoestringError, match="cannot be written: No such file"):
        profile_figure(tmp_path / "nowhere" / "figure.svg", data)


def test_without_matplotlib_the_command_that_helps_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ShoestringError, match=re.escape(how_to_install("plot"))):
        require_plot()


def test_the_error_is_relative_to_the_measurement():
    assert ROWS[1].error == pytest.approx(0.01)


def test_the_table_has_a_row_a_model_and_aligned_columns():
    lines = comparison_table(ROWS).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[2].split("|")[4].strip() == "+0.000%"
    assert [cell.strip() for cell in lines[3].split("|")[1:-1]] == [
        "large", "2.020 GB", "2.000 GB", "+1.000%", "90.00 MB", "100.0 MB", "-10.000%"
    ]  # fmt: skip


def test_the_table_leaves_workspace_out_where_none_was_measured():
    assert "workspace" not in comparison_table(ROWS[:1])


def test_an_svg_is_small_has_words_for_who_cannot_see_it_and_colours_for_a_dark_page(tmp_path):
    pytest.importorskip("matplotlib")
    from shoestring import Plan, builtin
    from shoestring.profiling import profile
    from shoestring.training.apply import lean_task

    task = builtin("wrn-10-1", batch=8, device="meta")
    plain, lean = profile(task), profile(lean_task(task, Plan(microbatch=2)))
    data = plain.to_json() | {"settings": {}, "budget_bytes": 5_000_000}
    overlay_figure(tmp_path / "two.svg", plain.ledger, lean.ledger, title="One & two", budget_bytes=2_000_000)
    profile_figure(tmp_path / "one.svg", data, plain.ledger)
    for name, title, budget in (("two", "One &amp; two", "budget 2.00 MB"), ("one", "wrn-10-1", "budget 5.00 MB")):
        text = (tmp_path / f"{name}.svg").read_text()
        assert title in text.split("<title>")[1].split("</title>")[0] and "at " in text.split("<desc>")[1]
        assert "prefers-color-scheme: dark" in text and budget in text and len(text) < 150_000
        assert "allocations in their order (not time)" in text
        assert re.search(r'weight: 700[^"]*fill: #(212121|fefefe)', text)  # what is on a category stays in the dark
        ElementTree.fromstring(text)


def written(path):
    """The words of an SVG with the place of each."""
    places = re.findall(r'<text[^>]*transform="translate\(([\d.]+) ([\d.]+)\)[^>]*>([^<]*)<', path.read_text())
    places += re.findall(r'<text[^>]*?x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)<', path.read_text())
    return {words: (float(x), float(y)) for x, y, words in places}


def test_microbatches_are_numbered_and_the_words_of_peak_and_budget_are_apart(tmp_path):
    pytest.importorskip("matplotlib")
    from shoestring import Plan, builtin
    from shoestring.profiling import profile
    from shoestring.training.apply import lean_task

    found = profile(lean_task(builtin("wrn-10-1", batch=8, device="meta"), Plan(microbatch=2)))
    peak = found.peak_bytes
    for budget in (peak, int(1.05 * peak), 2 * peak):
        data = found.to_json() | {"settings": {}, "budget_bytes": budget}
        profile_figure(tmp_path / "a.svg", data, found.ledger)
        words = written(tmp_path / "a.svg")
        assert "4 microbatches, then the update" in words
        numbers = [words[number] for number in "1234"]
        assert numbers == sorted(numbers) and len({y for _, y in numbers}) == 1
        top = next(place for text, place in words.items() if " at " in text)
        limit = next(place for text, place in words.items() if text.startswith("budget"))
        assert abs(top[1] - limit[1]) > 10 or abs(top[0] - limit[0]) > 150, (top, limit)


def test_the_figure_of_a_built_in_model_is_small(tmp_path):
    pytest.importorskip("matplotlib")
    found = shoestring.profile(shoestring.builtin("wrn-10-1", batch=20, device="meta"), calibrate=False)
    profile_figure(tmp_path / "a.svg", found.to_json() | {"settings": {}}, found.ledger)
    assert (tmp_path / "a.svg").stat().st_size < 110_000
