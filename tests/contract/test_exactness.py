"""A lean step computes what a plain step computes, whatever the model and the plan.

In FP64 the kernels' references run: what they compute is plain autograd's to 1e-10. In FP32 the compiled kernels run,
whose sums are in another order than PyTorch's: they may be as far from FP64 as plain PyTorch is in FP32, twice at most.
"""

from functools import cache
from typing import Any

import pytest
import torch
from runs import Run, apart, astray, distance, doubled, held_at_zero, rounded, run, went
from table import (
    CELLS,
    EXACT_CELLS,
    IN_TURN,
    NEAR,
    NEAR_CELLS,
    NORMED,
    OTHER_METHODS,
    PLANS,
    REORDERED,
    SPARSE,
    lean,
    rows,
    task,
)

from shoestring import Plan, Task, apply

ULPS = 2 * 2**-24  # of FP32: what two runs may differ by though plain PyTorch happens to make no error


@cache
def plain_and_lean(model: str, plan: str, double: bool) -> tuple[Run, Run]:
    """Both train the same pieces of the batch: with batch norm these are part of what is computed."""
    under_plan = apply(made(model, double), PLANS[plan][1]).task
    return plain(model, double, under_plan.split), run(under_plan)


@cache
def plain(model: str, double: bool, split: Any, form: str | None = None) -> Run:
    """Plain PyTorch's run, from weights that were rounded to a form."""
    given = rounded(task(model), form)
    return run((doubled(given) if double else given).with_(split=split))


def made(model: str, double: bool) -> Task:
    return doubled(task(model)) if double else task(model)


GRADIENTS = [cell for cell in EXACT_CELLS if PLANS[cell[1]][1].optimizer is None]  # a lean one uses them up


@pytest.mark.parametrize(("model", "plan"), rows(GRADIENTS))
def test_gradients_in_fp64_are_those_of_plain_autograd(model, plan):
    plain, lean = plain_and_lean(model, plan, double=True)
    assert len(lean.gradients) == 2
    for found, wanted in zip(lean.gradients, plain.gradients, strict=True):
        assert distance(found, wanted) < 1e-10


@pytest.mark.parametrize(("model", "plan"), rows(GRADIENTS))
def test_gradients_in_fp32_are_as_near_to_fp64_as_plain_autograds(model, plan):
    own, lean = plain_and_lean(model, plan, double=False)
    wanted, _ = plain_and_lean(model, plan, double=True)
    for found, plains, exact in zip(lean.gradients, own.gradients, wanted.gradients, strict=True):
        assert apart(found, exact) <= 2 * apart(plains, exact) + ULPS


@pytest.mark.parametrize(("model", "plan"), rows(EXACT_CELLS))
def test_weights_in_fp32_are_as_near_to_fp64_as_those_of_plain_training(model, plan):
    own, lean = plain_and_lean(model, plan, double=False)
    wanted, _ = plain_and_lean(model, plan, double=True)
    assert astray(lean, wanted) <= 2 * astray(own, wanted) + ULPS


@pytest.mark.parametrize(("model", "plan"), rows([cell for cell in GRADIENTS if cell[0] not in REORDERED]))
def test_gradients_in_fp32_are_plain_autograds_to_the_bit(model, plan):
    plain, lean = plain_and_lean(model, plan, double=False)
    for found, wanted in zip(lean.gradients, plain.gradients, strict=True):
        assert all(torch.equal(f, w) for f, w in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("model", "plan"), rows(EXACT_CELLS))
def test_weights_after_several_steps_are_those_of_plain_training(model, plan):
    plain, lean = plain_and_lean(model, plan, double=True)
    assert astray(lean, plain) < 1e-9


@cache
def sparse_and_dense(model: str, plan: str) -> tuple[Run, Run, Run]:
    """A plan with nonzeros -> its run, and those of dense layers with the same nonzeros in FP32 and in FP64."""
    lean = apply(task(model), PLANS[plan][1]).task.with_(after_update=())  # rewiring would choose other nonzeros
    before = {"contexts": (), "scaling": None, "optimizer": task(model).optimizer, "batch": task(model).batch}
    own, wanted = (held_at_zero(lean.with_(**before)) for _ in range(2))
    own.model.float()
    return run(lean), run(own), run(doubled(wanted))


@pytest.mark.parametrize(("model", "plan"), rows([cell for cell in SPARSE if cell[1] not in NEAR]))
def test_sparse_weights_in_fp32_are_as_near_to_fp64_as_dense_ones_held_at_zero(model, plan):
    lean, own, wanted = sparse_and_dense(model, plan)
    assert astray(lean, wanted) <= 2 * astray(own, wanted) + ULPS
    torch.testing.assert_close(lean.losses, own.losses, rtol=1e-6, atol=0)


