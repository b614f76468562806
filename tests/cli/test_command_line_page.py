"""docs/command_line.md names every exit code, variable and file of a run folder, and no others."""

import re
from pathlib import Path

from shoestring import errors
from shoestring.runs.folder import OURS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "command_line.md").read_text()


def rows(heading):
    """The first cells of the table under a heading."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    return [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("|")][2:]


def test_exit_codes_are_those_of_our_errors():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and kind.__module__ == errors.__name__]
    ours = {str(kind.exit_code) for kind in kinds}
    assert {row for row in rows("Exit codes") if len(row) == 1} == ours | {"0", "1"}


def test_variables_are_those_that_the_source_reads():
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    read = set(re.findall(r"SHOESTRING_[A-Z]+", source))
    assert set(re.findall(r"SHOESTRING_[A-Z]+", " ".join(rows("Variables of the environment")))) == read


def test_files_are_those_that_a_run_writes():
    named = re.findall(r"`([a-z]+)", " ".join(rows("What a run folder holds")))
    assert set(named) == {*OURS, "tensorboard"}
