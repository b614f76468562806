import growth
import pytest
from small import Noise, task

from shoestring import Plan, apply
from shoestring.kernels import sparse_conv
from shoestring.techniques import sparsity


@pytest.mark.skipif(growth.malloc_bytes() is None, reason="needs glibc's mallinfo2")
@pytest.mark.parametrize("rewires", [False, True])
def test_steps_and_rewirings_leave_no_more_than_a_stated_number_of_bytes_behind(rewires):
    more_bytes, more_objects, times = growth.grown(300, 100, rewires)
    assert more_bytes <= growth.MOST_BYTES and more_objects <= growth.MOST_OBJECTS
    assert (times >= 30) == rewires


def test_nothing_is_remembered_of_the_numbers_of_nonzeros_that_layers_had():
    small = sparsity.apply(task(), sparsity.Settings(50, frequency_multiplier=100))
    lean = apply(small, Plan())
    lean.stepper.length, batch = 400, Noise().read(0, 0)
    for _ in range(100):
        lean.step(batch)
    layers = sum(isinstance(module, sparsity.layers.SparseConv2d) for module in lean.model.modules())
    assert small.after_update[0].times >= 30 and layers >= 2
    assert sparse_conv._call.cache_info().currsize <= layers
    assert sparse_conv._check_sizes.cache_info().currsize <= 2 * layers
