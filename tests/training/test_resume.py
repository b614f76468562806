from pathlib import Path

import pytest
from kills import SETTINGS, Server, check, quick_folder, remains


@pytest.fixture(scope="module")
def server():
    with Server() as server:
        yield server


@pytest.fixture
def folder():
    with quick_folder() as folder:
        yield Path(folder)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_run_killed_at_any_moment_ends_with_the_same_bits_as_one_that_was_not(server, setting, folder):
    """Weights, momenta, masks, generators, best, averages and log: every file but the record is the same. `make
    test-faults` does so at a thousand moments."""
    check(server, setting, kills=4, folder=folder, seed=1)


def test_a_kill_at_any_byte_of_a_save_loses_no_more_than_that_save(server, folder):
    server.session(setting="momentum", folder=str(folder / "whole"))
    whole = remains(folder / "whole")
    for number, place in enumerate([1, 8, 2_000, 12_000]):
        killed = folder / str(number)
        assert server.session(setting="momentum", folder=str(killed), bytes=place)
        server.session(setting="momentum", folder=str(killed))
        assert remains(killed) == whole
