"""What the files at the root say of the project is one story: version, Python, papers."""

import importlib.metadata
import re
import subprocess
import tarfile
import tomllib
from pathlib import Path

import pytest

import shoestring
from shoestring import errors

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PAPERS = {
    "1904.10631": (
        "Low-Memory Neural Network Training: A Technical Report",
        ("Sohoni", "Aberger", "Leszczynski", "Zhang", "Ré"),
    ),
    "2409.11902": (
        "Less Memory Means smaller GPUs: Backpropagation with Compressed Activations",
        ("Barley", "Fröning"),
    ),
}


def test_the_version_is_written_in_one_place_and_the_build_reads_it_there(monkeypatch):
    regex = pytest.importorskip("scikit_build_core.metadata.regex")
    monkeypatch.chdir(ROOT)
    how = dict(PROJECT["tool"]["scikit-build"]["metadata"]["version"])
    assert "version" not in PROJECT["project"] and "version" in PROJECT["project"]["dynamic"]
    assert how.pop("provider") == regex.__name__
    assert regex.dynamic_metadata("version", how) == shoestring.__version__


def test_the_citation_names_this_version():
    assert re.search(r"^version: (.+)$", text("CITATION.cff"), re.MULTILINE)[1] == shoestring.__version__


def test_readme_build_and_tools_ask_for_the_same_python():
    (needed,) = re.findall(r">=(3\.\d+)", PROJECT["project"]["requires-python"])
    assert f"Python {needed} or later" in text("README.md")
    assert f"find_package(Python {needed} " in text("CMakeLists.txt")
    assert PROJECT["tool"]["mypy"]["python_version"] == needed


@pytest.mark.parametrize("page", ["README.md", "CITATION.cff", "docs/references.md"])
@pytest.mark.parametrize("number", PAPERS)
def test_both_papers_are_named_with_authors_title_and_number(page, number):
    title, authors = PAPERS[number]
    words = " ".join(text(page).split())
    assert number in words and title in words
    assert all(author in words for author in authors)


def test_the_commits_that_blame_skips_exist():
    listed = re.findall(r"^[0-9a-f]{40}$", text(".git-blame-ignore-revs"), re.MULTILINE)
    assert listed
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout of git")
    for commit in listed:
        subprocess.run(["git", "cat-file", "-e", f"{commit}^{{commit}}"], cwd=ROOT, check=True)


def text(page: str) -> str:
    return (ROOT / page).read_text()


def test_a_source_distribution_has_every_file_of_the_package(tmp_path, monkeypatch):
    build = pytest.importorskip("scikit_build_core.build")
    monkeypatch.chdir(ROOT)
    name = build.build_sdist(str(tmp_path))
    with tarfile.open(tmp_path / name) as archive:
        found = {member.split("/", 1)[1] for member in archive.getnames() if "/" in member}
    files = [
        path
        for folder in ("src", "csrc")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".cpp", ".h")
    ]
    assert len(files) > 200 and {str(path.relative_to(ROOT)) for path in files} <= found


@pytest.mark.parametrize("origin, place", [
    ('{"url": "file://HERE", "dir_info": {}}', "HERE"),
    ('{"url": "file://HERE/gone.whl"}', "PATH_OF_SHOESTRING"),
    ('{"url": "https://example.org/a.whl"}', "PATH_OF_SHOESTRING"),
    ("not json", "PATH_OF_SHOESTRING"),
    (None, "PATH_OF_SHOESTRING"),
])  # fmt: skip
def test_an_extra_of_an_installed_package_is_installed_from_where_it_came(origin, place, tmp_path, monkeypatch):
    here = tmp_path / "a checkout"
    here.mkdir()

    class Installed:
        def read_text(self, name):
            return origin and origin.replace("HERE", here.as_uri().removeprefix("file://"))

    monkeypatch.setattr(errors, "__file__", str(tmp_path / "site-packages" / "shoestring" / "errors.py"))
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Installed())
    assert errors.how_to_install("plot") == f"pip install '{place.replace('HERE', str(here))}[plot]'"
