from pathlib import Path

import pytest
import torch

ONE_THREAD = {"contract", "distributed", "faults", "generated", "techniques", "training"}  # folders


@pytest.fixture(autouse=True)
def one_thread(request):
    """Models this small gain nothing from threads, and lose much where other processes want them."""
    before = torch.get_num_threads()
    if Path(request.path).parent.name in ONE_THREAD:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
