"""Which batch norms can be done together with what follows them."""

import torch
import torch.nn.functional as F
from torch import nn

from shoestring import SGD, Task
from shoestring.passes.patterns import learn


class Net(nn.Module):
    """Batch norm -> `after`; the rest makes it a model."""

    def __init__(self, after, affine=True):
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(4, affine=affine), nn.Conv2d(4, 4, 1)
        self.after = after

    def forward(self, x):
        return self.after(self, self.norm(self.conv(x)))


def patterns(after, **settings):
    task = Task(Net(after, **settings), lambda m, b: m(b).mean(), torch.randn(2, 4, 5, 5), SGD())
    return learn(task, task.batch)


def test_a_norm_whose_rectified_output_goes_to_one_convolution():
    found = patterns(lambda m, y: m.conv(F.relu(y)))
    assert found.norm_relu_conv == {"norm.weight"}
    assert found.norm_relu == frozenset()
    assert (found.norms, found.relus) == (1, 1)


def test_in_place_relu_is_the_same_pattern():
    assert patterns(lambda m, y: m.conv(F.relu(y, inplace=True))).norm_relu_conv == {"norm.weight"}
    assert patterns(lambda m, y: m.conv(y.relu_())).norm_relu_conv == {"norm.weight"}


def test_a_rectified_output_that_somebody_else_sees_is_not_hidden():
    found = patterns(lambda m, y: m.conv(r := F.relu(y)) + r)
    assert found.norm_relu_conv == frozenset()
    assert found.norm_relu == {"norm.weight"}


def test_a_norm_that_somebody_else_sees_is_in_no_pattern():
    found = patterns(lambda m, y: m.conv(F.relu(y)) + y)
    assert found.norm_relu_conv == found.norm_relu == frozenset()
    assert found.norms == 1


def test_looking_at_the_shape_is_not_seeing():
    assert patterns(lambda m, y: m.conv(F.relu(y)).view(y.shape[0], -1)).norm_relu_conv == {"norm.weight"}


def test_a_norm_that_is_called_twice_is_in_no_pattern():
    found = patterns(lambda m, y: m.conv(F.relu(m.norm(F.relu(y)))))
    assert found.norm_relu_conv == found.norm_relu == frozenset()
    assert found.norms == 2


def test_a_norm_without_weights_has_no_name_to_be_known_by():
    found = patterns(lambda m, y: m.conv(F.relu(y)), affine=False)
    assert found.norm_relu_conv == frozenset()


def test_learning_touches_no_buffer():
    task = Task(Net(lambda m, y: F.relu(y)), lambda m, b: m(b).mean(), torch.randn(2, 4, 5, 5), SGD())
    before = {name: buffer.clone() for name, buffer in task.model.named_buffers()}
    learn(task, task.batch)
    assert all(torch.equal(buffer, before[name]) for name, buffer in task.model.named_buffers())
