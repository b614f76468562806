"""The random generators that a model, its loss or its data may use: saved, restored, seeded."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch


@cache
def may_draw(func: Any) -> bool:
    """Whether an operator is one of those that draw from a generator."""
    return torch.Tag.nondeterministic_seeded in func.tags


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether this call of an operator draws from a generator: attention does for its dropout alone."""
    if not may_draw(func):
        return False
    place = next((n for n, one in enumerate(func._schema.arguments) if one.name == "dropout_p"), None)
    return place is None or bool(kwargs.get("dropout_p", args[place] if place < len(args) else 0))


@dataclass(frozen=True)
class RandomState:
    """The state of PyTorch's, NumPy's and Python's generators, and of named ones."""

    generators: Mapping[str, torch.Generator]

    def state(self) -> dict[str, Any]:
        version, words, gauss = random.getstate()
        numpy = np.random.get_state(legacy=False)
        return {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
            "python": (version, torch.tensor(words), gauss),
            "numpy": numpy | {"state": numpy["state"] | {"key": torch.from_numpy(numpy["state"]["key"])}},
            "generators": {name: generator.get_state() for name, generator in self.generators.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        version, words, gauss = state["python"]
        numpy = state["numpy"]
        torch.set_rng_state(state["torch"])
        if state["cuda"]:
            torch.cuda.set_rng_state_all(state["cuda"])
        random.setstate((version, tuple(words.tolist()), gauss))
        np.random.set_state(numpy | {"state": numpy["state"] | {"key": numpy["state"]["key"].numpy()}})
        for name, generator in self.generators.items():
            generator.set_state(state["generators"][name])


@contextmanager
def unmoved() -> Iterator[None]:
    """The global generators are afterwards as they were: what is drawn inside changes no run."""
    before = RandomState({}).state()
    try:
        yield
    finally:
        RandomState({}).restore(before)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds all global generators inside the context, and restores them after it."""
    with unmoved():
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        yield
