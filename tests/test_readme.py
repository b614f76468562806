"""What the README shows is what happens."""

import importlib
import json
import re
import runpy
from pathlib import Path

import pytest

import shoestring
from shoestring.cli.main import main
from shoestring.units import parse_bytes

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands() -> list[tuple[str, str]]:
    """-> (command, what it is said to print)."""
    parts = [re.match(r"\$ (.*?)(?:\s+#.*)?\n(.*)", part, re.DOTALL) for part in _split(blocks("console"))]
    return [(part[1], part[2]) for part in parts if part]


def _split(consoles: list[str]) -> list[str]:
    return [part for text in consoles for part in re.split(r"^(?=\$ )", text, flags=re.MULTILINE)]


def test_the_python_example_prints_what_is_shown(tmp_path, capsys):
    (code,), (shown,) = blocks("python"), blocks("text")
    (tmp_path / "example.py").write_text(code)
    runpy.run_path(str(tmp_path / "example.py"))
    assert capsys.readouterr().out == shown


def test_the_plan_that_is_shown_needs_the_memory_that_is_shown():
    """But for the scratch of operators, which depends on the machine."""
    ((_, shown),) = [c for c in commands() if c[0].startswith("shoestring plan")]
    flags = re.findall(r"--(\w+) (\S+)", shown.splitlines()[0])
    plan = shoestring.Plan(**{name: int(value) if value.isdigit() else value for name, value in flags})
    task = shoestring.builtin("wrn-28-2", batch=100, device="meta")
    predicted = shoestring.profile(shoestring.apply(task, plan).task, calibrate=False, brief=True).peak_bytes
    assert predicted == pytest.approx(parse_bytes(re.search(r"predicted (\S+ MB) of tensors", shown)[1]), rel=0.05)


@pytest.mark.slow
def test_the_plan_that_is_shown_is_found_again(capsys):
    """Its times are those of a machine, and another may choose another plan: not one over the budget."""
    ((command, shown),) = [c for c in commands() if c[0].startswith("shoestring plan")]
    assert main(command.split()[1:]) == 0
    peaks = [re.search(r"= (\S+ MB) of (\S+ MB),", page) for page in (shown, capsys.readouterr().out)]
    assert all(peak and parse_bytes(peak[1]) <= parse_bytes(peak[2]) == 8_000_000 for peak in peaks)


def test_the_make_targets_exist():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    made = [command.split()[1] for command, _ in commands() if command.startswith("make")]
    assert made == ["demo", "test"] and set(made) <= set(targets)


def test_every_command_of_the_command_line_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE)
    assert listed and all(f"`{name}`" in README or f"`shoestring {name}`" in README for name in listed)


def test_the_tables_are_what_was_measured_and_trained(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    made = importlib.import_module("readme_table")
    found = json.loads(made.RESULT.read_text())
    assert found["plans"] == [plan for _, plan, _ in made.ROWS]
    assert made.drawn(README, found, made.trained()) == README


def test_as_many_budgets_were_kept_as_is_said():
    (kept,) = re.findall(r"## Proved on: (\d+ of \d+) plans", (ROOT / "docs" / "budgets_kept.md").read_text())
    assert f"{kept} plans" in README


def test_every_file_that_is_linked_is_there():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert links and all((ROOT / link).exists() for link in links)


def test_the_page_about_ones_own_loop_runs_from_its_first_line_to_its_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "own_loop.md").read_text()
    code = "".join(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    (tmp_path / "own_loop.py").write_text(code)
    names = runpy.run_path(str(tmp_path / "own_loop.py"))
    assert names["record"].finished and names["record"].best_quality < 2 and (tmp_path / "model.pt").exists()
