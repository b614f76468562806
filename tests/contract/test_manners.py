"""A technique leaves nothing behind, whatever was raised inside a step, and says clearly what it cannot do."""

import pytest
import torch
from runs import doubled
from table import PLANS, task
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from shoestring import ShoestringError, apply
from shoestring.ledger import Phase
from shoestring.phases import current
from shoestring.techniques import keeping
from shoestring.training.step import Stepper

ROWS = [(models[0], plan) for plan, (models, _) in PLANS.items()]


def traces(model):
    """All that a step could leave behind: on the modules, on PyTorch, in this thread."""
    return {
        "modules": [sorted(vars(module)) for module in model.modules()],
        "hooks": [len(part) for module in model.modules() for name, part in vars(module).items() if "_hooks" in name],
        "global hooks": [len(part) for name, part in vars(module_hooks).items()
                         if name.startswith("_global_") and isinstance(part, dict)],
        "function modes": list(_get_current_function_mode_stack()),
        "dispatch modes": list(_get_current_dispatch_mode_stack()),
        "saved-tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "keepers": list(keeping._stack.keepers),
        "autocast": torch.is_autocast_enabled("cpu"),
        "recording": torch.is_grad_enabled(),
        "phase": current(),
    }  # fmt: skip


class Broken(Exception):
    pass


def fail_forward(module, args, output):
    raise Broken("forward")


def fail_backward(module, args, output):
    def fail(gradient):
        raise Broken("backward")

    (output if isinstance(output, torch.Tensor) else output[0]).register_hook(fail)


def a_layer_inside(model):
    """A layer in the middle of the model: inside a block where it has blocks."""
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    return layers[len(layers) // 2]


@pytest.mark.parametrize("fail", [fail_forward, fail_backward])
@pytest.mark.parametrize(("model", "plan"), ROWS)
def test_what_is_raised_inside_a_step_leaves_nothing_behind_and_the_next_step_works(model, plan, fail):
    lean = apply(task(model), PLANS[plan][1])
    before = traces(lean.model)
    with a_layer_inside(lean.model).register_forward_hook(fail), pytest.raises(Broken):
        lean.step(lean.task.batch)
    assert traces(lean.model) == before
    assert all(p.grad is None for p in lean.model.parameters())
    assert torch.isfinite(lean.step(lean.task.batch))
    assert traces(lean.model) == before


@pytest.mark.parametrize(("model", "plan"), ROWS)
def test_between_steps_the_model_is_a_plain_module(model, plan):
    plain = task(model)
    before = traces(plain.model)
    lean = apply(plain, PLANS[plan][1])
    assert traces(lean.model) == before
    lean.step(lean.task.batch)
    assert traces(lean.model) == before
    assert current() == Phase.BUILD


@pytest.mark.parametrize(("model", "plan"), [row for row in ROWS if PLANS[row[1]][1].microbatch is None])
def test_a_second_backward_pass_is_refused(model, plan):
    lean = apply(task(model), PLANS[plan][1]).task

    def twice(model, batch):
        loss = lean.loss(model, batch)
        loss.backward(retain_graph=True)
        return loss

    with pytest.raises(ShoestringError, match="asked for a second time"):
        Stepper(lean.with_(loss=twice)).step(lean.batch)


@pytest.mark.parametrize(("model", "plan"), ROWS)
def test_a_plan_that_is_applied_does_not_change_the_task_it_was_given(model, plan):
    given = doubled(task(model))
    contexts, split, settings = given.contexts, given.split, dict(given.settings)
    apply(given, PLANS[plan][1])
    assert (given.contexts, given.split, given.settings) == (contexts, split, settings)
