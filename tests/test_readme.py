"""What the README shows is what happens."""

import re
import runpy
from pathlib import Path

import pytest

from shoestring.cli.main import main

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


def labels(page: str) -> list[str]:
    """A page -> the first word of each row: numbers and bars differ with the machine's scratch."""
    return re.findall(r"^([A-Za-z][\w.]*)", page, re.MULTILINE)


def test_the_python_example_prints_what_is_shown(tmp_path, capsys):
    (code,), (shown,) = blocks("python"), blocks("text")
    (tmp_path / "example.py").write_text(code)
    runpy.run_path(str(tmp_path / "example.py"))
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize("command, shown", [c for c in commands() if c[0].startswith("shoestring")])
def test_a_command_prints_the_page_that_is_shown(command, shown, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "76")
    assert main(command.split()[1:]) == 0
    printed = capsys.readouterr().out
    assert labels(shown) == labels(printed)
    assert next(line for line in shown.splitlines() if line.startswith("model ")) in printed


def test_the_make_targets_exist():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    made = [command.split()[1] for command, _ in commands() if command.startswith("make")]
    assert made == ["demo", "test"] and set(made) <= set(targets)


def test_every_command_of_the_command_line_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE)
    assert listed and all(f"`{name}`" in README or f"`shoestring {name}`" in README for name in listed)


def test_every_file_that_is_linked_is_there():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert links and all((ROOT / link).exists() for link in links)