@cache
def near(model: str, plan: str) -> tuple[Run, Run]:
    """A plan that rounds -> its run, and FP64's from the same weights."""
    if (model, plan) in SPARSE:
        return sparse_and_dense(model, plan)[::2]
    under_plan = apply(task(model), PLANS[plan][1]).task
    return run(under_plan), plain(model, True, under_plan.split, PLANS[plan][1].precision)


@pytest.mark.parametrize(("model", "plan"), rows(NEAR_CELLS))
def test_weights_of_plans_that_round_go_as_far_as_those_of_plain_training(model, plan):
    lean, wanted = near(model, plan)
    assert went(lean, wanted) == pytest.approx(1, abs=0.01)
    assert 0 < astray(lean, wanted) < NEAR[plan].weights


@pytest.mark.parametrize(("model", "plan"), rows([cell for cell in NEAR_CELLS if cell not in SPARSE]))
def test_gradients_of_plans_that_round_are_near_those_of_plain_training(model, plan):
    lean, wanted = near(model, plan)
    for found, exact in zip(lean.gradients, wanted.gradients, strict=True):
        if "no-gradient" in plan:
            assert not found
        else:
            assert apart(found, exact) < NEAR[plan].gradients


@pytest.mark.parametrize(("model", "plan"), rows(NEAR_CELLS))
def test_losses_of_plans_that_round_are_near_those_of_plain_training(model, plan):
    lean, wanted = near(model, plan)
    torch.testing.assert_close([loss.double() for loss in lean.losses], wanted.losses, rtol=5e-4, atol=0)


@pytest.mark.parametrize(("model", "plan"), rows([cell for cell in CELLS if cell[1] in OTHER_METHODS]))
def test_another_method_is_the_same_in_fp32_as_in_fp64(model, plan):
    found, wanted = (run(apply(made(model, double), PLANS[plan][1]).task) for double in (False, True))
    assert astray(found, wanted) < 1e-4
    assert astray(found, plain(model, False, task(model).split)) > 0.1  # and it is another


NORMED_CELLS = [cell for cell in CELLS if cell[0] in NORMED]


@pytest.mark.parametrize(("model", "plan"), rows(NORMED_CELLS))
def test_batches_are_counted_as_in_plain_training(model, plan):
    plain, lean = plain_and_lean(model, plan, double=(model, plan) in EXACT_CELLS)
    counts = [name for name in plain.buffers if name.endswith("num_batches_tracked")]
    assert counts
    assert [lean.buffers[name] for name in counts] == [plain.buffers[name] for name in counts]


@pytest.mark.parametrize(("model", "plan"), rows([cell for cell in EXACT_CELLS if cell[0] in NORMED]))
def test_buffers_after_several_steps_are_those_of_plain_training(model, plan):
    plain, lean = plain_and_lean(model, plan, double=True)
    assert plain.buffers
    for name, wanted in plain.buffers.items():
        torch.testing.assert_close(lean.buffers[name], wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("model", "plan"), rows(EXACT_CELLS))
def test_random_numbers_go_on_where_plain_training_would(model, plan):
    plain, lean = plain_and_lean(model, plan, double=True)
    assert torch.equal(lean.random, plain.random)


@pytest.mark.parametrize(("model", "plan"), rows(EXACT_CELLS))
def test_losses_are_those_of_plain_training(model, plan):
    plain, lean = plain_and_lean(model, plan, double=True)
    torch.testing.assert_close(lean.losses, plain.losses, rtol=1e-10, atol=0)


@pytest.mark.parametrize(("model", "plan"), IN_TURN)
def test_a_plan_comes_back_from_its_file_and_is_what_the_task_says_of_itself(model, plan):
    settings = PLANS[plan][1]
    assert Plan.from_json(settings.to_json()) == settings
    assert lean(model, plan).settings == settings.techniques()


@pytest.mark.parametrize("plan", ["optimal", "residual-1, offload", "everything"])
def test_a_plan_from_its_file_trains_to_the_same_bits(plan):
    (model, *_), settings = PLANS[plan]
    double = (model, plan) in EXACT_CELLS
    again = apply(made(model, double), Plan.from_json(settings.to_json()))
    first, second = plain_and_lean(model, plan, double)[1], run(again.task)
    assert all(torch.equal(a, b) for a, b in zip(first.weights, second.weights, strict=True))
