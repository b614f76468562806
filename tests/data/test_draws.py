import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.data.draws import mix, shuffled


@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_a_shuffled_order_holds_each_item_once(count, seed, epoch):
    assert (np.sort(shuffled(np.arange(count), count, seed, epoch)) == np.arange(count)).all()


def test_an_order_is_known_position_by_position():
    whole = shuffled(np.arange(1000), 1000, 3, 1)
    assert (shuffled(np.array([700, 5]), 1000, 3, 1) == whole[[700, 5]]).all()


def test_orders_of_different_epochs_and_seeds_are_unrelated():
    orders = [shuffled(np.arange(5000), 5000, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    related = np.corrcoef(orders) - np.eye(4)
    assert abs(related).max() < 0.06 and abs(np.corrcoef(orders[0], np.arange(5000))[0, 1]) < 0.06


def test_every_item_comes_to_every_place_equally_often():
    places = np.zeros((10, 10))
    for epoch in range(4000):
        places[np.arange(10), shuffled(np.arange(10), 10, 0, epoch)] += 1
    assert abs(places / 400 - 1).max() < 0.2


def test_neighbours_in_the_data_do_not_stay_neighbours():
    gaps = np.diff(shuffled(np.arange(50_000), 50_000, 1, 0))
    assert (abs(gaps) == 1).mean() < 0.001


def test_mixed_numbers_use_all_bits():
    bits = np.unpackbits(mix(1, np.arange(4096)).view(np.uint8)).reshape(-1, 64).mean(0)
    assert abs(bits - 0.5).max() < 0.05
