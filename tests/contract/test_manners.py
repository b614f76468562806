"""A technique leaves nothing behind, whatever was raised inside a step, and says clearly what it cannot do."""

import pytest
import torch
from runs import doubled
from table import PLANS, STATELESS, lean, task
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from shoestring import Plan, ShoestringError, apply
from shoestring.ambient import Ambient
from shoestring.errors import NoEffect
from shoestring.step import Stepper
from shoestring.techniques import activations as saved
from shoestring.techniques import checkpoint, microbatch
from shoestring.techniques.sparsity.layer import SparseLayer

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
        "autocast": torch.is_autocast_enabled("cpu"),
        "recording": torch.is_grad_enabled(),
        "ambient": Ambient.now(),
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
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear | SparseLayer)]
    return layers[len(layers) // 2]


@pytest.mark.parametrize("fail", [fail_forward, fail_backward])
@pytest.mark.parametrize(("model", "plan"), ROWS)
def test_what_is_raised_inside_a_step_leaves_nothing_behind_and_the_next_step_works(model, plan, fail):
    stepper = Stepper(lean(model, plan))
    model, batch = stepper.task.model, stepper.task.batch
    before = traces(model)
    refused = pytest.raises(ShoestringError, match="has a hook") if "**" in plan or "hundredth" in plan else None
    with a_layer_inside(model).register_forward_hook(fail), refused or pytest.raises(Broken):
        stepper.step(batch)
    assert traces(model) == before
    assert all(p.grad is None for p in model.parameters())
    if fail is fail_backward and "no-gradient" in plan:  # some weights are updated already, and it says so
        with pytest.raises(ShoestringError, match="between two updates"):
            stepper.step(batch)
    else:
        assert torch.isfinite(stepper.step(batch))
    assert traces(model) == before


@pytest.mark.parametrize(("model", "plan"), ROWS)
def test_a_plan_changes_neither_the_task_it_was_given_nor_its_modules_between_steps(model, plan):
    given, settings = task(model), PLANS[plan][1]
    contexts, split, words, before = given.contexts, given.split, dict(given.settings), traces(given.model)
    lean = apply(given, settings)
    assert (given.contexts, given.split, given.settings) == (contexts, split, words)
    if settings.nonzero or settings.precision:  # other layers, or a boundary that stays so that the model can be called
        before = traces(lean.model)
    assert traces(lean.model) == before
    lean.step(lean.task.batch)
    assert traces(lean.model) == before
    assert Ambient.now() == Ambient()


def keeps_less(plan):
    """Whether a plan keeps saved tensors in forms of its own, which it gives back once."""
    settings = PLANS[plan][1]
    return bool(settings.checkpoint or settings.activations or settings.precision) and settings.microbatch is None


@pytest.mark.parametrize(("model", "plan"), [row for row in ROWS if keeps_less(row[1])])
def test_a_second_backward_pass_is_refused(model, plan):
    task = lean(model, plan)

    def twice(model, batch):
        loss = task.loss(model, batch)
        loss.backward(retain_graph=True)
        return loss

    with pytest.raises(ShoestringError, match="asked for a second time"):
        Stepper(task.with_(loss=twice)).step(task.batch)


NO_EFFECT = {
    "checkpoint none": ("wrn", checkpoint.apply, checkpoint.Settings("none")),
    "a microbatch of the whole batch": ("wrn", microbatch.apply, microbatch.Settings(12)),
    "nothing that the rules of activations take": ("wrn", saved.apply, saved.Settings("fc=offload")),
    "masks without ReLU or dropout": ("vit", saved.apply, saved.Settings("masks")),
}


@pytest.mark.parametrize("what", NO_EFFECT)
def test_what_would_change_nothing_says_so(what):
    model, act, settings = NO_EFFECT[what]
    with pytest.raises(NoEffect, match=r"leave (it )?out"):
        act(task(model), settings)


@pytest.mark.parametrize(
    "again", [Plan(checkpoint="residual-1"), Plan(checkpoint="every-3"), Plan(activations="offload")]
)
def test_a_plan_on_top_of_a_plan_is_refused_by_name(again):
    first = apply(doubled(task("gpt")), Plan(checkpoint="residual-2*"))
    with pytest.raises(ShoestringError, match=r"under a plan already \(checkpoint residual-2\*\)"):
        apply(first.task, again)


def test_two_tasks_of_one_model_take_turns():
    given = doubled(task("wrn"))
    plain, leans = doubled(task("wrn")), [apply(given, PLANS[plan][1]) for plan in ("residual-1", "no-bn", "offload")]
    expected = Stepper(plain.with_(optimizer=STATELESS))
    for each in leans:
        torch.testing.assert_close(
            Stepper(each.task.with_(optimizer=STATELESS)).step(given.batch), expected.step(given.batch)
        )
