"""The public API is what docs/api.md lists: made from docstrings, and all that docs and examples use."""

import ast
import re
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import shoestring

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def script():
    spec = spec_from_file_location("make_api", ROOT / "docs" / "make_api.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PUBLIC = script().PUBLIC | {module: names for module, (names, _) in script().PAGES.items()}


def is_public(name: str) -> bool:
    """ "shoestring.models.materialise" -> whether it, or what it is an attribute of, is listed; so are modules."""
    names = {f"{module}.{name}" for module, names in PUBLIC.items() for name in names}
    modules = {".".join(module.split(".")[:end]) for module in PUBLIC for end in range(1, module.count(".") + 2)}
    return name in modules | names or any(name.startswith(f"{known}.") for known in names)


def used(code: str) -> set[str]:
    """Python code -> the dotted names of ours in it: imported ones, and attributes of `shoestring`."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and (name := _dotted(node)):
            found.add(name)
    return {name for name in found if name.split(".")[0] == "shoestring"}


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value)):
        return f"{base}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def code_in(page: str) -> Iterator[str]:
    """A page -> its blocks of Python."""
    yield from re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def test_the_page_is_what_its_script_writes():
    assert (ROOT / "docs" / "api.md").read_text() == script().page(), "run python docs/make_api.py"


def test_the_package_offers_what_it_lists():
    assert all(getattr(shoestring, name).__doc__ for name in shoestring.__all__)
    assert set(shoestring.__all__) == set(PUBLIC["shoestring"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_shows_public_names_only(page):
    text = page.read_text()
    mentioned = set(re.findall(r"`(shoestring(?:\.\w+)+)", text)).union(*map(used, code_in(text)))
    assert not [name for name in mentioned if not is_public(name)]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_uses_public_names_only(path):
    names = used(path.read_text())
    assert names and not [name for name in names if not is_public(name)]


def test_a_private_name_is_seen():
    names = used("import shoestring\nfrom shoestring.step import Stepper\nshoestring.kernels.core\n")
    private = {"shoestring.step.Stepper", "shoestring.kernels", "shoestring.kernels.core"}
    assert {name for name in names if not is_public(name)} == private
    assert is_public("shoestring.Plan.from_json") and not is_public("shoestring.Planner")
