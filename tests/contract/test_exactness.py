"""A lean step computes what a plain step computes, whatever the model and the plan."""

from functools import cache

import pytest
import torch
from runs import Run, distance, doubled, run
from table import APPROXIMATE, CELLS, EXACT_CELLS, PLANS, REORDERED, task

from shoestring import Plan, apply


@cache
def plain_and_lean(model: str, plan: str, double: bool) -> tuple[Run, Run]:
    """Both train the same pieces of the batch: with batch norm these are part of what is computed."""
    with_dtype = doubled if double else lambda task: task
    lean = apply(with_dtype(task(model)), PLANS[plan][1])
    plain = with_dtype(task(model)).with_(split=lean.task.split)
    return run(plain), run(lean.task)


@pytest.mark.parametrize(("model", "plan"), EXACT_CELLS)
def test_gradients_in_fp64_are_those_of_plain_autograd(model, plan):
    plain, lean = plain_and_lean(model, plan, double=True)
    assert len(lean.gradients) == 3
    for found, wanted in zip(lean.gradients, plain.gradients, strict=True):
        assert distance(found, wanted) < 1e-10


@pytest.mark.parametrize(("model", "plan"), [cell for cell in EXACT_CELLS if cell[0] not in REORDERED])
def test_gradients_in_fp32_are_plain_autograds_to_the_bit(model, plan):
    plain, lean = plain_and_lean(model, plan, double=False)
    for found, wanted in zip(lean.gradients, plain.gradients, strict=True):
        assert all(torch.equal(f, w) for f, w in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("model", "plan"), [cell for cell in CELLS if cell[1] in APPROXIMATE])
def test_gradients_of_approximate_plans_are_near(model, plan):
    plain, lean = plain_and_lean(model, plan, double=True)
    assert 0 < distance(lean.gradients[0], plain.gradients[0]) < 0.01


@pytest.mark.parametrize(("model", "plan"), EXACT_CELLS)
def test_buffers_after_three_steps_are_those_of_plain_training(model, plan):
    plain, lean = plain_and_lean(model, plan, double=True)
    for name, wanted in plain.buffers.items():
        torch.testing.assert_close(lean.buffers[name], wanted, rtol=1e-10, atol=1e-10)
        if name.endswith("num_batches_tracked"):
            assert lean.buffers[name] == wanted


@pytest.mark.parametrize(("model", "plan"), EXACT_CELLS)
def test_random_numbers_go_on_where_plain_training_would(model, plan):
    plain, lean = plain_and_lean(model, plan, double=True)
    assert torch.equal(lean.random, plain.random)


@pytest.mark.parametrize(("model", "plan"), EXACT_CELLS)
def test_losses_are_those_of_plain_training(model, plan):
    plain, lean = plain_and_lean(model, plan, double=True)
    torch.testing.assert_close(lean.losses, plain.losses, rtol=1e-10, atol=0)


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_from_its_file_trains_to_the_same_bits(plan):
    models, settings = PLANS[plan]
    again = apply(task(models[0]), Plan.from_json(settings.to_json()))
    first, second = run(apply(task(models[0]), settings).task), run(again.task)
    assert all(torch.equal(a, b) for a, b in zip(first.gradients[-1], second.gradients[-1], strict=True))
