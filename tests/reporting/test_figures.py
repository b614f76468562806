import importlib.util

import pytest

from shoestring.errors import ShoestringError
from shoestring.reporting.comparison import Comparison, comparison_table
from shoestring.reporting.figures import beside_figure, comparison_figure, overlay_figure, profile_figure, require_plot

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
    with pytest.raises(ShoestringError, match=r"pip install 'shoestring\[plot\]'"):
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
