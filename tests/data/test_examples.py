import doctest
from importlib import import_module

import pytest


@pytest.mark.parametrize("module", ["draws", "language", "token_batches", "vocabulary"])
def test_the_examples_in_the_documentation_are_true(module):
    results = doctest.testmod(import_module(f"shoestring.data.{module}"))
    assert results.attempted and not results.failed
