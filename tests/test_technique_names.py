"""The planner and the command line know no technique by name: their source, read without running it, has none."""

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

from shoestring import Task
from shoestring.techniques import WORDS

SOURCE = Path(__file__).parent.parent / "src" / "shoestring"
NAMES = {name for word in WORDS for name in (word.name, word.module)}
OF_A_TASK = {f.name for f in fields(Task)}  # `task.optimizer` is a task's optimizer, not a technique


def names_in(source: str) -> list[str]:
    """The techniques that a source names: in identifiers, keys and flags, not in docstrings, help and messages."""
    tree = ast.parse(source)
    ignored = {id(part) for node in ast.walk(tree) for root in prose_of(node) for part in ast.walk(root)}
    found = [text for node in ast.walk(tree) if id(node) not in ignored for text in texts_of(node)]
    return [text for text in found if NAMES & set(re.split(r"[\W_]+", text))]


def prose_of(node: ast.AST) -> list[ast.AST]:
    """The parts of a node that speak to a user: a docstring, `help=...`, and the examples of a command."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
        return [node.body[0]]
    if isinstance(node, ast.keyword) and node.arg == "help":
        return [node.value]
    if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["EXAMPLES"]:
        return [node.value]
    return []


def texts_of(node: ast.AST) -> list[str]:
    match node:
        case ast.Name(id=text) | ast.FunctionDef(name=text) | ast.ClassDef(name=text) | ast.alias(name=text):
            return [text]
        case ast.arg(arg=text):
            return [text]
        case ast.Attribute(attr=text) | ast.keyword(arg=str(text)):
            return [] if text in OF_A_TASK else [text]
        case ast.ImportFrom(module=str(text)):
            return [text]
        case ast.Constant(value=str(text)):
            is_sentence = " " in text.strip()  # a message to a user, in which a flag is still a name
            return re.findall(r"--\w+", text) if is_sentence else [text]
    return []


@pytest.mark.parametrize("package", ["planning", "cli"])
def test_no_technique_is_named_in(package):
    found = {
        path.name: names for path in sorted((SOURCE / package).glob("*.py")) if (names := names_in(path.read_text()))
    }
    assert not found


@pytest.mark.parametrize(
    "source",
    ["plan.microbatch", "from ..techniques.sparsity import select", "settings['precision']", "import a.checkpoint",
     "f(nonzero=30)", "def f(optimizer): pass", "f'--microbatch {size}'", "microbatch_sizes = 3"],
)  # fmt: skip
def test_a_name_is_seen_wherever_it_stands(source):
    assert names_in(source)


@pytest.mark.parametrize(
    "source",
    ['"""Plans microbatch sizes."""', "def f():\n    'the precision'", "add('--size', help='of a microbatch')",
     "EXAMPLES = ('--nonzero 30',)", "task.optimizer", "task.with_(optimizer=SGD())", "fail('of its optimizer')"],
)  # fmt: skip
def test_prose_and_the_fields_of_a_task_are_no_names(source):
    assert not names_in(source)
