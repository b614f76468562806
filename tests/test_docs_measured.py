"""Every table of measurements in docs/ names its command and its CPU."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NUMBERS = re.compile(r"^\|.*\d.*\|$", re.MULTILINE)


def sections():
    """Each part of a page under a heading that says "measured", and holds a table with numbers, as it is shown."""
    for path in sorted((ROOT / "docs").rglob("*.md")):
        shown = re.sub(r"<!--.*?-->", "", path.read_text(), flags=re.DOTALL)
        title, *parts = re.split(r"^(?=## )", shown, flags=re.MULTILINE)
        whole = "measured" in title.split("\n", 1)[0].lower()  # a page of nothing else
        for part in [shown] if whole else parts:
            if "measured" in part.split("\n", 1)[0].lower() and NUMBERS.search(part):
                yield pytest.param(part, id=f"{path.relative_to(ROOT)}: {part.split(chr(10), 1)[0]}")


SECTIONS = list(sections())


@pytest.mark.parametrize("section", SECTIONS)
def test_a_table_of_measurements_names_the_command_that_makes_it(section):
    scripts = re.findall(r"benchmarks/\w+\.py", section)
    assert scripts, "no command is shown"
    assert all((ROOT / script).exists() for script in scripts)


@pytest.mark.parametrize("section", SECTIONS)
def test_a_table_of_measurements_names_its_cpu(section):
    assert re.search(r"EPYC|Xeon|Intel", section)


def test_there_are_such_tables():
    assert len(SECTIONS) >= 8
