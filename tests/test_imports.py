"""Who imports whom: what every file imports, read without running it, is ARCHITECTURE.md's table."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "shoestring"
PUBLIC = (SOURCE / "__init__.py", SOURCE / "__main__.py")  # they have every name
FILES = [path for path in sorted(SOURCE.rglob("*.py")) if path not in PUBLIC]
PREDICTING = ("task", "kernels", "models", "step", "profiling", "passes", "techniques", "planning", "training")
PUBLISHING = ("integrations", "studies", "reporting", "cli")


@cache
def table() -> dict[str, frozenset[str]]:
    """-> {package: the packages that it imports}, in the table's order."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| (.*) \|$", text, re.MULTILINE)
    return {package: frozenset(re.findall(r"`(\w+)`", words)) for package, words in rows}


def name_of(path: Path) -> str:
    """src/shoestring/training/loop.py -> "training.loop"."""
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def package_of(module: str) -> str:
    """A module -> its row of the table; "" stands for the names of `shoestring` itself."""
    return module.split(".")[0]


@cache
def imported(path: Path) -> set[str]:
    """A file -> the modules of ours that it imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            found |= {name.removeprefix("shoestring").strip(".") for name in names if is_ours(name)}
        elif isinstance(node, ast.ImportFrom) and (base := base_of(path, node)) is not None:
            names = [alias.name for alias in node.names if alias.name != "__version__"]
            found |= {as_module(f"{base}.{name}".strip("."), base) for name in names}
    return found


def base_of(path: Path, node: ast.ImportFrom) -> str | None:
    """The module of ours that `from ... import` names; None where it is not ours."""
    if node.level:
        here = path.relative_to(SOURCE).parts[: -node.level]
        return ".".join([*here, *filter(None, [node.module])])
    name = node.module or ""
    return name.removeprefix("shoestring").strip(".") if is_ours(name) else None


def is_ours(name: str) -> bool:
    return name.split(".")[0] == "shoestring"


def as_module(name: str, base: str) -> str:
    """`from base import x` -> base.x where that is a module, else base."""
    path = SOURCE.joinpath(*name.split("."))
    return name if path.is_dir() or path.with_suffix(".py").exists() else base


def test_the_table_names_every_package_and_no_other():
    assert {package_of(name_of(path)) for path in FILES} == set(table())


@pytest.mark.parametrize("package", table())
def test_a_package_imports_what_its_row_names_and_nothing_else(package):
    files = [path for path in FILES if package_of(name_of(path)) == package]
    found = {package_of(module) for path in files for module in imported(path)}
    assert found - {package, "errors", ""} == table()[package]


def test_the_packages_are_a_line_each_imports_only_those_above_it():
    order = list(table())
    assert all(order.index(other) < order.index(package) for package in order for other in table()[package])


@pytest.mark.parametrize("package", [package for package in table() if package not in PUBLISHING])
def test_only_who_shows_things_imports_the_names_of_the_package_itself(package):
    files = [path for path in FILES if package_of(name_of(path)) == package]
    assert all("" not in imported(path) for path in files)


@pytest.mark.parametrize("package", PREDICTING)
def test_a_prediction_never_reaches_a_measurement(package):
    assert "measuring" not in reach(package)


def reach(package: str) -> set[str]:
    """A package -> all packages that its files import, directly or through others."""
    seen, todo = set(), {package}
    while todo:
        seen |= todo
        files = [path for path in FILES if package_of(name_of(path)) in todo]
        todo = {package_of(module) for path in files for module in imported(path)} - seen
    return seen


@cache
def imported_at_once(path: Path) -> frozenset[str]:
    """A file -> the modules of ours that run before it does: those it imports at its top, and their parents."""
    module = name_of(path)
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (base := base_of(path, node)) is not None:
            found |= {as_module(f"{base}.{alias.name}".strip("."), base) for alias in node.names}
    ancestors = {".".join(name.split(".")[:length]) for name in found for length in range(1, name.count(".") + 1)}
    return frozenset(name for name in found | ancestors if name and not f"{module}.".startswith(f"{name}."))


def test_any_module_may_be_imported_first():
    """No module waits, through whatever others, for itself."""
    names = {name_of(path): path for path in FILES}
    waits = {name: imported_at_once(path) & set(names) for name, path in names.items()}
    while ready := {name for name, others in waits.items() if not others}:
        waits = {name: others - ready for name, others in waits.items() if name not in ready}
    assert not waits


def test_a_rule_that_is_broken_is_seen(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    (tmp_path / "measuring").mkdir()
    (tmp_path / "profiling").mkdir()
    path = tmp_path / "profiling" / "trace.py"
    path.write_text("def f():\n    from ..measuring import measure\n    import shoestring.cli.main\n")
    assert imported(path) == {"measuring", "cli.main"}
    assert not {package_of(module) for module in imported(path)} <= table()["profiling"]
