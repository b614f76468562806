"""Copies of models whose weights have no memory yet, which techniques change in place of the user's."""

import copy

from torch import nn


def copied(model: nn.Module) -> nn.Module:
    """A deep copy of a model. Its modules share the keys of their attributes as newly made ones of a class do; after
    copy.deepcopy alone each has a dictionary of its own, three times the size."""
    model = copy.deepcopy(model)
    for module in model.modules():
        fresh = object.__new__(type(module))
        for name, value in vars(module).items():
            object.__setattr__(fresh, name, value)
        module.__dict__ = vars(fresh)
    return model
