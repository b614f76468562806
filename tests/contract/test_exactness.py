"""A lean step computes what a plain step computes, whatever the model and the plan."""

from functools import cache
from typing import Any

import pytest
import torch
from runs import Run, astray, distance, doubled, run
from table import CELLS, EXACT_CELLS, NEAR, PLANS, REORDERED, lean, task

from shoestring import Plan, Task, apply


@cache
def plain_and_lean(model: str, plan: str, double: bool) -> tuple[Run, Run]:
    """Both train the same pieces of the batch: with batch norm these are part of what is computed."""
    under_plan = apply(made(model, double), PLANS[plan][1]).task
    return plain(model, double, under_plan.split), run(under_plan)


@cache
def plain(model: str, double: bool, split: Any) -> Run:
    return run(made(model, double).with_(split=split))


def made(model: str, double: bool) -> Task:
    return doubled(task(model)) if double else task(model)


GRADIENTS = [cell for cell in EXACT_CELLS if PLANS[cell[1]][1].optimizer is None]  # a lean one uses them up


@pytest.mark.parametrize(("model", "plan"), GRADIENTS)
def test_gradients_in_fp64_are_those_of_plain_autograd(model, plan):
    plain, lean = plain_and_lean(model, plan, double=True)
    assert len(lean.gradients) == 2
    for found, wanted in zip(lean.gradients, plain.gradients, strict=True):
        assert distance(found, wanted) < 1e-10


@pytest.mark.parametrize(("model", "plan"), [cell for cell in GRADIENTS if cell[0] not in REORDERED])
def test_gradients_in_fp32_are_plain_autograds_to_the_bit(model, plan):
    plain, lean = plain_and_lean(model, plan, double=False)
    for found, wanted in zip(lean.gradients, plain.gradients, strict=True):
        assert all(torch.equal(f, w) for f, w in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("model", "plan"), EXACT_CELLS)
def test_weights_after_several_steps_are_those_of_plain_training(model, plan):
    plain, lean = plain_and_lean(model, plan, double=True)
    assert astray(lean, plain) < 1e-9


@pytest.mark.parametrize(("model", "plan"), [cell for cell in CELLS if cell[1] in NEAR])
def test_losses_of_approximate_plans_are_near(model, plan):
    plain, lean = plain_and_lean(model, plan, double=False)
    torch.testing.assert_close(lean.losses, plain.losses, rtol=0.002, atol=0)
    assert astray(lean, plain) > 0


@pytest.mark.parametrize(("model", "plan"), CELLS)
def test_batches_are_counted_as_in_plain_training(model, plan):
    plain, lean = plain_and_lean(model, plan, double=(model, plan) in EXACT_CELLS)
    counts = [name for name in plain.buffers if name.endswith("num_batches_tracked")]
    assert [lean.buffers[name] for name in counts] == [plain.buffers[name] for name in counts]


@pytest.mark.parametrize(("model", "plan"), EXACT_CELLS)
def test_buffers_after_several_steps_are_those_of_plain_training(model, plan):
    plain, lean = plain_and_lean(model, plan, double=True)
    for name, wanted in plain.buffers.items():
        torch.testing.assert_close(lean.buffers[name], wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("model", "plan"), EXACT_CELLS)
def test_random_numbers_go_on_where_plain_training_would(model, plan):
    plain, lean = plain_and_lean(model, plan, double=True)
    assert torch.equal(lean.random, plain.random)


@pytest.mark.parametrize(("model", "plan"), EXACT_CELLS)
def test_losses_are_those_of_plain_training(model, plan):
    plain, lean = plain_and_lean(model, plan, double=True)
    torch.testing.assert_close(lean.losses, plain.losses, rtol=1e-10, atol=0)


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_comes_back_from_its_file_and_is_what_the_task_says_of_itself(plan):
    (model, *_), settings = PLANS[plan]
    assert Plan.from_json(settings.to_json()) == settings
    assert lean(model, plan).settings == settings.techniques()


@pytest.mark.parametrize("plan", ["optimal", "residual-1, disk", "everything"])
def test_a_plan_from_its_file_trains_to_the_same_bits(plan):
    (model, *_), settings = PLANS[plan]
    double = (model, plan) in EXACT_CELLS
    again = apply(made(model, double), Plan.from_json(settings.to_json()))
    first, second = plain_and_lean(model, plan, double)[1], run(again.task)
    assert all(torch.equal(a, b) for a, b in zip(first.weights, second.weights, strict=True))
