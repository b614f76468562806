import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "contract"))  # for its runs


@pytest.fixture(autouse=True)
def one_thread():
    """Models this small gain nothing from threads, and lose much where other processes want them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
