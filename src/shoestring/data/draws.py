"""The order of the data, and all its randomness, without state: a draw is a function of (seed, epoch, index).

So nothing has to be saved. A shuffled order of n items is a permutation computed position by position (a Feistel
network, iterated until it lands below n): even a million images are shuffled without an array of indices.
"""

import numpy as np

_ROUNDS = 6


def mix(*keys: int | np.ndarray) -> np.ndarray:
    """Integers or arrays of them -> well mixed 64-bit numbers (the SplitMix64 finaliser, key after key)."""
    state = np.zeros(1, np.uint64)
    for key in keys:
        state = state + np.asarray(key).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state


def shuffled(positions: np.ndarray, count: int, *key: int) -> np.ndarray:
    """Positions in a shuffled order of `count` items -> the items' indices. `key` chooses the order.

    >>> sorted(shuffled(np.arange(10), 10, 7).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    half = max(1, (count - 1).bit_length() + 1 >> 1)
    turns = mix(*key, np.arange(_ROUNDS))
    items = _feistel(np.asarray(positions, np.uint64), half, turns)
    while (outside := items >= count).any():
        items[outside] = _feistel(items[outside], half, turns)
    return items.astype(np.int64)


def _feistel(numbers: np.ndarray, half: int, turns: np.ndarray) -> np.ndarray:
    """A permutation of the numbers of 2 * half bits: left, right = right, left xor hash(right), each turn."""
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = numbers >> bits, numbers & mask
    for turn in turns:
        left, right = right, left ^ (mix(turn ^ right) & mask)
    return left << bits | right
