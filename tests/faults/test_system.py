"""Short forms of the suite of faults: `make test-faults` runs them with their full numbers."""

import budget_pairs
import pytest
import readers
import run
import system


def test_an_error_of_the_system_at_any_call_of_a_save_is_told_and_a_save_is_whole(tmp_path):
    found, bad = system.save_calls(0.15, 0, tmp_path)
    assert not bad and found["told"] > 10


def test_a_flipped_bit_in_any_file_of_a_run_folder_is_noticed(tmp_path):
    found, bad = system.flips(200, 0, tmp_path)
    assert not bad and found["noticed"] == 200


def test_a_number_that_is_not_finite_is_told_or_skipped_and_never_saved(tmp_path):
    found, bad = system.poisoned(4, 1, tmp_path)
    assert not bad and sum(found.values()) == 4


def test_budgets_drawn_at_random_are_kept_on_the_heap(tmp_path):
    found, bad = budget_pairs.check(2, 1, tmp_path)
    assert not bad and found["distinct pairs"] == 2


@pytest.mark.parametrize("reader", readers.READERS)
def test_changed_data_files_are_read_or_refused_in_one_line(reader, tmp_path):
    found, bad = readers.check(reader, 40, 0, tmp_path)
    assert not bad, bad[:3]
    assert sum(found.values()) == 40


def test_the_suite_counts_by_share_and_its_page_keeps_the_rows_of_other_parts(tmp_path):
    assert run.count_of("kills", 0.1) == 100 and run.count_of("poisoned", 0.001) == 1
    [(name, row, wrong)] = run.rows(["flips"], {"flips": 0.002}, 3)
    assert (name, wrong) == ("flips", 0) and "20 of 10,000" in row and "20 noticed" in row
    assert row.endswith(f"| 3 | {run.where()} |")
    file = tmp_path / "page.md"
    file.write_text(run.page({"flips": row}))
    assert run.earlier(file) == {"flips": row} and "Not run: kills, " in file.read_text()
    file.write_text(file.read_text().replace(run.where(), "another machine"))
    assert run.earlier(file) == {"flips": row.replace(run.where(), "another machine")}
