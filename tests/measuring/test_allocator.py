"""The allocator meter reads planted tensors to the byte and tells an operator's scratch from tensors."""

import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoestring.errors import ShoestringError
from shoestring.measuring.allocator import Event, measure_allocator, read


def block(size):
    return torch.empty(size, dtype=torch.uint8)


def test_a_held_block_counts_until_the_end():
    kept = []
    reading = measure_allocator(lambda: kept.append(block(12_345)))
    assert (reading.peak_bytes, reading.end_bytes) == (12_345, 12_345)


def test_a_dropped_block_counts_at_the_peak_only():
    def run():
        first = block(1000)
        del first
        return block(300)

    reading = measure_allocator(run)
    assert (reading.peak_bytes, reading.end_bytes) == (1000, 300)
    assert reading.timeline == (1000, 0, 300)


def test_nested_blocks_add_up_where_they_overlap():
    def inner():
        third = block(30)
        return third.numel()

    def run():
        first = block(100)
        second = block(70)
        inner()
        del first
        inner()
        return second

    assert measure_allocator(run).timeline == (100, 170, 200, 170, 70, 100, 70)


def test_what_a_run_returns_is_alive_at_its_end():
    assert measure_allocator(lambda: block(500)).end_bytes == 500


def test_a_run_that_allocates_nothing_reads_zero():
    reading = measure_allocator(lambda: None)
    assert (reading.peak_bytes, reading.end_bytes, reading.workspace_peak_bytes) == (0, 0, 0)


def test_a_block_older_than_the_run_counts_neither_alive_nor_freed():
    old = [block(1000)]

    def run():
        new = block(600)
        old.clear()
        return new

    reading = measure_allocator(run)
    assert (reading.peak_bytes, reading.end_bytes) == (600, 600)


def test_held_tensors_are_added_once_however_many_view_them():
    weight = torch.empty(10, 10)
    reading = measure_allocator(lambda: block(50), held=[weight, weight[3:], weight.t()])
    assert (reading.start_bytes, reading.peak_bytes, reading.tensor_peak_bytes) == (400, 450, 450)


def test_only_the_calling_thread_is_heard():
    def run():
        thread = threading.Thread(target=lambda: block(4000))
        thread.start()
        thread.join()
        return block(100)

    assert measure_allocator(run).peak_bytes == 100


def test_a_block_that_was_freed_unheard_ends_when_its_address_is_given_out_again():
    events = [Event(time, 0xA0, 100, "aten::empty", call) for time, call in enumerate((0, 1))]
    assert read(events).timeline == (100, 100)


def test_the_peak_says_which_operators_allocated_it():
    def run():
        first = torch.zeros(100)
        second = first.exp()
        return second[:50].relu()

    reading = measure_allocator(run)
    assert reading.peak_operation == "aten::relu"
    assert reading.by_operation == {"aten::zeros": 400, "aten::exp": 400, "aten::relu": 200}


def test_nchw_convolution_hides_one_copy_of_its_input_forward_and_two_backward():
    if not torch.backends.mkldnn.is_available():
        pytest.skip("oneDNN is not in this torch")
    image = torch.zeros(100, 32, 32, 32, requires_grad=True)
    weight = torch.zeros(32, 32, 3, 3, requires_grad=True)
    image_bytes = image.numel() * 4

    def forward():
        return functional.conv2d(image, weight, padding=1)

    output = forward()
    gradient = torch.zeros_like(output)
    ahead = measure_allocator(forward)
    back = measure_allocator(lambda: torch.autograd.grad(output, [image, weight], gradient))
    assert ahead.tensor_peak_bytes == image_bytes
    assert ahead.workspace_peak_bytes == pytest.approx(image_bytes, rel=0.05)
    assert back.tensor_peak_bytes == image_bytes + weight.numel() * 4
    assert image_bytes <= back.workspace_peak_bytes <= 2.1 * image_bytes
    for reading in (ahead, back):
        assert reading.peak_bytes == reading.tensor_peak_bytes + reading.workspace_at_peak_bytes


def test_tensors_that_a_composite_operator_passes_on_are_no_workspace():
    """`linear` is only a recipe: the transposed copy and the product inside it are tensors, as in a trace."""
    head = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128))
    batch = torch.zeros(256, 64)
    with torch.no_grad():
        reading = measure_allocator(lambda: head(batch))
    hidden = 256 * 128 * 4
    assert 2 * hidden <= reading.tensor_peak_bytes <= 2.05 * hidden
    assert reading.workspace_peak_bytes < 0.05 * hidden


class StorageWatch(TorchDispatchMode):
    """Counts the storages that operators return: another way to the same figure."""

    def __init__(self):
        super().__init__()
        self.sizes, self.peak_bytes = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.watch(leaf.untyped_storage())
        return out

    def watch(self, storage):
        if storage._cdata not in self.sizes:
            self.sizes[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, self.sizes.pop, storage._cdata)
            self.peak_bytes = max(self.peak_bytes, sum(self.sizes.values()))


def test_the_tensor_part_of_a_training_run_is_what_a_dispatch_mode_counts():
    def train():
        layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10)]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.rand(16, 3, 16, 16)).pow(2).mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    reading = measure_allocator(train)
    with StorageWatch() as watch:
        train()
    assert reading.tensor_peak_bytes == watch.peak_bytes
    assert reading.end_bytes == 0


def test_scratch_freed_before_the_output_is_born_takes_the_outputs_place():
    """One call: 80 of scratch, freed; then an output of 100: nothing was needed on top of the output."""
    sizes = ((1, 80), (1, -80), (2, 100))
    events = [Event(time, address, size, "op", 0) for time, (address, size) in enumerate(sizes)]
    reading = read(events)
    assert (reading.peak_bytes, reading.tensor_peak_bytes, reading.workspace_peak_bytes) == (100, 100, 0)


def test_a_meter_under_another_profiler_is_refused():
    with (
        profile(activities=[ProfilerActivity.CPU]),
        pytest.raises(ShoestringError, match="is already running in this thread"),
    ):
        measure_allocator(lambda: None)


def test_an_error_in_the_run_comes_through_and_the_meter_works_again():
    with pytest.raises(ZeroDivisionError):
        measure_allocator(lambda: 1 / 0)
    assert measure_allocator(lambda: block(7)).peak_bytes == 7
