"""The table's tasks are small: their blocks would run whole."""

import pytest

from shoestring.passes import sweeps


@pytest.fixture(autouse=True)
def _several_pieces(monkeypatch):
    monkeypatch.setattr(sweeps, "PIECE_BYTES", 1 << 13)
