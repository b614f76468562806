import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Small models lose more to a second thread than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
