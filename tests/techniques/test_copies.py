"""A copied model is the same model, and takes no more memory than one that was made."""

import sys

from torch import nn

from shoestring.techniques.copies import copied


def test_modules_of_a_copy_share_the_keys_of_their_attributes():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(nn.BatchNorm2d(3)))
    twin = copied(model)
    assert sys.getsizeof(vars(twin[0])) < 1.5 * sys.getsizeof(vars(model[0]))
    assert repr(twin) == repr(model)
    assert [*twin.state_dict()] == [*model.state_dict()]
    assert twin[0].weight is not model[0].weight
    assert vars(twin[0]).keys() == vars(model[0]).keys()
