"""Built-in tasks: names, sizes and what is refused."""

import pytest

from shoestring import ShoestringError, builtin
from shoestring.task import SGD


def test_the_image_tasks_train_as_in_the_seeds():
    task = builtin("wrn-28-2", device="meta")
    assert task.name == "wrn-28-2"
    assert task.count(task.batch) == 100
    assert task.batch[0].shape == (100, 3, 32, 32)
    assert task.optimizer == SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)


@pytest.mark.parametrize("name", ["wrn", "wrn-28", "wrn--28-2", "wrn-28-2x", "", "vgg"])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(ShoestringError, match=r"no built-in model .*wrn-28-2"):
        builtin(name)


@pytest.mark.parametrize("batch", [0, -5, 10**9, 2.5, "many"])
def test_a_batch_out_of_range_names_the_bound(batch):
    with pytest.raises(ShoestringError, match=rf"batch {batch} is out of range: .*81,380"):
        builtin("wrn-28-2", batch=batch)


def test_an_option_that_a_model_does_not_have_lists_those_it_has():
    with pytest.raises(ShoestringError, match="has no option 'tokens': it takes batch, classes, image"):
        builtin("wrn-28-2", tokens=4000)
