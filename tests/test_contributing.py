"""What CONTRIBUTING.md tells newcomers to open, run and edit is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
FOLDERS = ("src", "tests", "docs", "csrc", "examples", "benchmarks")
PATHS = sorted(
    {
        path
        for path in re.findall(rf"(?:{'|'.join(FOLDERS)})/[\w./]+|\b[A-Z]+\.md|pyproject\.toml", TEXT)
        if "NAME" not in path
    }
)


@pytest.mark.parametrize("path", PATHS)
def test_a_file_that_is_named_exists(path):
    assert (ROOT / path.rstrip(".")).exists()


def test_there_are_enough_of_them():
    assert len(PATHS) > 20


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("WORDS", "src/shoestring/techniques/__init__.py"),
        ("EVERY_SETTING", "tests/contract/table.py"),
        ("CODECS", "src/shoestring/techniques/activations/codecs.py"),
        ("PLANS", "tests/contract/table.py"),
        ("NEAR", "tests/contract/table.py"),
        ("TASKS", "tests/contract/table.py"),
        ("MAKERS", "src/shoestring/models/tasks.py"),
        ("def define", "src/shoestring/kernels/define.py"),
    ],
)
def test_a_list_that_is_to_be_extended_is_in_its_file(name, file):
    assert f"`{name.removeprefix('def ')}" in TEXT
    assert re.search(rf"^{name}\b", (ROOT / file).read_text(), re.MULTILINE)


def test_every_make_target_is_described_and_exists():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)) - {"demo", "clean"}
    assert set(re.findall(r"`make ([\w-]+)`", TEXT)) == targets
