"""Every function that a lean pass takes over gives PyTorch's numbers, however it is called and wherever it stands."""

import copy

import pytest
import torch
import torch.nn.functional as F
from middles import MIDDLES, PLANS, STRATEGIES, Doubled, Net, Switched, check_same, images, loss_of

from shoestring import SGD, Plan, Task, apply


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_gives_pytorchs_numbers_for_the_usual_call(strategy):
    torch.manual_seed(0)
    check_same(Net(MIDDLES["modules"]), images(), {"checkpoint": strategy})


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("middle", MIDDLES.values(), ids=MIDDLES)
def test_an_exact_plan_gives_pytorchs_numbers_whatever_stands_between_norm_and_convolution(middle, plan):
    torch.manual_seed(0)
    check_same(Net(middle), images(), plan)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "conv",
    [{"padding": "same"}, {"padding": "valid"}, {"padding": "same", "dilation": 2},
     {"padding": "same", "kernel_size": 2}, {"padding": "same", "kernel_size": (2, 3)},
     {"padding_mode": "reflect"}, {"padding_mode": "circular"}, {"padding": (0, 1)}, {"groups": 2}, {"stride": 2}],
    ids=str,
)  # fmt: skip
def test_an_exact_plan_gives_pytorchs_numbers_for_every_padding(conv, plan):
    torch.manual_seed(0)
    check_same(Net(MIDDLES["modules"], **conv), images(), plan)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("other", sorted(set(MIDDLES) - {"modules", "own autograd function"}))
def test_what_the_code_does_now_counts_and_not_what_it_did_when_it_was_examined(other, plan):
    torch.manual_seed(0)
    switch = Switched(MIDDLES["modules"], MIDDLES[other])
    check_same(Net(switch), images(), plan, before_step=lambda model: setattr(switch, "on", False))


def test_a_custom_autograd_function_where_a_convolution_was_is_refused_and_not_trained_on_nan():
    switch = Switched(MIDDLES["modules"], lambda m, y: Doubled.apply(F.relu(y)))
    batch = images()
    lean = apply(Task(Net(switch).double(), loss_of, batch, SGD(lr=0.1)), Plan(checkpoint="no-bn"))
    switch.on = False
    with pytest.raises(Exception, match="a gradient reached the output of a fused batch norm"):
        lean.step(batch)


@pytest.mark.parametrize("precision", ["fp16", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("middle", MIDDLES.values(), ids=MIDDLES)
def test_in_16_bits_every_call_style_trains_near_pytorch(middle, precision):
    torch.manual_seed(0)
    model, (pictures, labels) = Net(middle), images()
    batch = pictures.float(), labels
    expected = loss_of(copy.deepcopy(model), batch).detach()
    lean = apply(Task(model, loss_of, batch, SGD(lr=0.01)), Plan(precision=precision))
    torch.testing.assert_close(lean.step(batch), expected, rtol=0.05, atol=0.02)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("plan", PLANS)
def test_a_local_autocast_computes_in_its_own_type(plan):
    def half(block, y):
        y = F.relu(y)
        with torch.autocast("cpu", torch.bfloat16):
            y = block.conv(y)
        assert y.dtype == torch.bfloat16
        return y.float()

    torch.manual_seed(0)
    model, (pictures, labels) = Net(half), images()
    batch = pictures.float(), labels
    expected = loss_of(copy.deepcopy(model), batch).detach()
    lean = apply(Task(model, loss_of, batch, SGD(lr=0.1)), Plan(**plan))
    torch.testing.assert_close(lean.step(batch), expected, rtol=1e-5, atol=1e-5)
