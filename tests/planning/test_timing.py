"""The predicted time of a step follows its kernels, the widths of its maps, and whether its passes are taped."""

import pytest

import zoo
from shoestring import builtin
from shoestring.planning.options import Option
from shoestring.planning.search import Search
from shoestring.planning.timing import Work, seconds_of
from shoestring.rates import Rates
from shoestring.techniques.technique import Risk

SPEEDS = {"plain 32": 100.0, "lean 32": 200.0, "lean 4": 10.0, "plain 0": 50.0, "lean 0": 25.0}
RATES = Rates(100, 80, 1e18, 1e-18, speeds=SPEEDS)  # nothing but FLOPs takes time


def work(width: int, **more: object) -> Work:
    return Work({width: 1000.0}, 0, 0, 0, **more)


def test_a_product_takes_the_time_of_its_kernel_on_maps_of_its_width():
    assert seconds_of(work(32), RATES) == 10
    assert seconds_of(work(28), RATES, lean=True) == 5  # 32 is the nearest
    assert seconds_of(work(7), RATES, lean=True) == 100
    assert seconds_of(work(7), RATES) == 10
    assert seconds_of(work(0), RATES, lean=True) == 20  # PyTorch's, in 32 bits
    assert seconds_of(work(0, narrow=True), RATES, lean=True) == 40
    assert seconds_of(work(32), RATES, density=0.5) == pytest.approx(500 / 80)  # unknown: the overall rate


def test_every_pass_takes_its_time_for_the_weights_however_small_it_is():
    rates = Rates(100, 80, 1e18, 1e-18, weight_seconds={"plain 0": 0.5, "lean 0": 1.0, "sparse 4": 2.0})
    layers = Work({}, 0, 0, 0, weights={0: 10, 1: 100}, narrow=True)
    assert seconds_of(layers, rates, pieces=3) == pytest.approx(3 * 10 * 0.5)  # of convolutions nothing is known
    assert seconds_of(layers, rates, pieces=3, lean=True) == pytest.approx(3 * 10 * 1.0)
    assert seconds_of(layers, rates, pieces=2, density=0.5) == pytest.approx(2 * 0.5 * 100 * 2.0)


def test_many_small_microbatches_take_less_time_from_a_tape():
    busy = Work({}, 0, 100, 0)
    calls = Rates(1, 1, 1e18, 1e-3)
    for pieces in (1, 2, 10):
        taped, run = (seconds_of(busy._replace(static=static), calls, pieces, lean=True) for static in (True, False))
        assert taped < 0.6 * run


def test_a_trace_knows_widths_and_whether_a_tape_is_possible():
    search = Search(builtin("wrn-10-1", batch=4), 0, RATES)
    plain = search.traces.base(())
    assert set(plain.work.flops) == {0, 8, 16, 32} and plain.work.static
    assert plain.work.weights[0] == 640 and plain.work.weights[1] > 70_000  # the classifier, and the convolutions
    assert sum(plain.work.flops.values()) == sum(search.traces.of(()).flops[p] for p in ("forward", "backward"))
    assert not search.traces.base((("activations", "offload"),)).work.static
    assert search.traces.base((("activations", "int4"),)).work.static  # keys of random numbers go on from pass to pass
    # Nobody promised that the model does the same each time.
    assert not Search(zoo.gpt(), 0, RATES).traces.base(()).work.static


def test_gradients_that_are_taken_in_the_backward_pass_leave_no_tape():
    search = Search(builtin("wrn-10-1", batch=4), 0, Rates(1, 1, 1e18, 1e-3))  # calls take time too
    pieces, checkpoint = ("microbatch", 2), ("checkpoint", "residual-1")
    times = [
        search.seconds(Option((("optimizer", words), checkpoint, pieces), Risk.APPROXIMATE))
        for words in ("8bit", "8bit+8bit-gradient")
    ]
    assert times[0] < times[1]
