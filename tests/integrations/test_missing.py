"""A library that an integration needs and that is not installed is named, with the command that gets it."""

import importlib
import sys

import pytest


@pytest.mark.parametrize(("name", "library"), [("huggingface", "transformers"), ("lightning", "lightning")])
def test_what_is_missing_is_told_with_the_command_that_installs_it_from_a_checkout(name, library, monkeypatch):
    monkeypatch.delitem(sys.modules, f"shoestring.integrations.{name}", raising=False)
    for known in [module for module in sys.modules if module.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, known)
    monkeypatch.setitem(sys.modules, library, None)  # as if it were not there
    with pytest.raises(ImportError, match=rf"needs .*{library}.*: pip install '.*\[integrations\]'"):
        importlib.import_module(f"shoestring.integrations.{name}")
