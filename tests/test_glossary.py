"""The field's words lead to our places: glossary, cards and modules name them, and point at each other."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "shoestring"
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
CARDS = sorted((ROOT / "docs" / "techniques").glob("*.md"))
# The field's word -> the module and the card that have it in their first lines.
WORDS = {
    "gradient accumulation": "microbatch",
    "activation checkpointing": "checkpoint",
    "optimizer in backward": "optimizer",
    "offload": "activations",
    "master copy": "precision",
    "sparse training": "sparsity",
    "fsdp": "shard",
}


def opening(path: Path) -> str:
    """The first lines of a page, or of a module's docstring."""
    text = path.read_text()
    words = ast.get_docstring(ast.parse(text)) or "" if path.suffix == ".py" else text
    return " ".join(words.lower().split("\n\n```")[0].split()[:60])


@pytest.mark.parametrize("word", WORDS)
def test_a_word_of_the_field_opens_its_module_and_its_card_and_is_in_the_glossary(word):
    technique = WORDS[word]
    assert word in opening(SOURCE / "techniques" / technique / "__init__.py")
    assert word in opening(ROOT / "docs" / "techniques" / f"{technique}.md")
    assert word in GLOSSARY.lower()


@pytest.mark.parametrize(
    "word", ["quantis", "quantiz", "stochastic rounding", "reference implementation", "half precision"]
)
def test_other_words_of_the_field_are_in_the_glossary(word):
    assert word in GLOSSARY.lower()


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.stem)
def test_a_card_and_its_module_point_at_each_other(card):
    module = SOURCE / "techniques" / card.stem / "__init__.py"
    assert f"docs/techniques/{card.name}" in (ast.get_docstring(ast.parse(module.read_text())) or "")
    assert f"`techniques/{card.stem}/`" in card.read_text()
    assert "](../glossary.md)" in card.read_text() and "](../references.md)" in card.read_text()


def test_every_technique_has_a_card():
    folders = {path.name for path in (SOURCE / "techniques").iterdir() if (path / "__init__.py").exists()}
    assert folders == {card.stem for card in CARDS}


def test_every_place_that_the_glossary_names_exists():
    places = re.findall(r"`((?:techniques|kernels|passes|planning)/[\w/.]*)`", GLOSSARY)
    assert places and all((SOURCE / place).exists() for place in places)
    assert all((ROOT / place).exists() for place in re.findall(r"`(csrc/[\w.]+)`", GLOSSARY))


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))],
                         ids=lambda page: page.name)  # fmt: skip
def test_every_link_of_a_page_leads_somewhere(page):
    links = re.findall(r"\]\((?!http)([^)#]*)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if link and not (page.parent / link).exists()] == []
