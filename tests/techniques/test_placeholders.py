"""What a fused batch norm returns is never read as a number, and who looks at a layer by a hook sees real values."""

import pytest
import torch
import torch.nn.functional as F
from middles import MIDDLES, Net, Switched, check_same, images, loss_of
from torch import nn

from shoestring import SGD, Plan, ShoestringError, Task, apply
from shoestring.passes.functions import lean_relu

PLANS = [{"checkpoint": "no-bn"}, {"checkpoint": "residual-1*"}, {"precision": "fp16"}, {"checkpoint": "residual-1"}]


def net() -> tuple[Net, tuple]:
    torch.manual_seed(0)
    pictures, labels = images()
    return Net(MIDDLES["modules"]), (pictures.float(), labels)


def lean_of(model: nn.Module, batch, plan: dict):
    return apply(Task(model, loss_of, batch, SGD(lr=0.0)), Plan(**plan))


def hooks_on(module: nn.Module, see) -> None:
    module.register_forward_hook(lambda module, args, output: see(output))
    module.register_forward_pre_hook(lambda module, args: see(args[0]))


def is_real(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.device.type == "cpu"  # and not one of a trace


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("layer", ["norm", "relu", "conv"])
def test_a_hook_sees_real_values_at_once_and_later(layer, plan, when):
    (model, batch), seen, means = net(), [], []

    def see(tensor: torch.Tensor) -> None:
        if is_real(tensor):
            seen.append(tensor)
            means.append(float(tensor.detach().mean()))

    hooked = [getattr(block, layer) for block in model.blocks]
    if when == "before":
        [hooks_on(module, see) for module in hooked]
    lean = lean_of(model, batch, plan)
    if when == "after":
        [hooks_on(module, see) for module in hooked]
    lean.step(batch)
    assert len(seen) >= 6
    assert all(tensor.isfinite().all() for tensor in seen)
    assert means == pytest.approx([float(tensor.detach().mean()) for tensor in seen])


def test_a_hook_for_every_module_sees_real_values():
    (model, batch), seen = net(), []
    lean = lean_of(model, batch, {"checkpoint": "no-bn"})
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(output))
    try:
        lean.step(batch)
    finally:
        hook.remove()
    assert len(seen) > 10
    assert all(tensor.isfinite().all() for tensor in seen)


@pytest.mark.parametrize("plan", PLANS[:2], ids=str)
def test_a_backward_hook_sees_pytorchs_gradients(plan):
    found = {}

    def watch(model: nn.Module) -> None:
        def note(module, grad_input, grad_output):
            found.setdefault(id(model), []).append(grad_output[0].clone())

        for block in model.blocks:
            block.norm.register_full_backward_hook(note)

    torch.manual_seed(0)
    check_same(Net(MIDDLES["modules"]), images(), plan, before_step=watch)
    ours, theirs = found.values()
    assert len(ours) == len(theirs) == 6
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_map_that_the_model_holds_as_an_attribute_is_real_after_the_step(plan):
    def held(block, y):
        block.last = F.relu(y)
        return block.conv(block.last)

    torch.manual_seed(0)
    model, (pictures, labels) = Net(held), images()
    lean_of(model, (batch := (pictures.float(), labels)), plan).step(batch)
    assert all(block.last.isfinite().all() and block.last.shape == (6, 4, 9, 9) for block in model.blocks)


def test_a_map_that_is_held_only_since_it_was_examined_is_filled_or_refused_and_never_nan():
    def held(block, y):
        block.last = F.relu(y)
        return block.conv(block.last)

    switch = Switched(MIDDLES["modules"], held)
    model, (pictures, labels) = Net(switch), images()
    batch = pictures.float(), labels
    lean = lean_of(model, batch, {"checkpoint": "no-bn"})
    switch.on = False
    with pytest.raises(ShoestringError, match=r"batch norm 'blocks.0.norm.weight' is used after the convolution"):
        lean.step(batch)


def test_models_that_checkpoint_themselves_are_not_fused_inside():
    def checkpointed(block, y):
        return torch.utils.checkpoint.checkpoint(block.conv, F.relu(y), use_reentrant=False)

    torch.manual_seed(0)
    check_same(Net(checkpointed), images(), {"checkpoint": "no-bn"})


@pytest.mark.parametrize("plan", PLANS[1:], ids=str)
def test_no_buffer_changes_twice_when_a_block_runs_again(plan):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), nn.InstanceNorm1d(3, track_running_stats=True)
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            self.calls += 1
            self.mean.mul_(0.9).add_(x.detach().float().mean((0, 1)), alpha=0.1)
            return self.linear(self.norm(x)).relu()

    torch.manual_seed(0)
    model, batch = nn.Sequential(*(Counting() for _ in range(3))), torch.randn(5, 3, 4)
    plain = [Counting() for _ in range(3)]
    [twin.load_state_dict(block.state_dict()) for twin, block in zip(plain, model, strict=True)]
    apply(Task(model, lambda m, x: m(x).float().mean(), batch, SGD(lr=0.0)), Plan(**plan)).step(batch)
    nn.Sequential(*plain)(batch)
    for block, twin in zip(model, plain, strict=True):
        assert block.calls == 1
        torch.testing.assert_close(block.mean.float(), twin.mean, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(block.norm.running_mean, twin.norm.running_mean, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("plan", PLANS[:2], ids=str)
def test_batch_norm_of_one_value_for_each_channel_is_refused_as_pytorch_refuses_it(plan):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()) for _ in range(2)))
    lean = apply(Task(model, lambda m, x: m(x).mean(), torch.randn(4, 4), SGD()), Plan(**plan))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        lean.step(torch.randn(1, 4))


def test_relu_gives_pytorchs_gradient_for_what_is_not_finite():
    values = [torch.inf, -torch.inf, torch.nan, -1.0, 0.0, 1.0]
    x = torch.tensor(values).repeat_interleave(len(values)).requires_grad_()
    gradient = torch.tensor(values).repeat(len(values))
    ours, theirs = lean_relu(x), F.relu(x)
    torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=0, atol=0)
    found, expected = (torch.autograd.grad(y, x, gradient)[0] for y in (ours, theirs))
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=0, atol=0)
