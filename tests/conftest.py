import os
from pathlib import Path

import pytest
import torch

from shoestring.measuring import products, rates
from shoestring.rates import NOMINAL

# Once for all workers, which inherit it: a product of PyTorch's own would end them.
if products.VARIABLE not in os.environ and products.products_crash():
    products.without_amx()

ONE_THREAD = {"contract", "distributed", "faults", "generated", "techniques", "training"}  # folders


@pytest.fixture(autouse=True)
def one_thread(request):
    """Models this small gain nothing from threads, and lose much where other processes want them."""
    before = torch.get_num_threads()
    if Path(request.path).parent.name in ONE_THREAD:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def rates_of_no_machine():
    """No timing decides a test; and measuring takes ten seconds for each cache folder and number of threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rates, "device_rates", lambda: NOMINAL)
        yield
