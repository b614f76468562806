import io

import pytest

from shoestring.ledger import Category, Ledger, Phase
from shoestring.reporting.terminal import make_console, show_profile


def page(data, ledger=None, width=80, encoding="utf-8", terminal=True) -> list[str]:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    show_profile(make_console(file=file, width=width, force_terminal=terminal, color_system=None), data, ledger)
    file.flush()
    return raw.getvalue().decode(encoding).splitlines()


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal(data, ledger, width):
    data["by_module"][0]["module"] = "encoder." * 30 + "last"
    data["task"] = "task" * 40
    assert all(len(line) <= width for line in page(data, ledger, width))


def test_a_sentence_that_is_piped_is_one_line(data, ledger, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    data["unseen"] = ["the scratch of " + "many operators, " * 20]
    data["peak"]["module"] = "encoder." * 20 + "last"
    lines = page(data, ledger, terminal=False)
    assert any(line.startswith("Unsure") and line.endswith("many operators,") for line in lines)
    assert sum("encoder." in line and line.startswith("Peak") and "last" in line for line in lines) == 1


def test_the_papers_rules_count_no_objects(data):
    data["object_bytes"] = 1000
    assert any("with Python objects" in line for line in page(data))
    assert not any("with Python objects" in line for line in page(data | {"rules": "paper"}))


def test_no_row_is_wrapped_and_the_page_fits_a_screen(data, ledger):
    data["by_module"] = [
        {"module": f"{'encoder.' * 12}layer{n}", "bytes": 10**6, "activation": 10**6} for n in range(30)
    ]
    lines = page(data, ledger)
    assert len(lines) <= 45
    assert sum(".encoder." in line for line in lines) == 10
    assert all(line.split()[1:3] == ["1.000", "0.5%"] for line in lines if ".encoder." in line)


def test_a_long_name_keeps_its_end(data):
    data["by_module"][0]["module"] = "encoder." * 30 + "last"
    assert any(line.startswith("…") and "encoder.last " in line for line in page(data))


def test_every_category_is_shown_with_bytes_and_share(data):
    text = "\n".join(page(data))
    for words in ("model", "optimizer state", "forward activations", "backward activations", "input"):
        assert words in text
    assert "160.000  75.1%" in text
    assert "213.000 100.0%" in text


def test_an_unknown_workspace_is_not_shown_as_nothing(data):
    assert any(line.startswith("workspace") and "unknown" in line for line in page(data))
    data["bytes"]["workspace"] = 0
    assert not any(line.startswith("workspace") for line in page(data))


def test_the_peak_is_told_with_its_phase_layer_and_operation(data):
    words = "Peak 213.0 MB in the backward pass, at layer second (a tensor of threshold_backward)"
    assert " ".join(" ".join(page(data)[1:3]).split()) == words
    data["budget_bytes"] = 300_000_000
    assert page(data)[1].startswith("Peak 213.0 MB of a budget of 300.0 MB, in the backward pass, at layer second")


def test_the_chart_names_the_phases_and_marks_the_peak(data, ledger):
    lines = page(data, ledger)
    ruler = next(line for line in lines if "|forward" in line)
    assert "|backward" in ruler and "|update" in ruler
    mark = next(line for line in lines if "▲" in line).index("▲")
    assert ruler.index("|backward") <= mark < ruler.index("|update")


def test_the_flops_tell_recomputation(data):
    words = "2 G forward, 4 G backward, 1 G recomputed (1.17x in all)"
    assert any(words in line for line in page(data))


def test_what_was_not_seen_is_told_in_full(data):
    assert "not calibrated" in " ".join(page(data)[-2:])


def test_plain_output_has_no_escape_codes_and_ascii_is_enough(data, ledger):
    assert "\x1b" not in "\n".join(page(data, ledger))
    assert page(data, ledger, encoding="ascii")[0] == "two-layers - real rules - batch 8"


def test_names_of_layers_are_no_markup(data):
    data["by_module"][0]["module"] = "[red]first[/red]"
    assert any(line.startswith("[red]first[/red]") for line in page(data))


def test_large_and_small_totals_keep_readable_digits(data):
    data["bytes"]["total"] = 2_826_100_000
    assert any(line.startswith("forward activations") and " 160.0 " in line for line in page(data))
    data["bytes"]["total"] = 160_000_000 * 4000
    assert any(line.startswith("forward activations") and " 0.160 " in line for line in page(data))


def test_layers_without_categories_are_shown_too(data):
    data["by_module"] = [{"module": "only", "bytes": 4 * 10**6}]
    assert any(line.startswith("only") and "4.000" in line for line in page(data))


def test_layers_that_differ_in_their_number_only_share_a_row(data):
    names = {"blocks.0": 9, "blocks.1": 8, "blocks.2": 8, "blocks.4": 8, "blocks.1.conv": 7, "blocks.2.conv": 7, "": 7}
    data["by_module"] = [{"module": name, "bytes": size * 10**6} for name, size in names.items()]
    rows = [line.split()[0] for line in page(data) if line.startswith(("blocks", "(outside"))]
    assert rows == ["blocks.0", "blocks.1-2,4", "blocks.1-2.conv", "(outside"]
    assert sum("(each)" in line for line in page(data)) == 2


def test_many_microbatches_are_told_by_their_number(data):
    ledger = Ledger()
    for phase in (Phase.FORWARD, Phase.BACKWARD) * 7:
        ledger.death(ledger.birth(1, Category.ACTIVATION, phase=phase))
    assert any("7 microbatches, then the update" in line for line in page(data, ledger))
