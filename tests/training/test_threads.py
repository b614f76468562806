"""Threads: models of their own do not meet; a model that two want is refused to the second, and unharmed."""

import copy
import logging
import random
import threading
from threading import Event

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoestring import SGD, Plan, ShoestringError, Task, apply, profile
from shoestring.training.apply import LeanTask

WIDTH, ROWS = 64, 512
PLANS = {
    "residual-1, offload": Plan(checkpoint="residual-1", activations="offload"),
    "residual-2*": Plan(checkpoint="residual-2*"),
    "optimal, half": Plan(checkpoint="optimal", activations="half"),
    "every-3": Plan(checkpoint="every-3"),
    "blocks to a file": Plan(activations="[01].*=offload"),
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)], nn.Linear(WIDTH, 10))


def classify(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randint(10, (ROWS,), generator=generator)


def meanwhile(act):
    """Does something in another thread, to its end -> its result, or what it raised."""
    found = []

    def run():
        try:
            found.append(act())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def trained(plan, loss=classify, steps=2):
    """A model after a few steps under the plan -> its weights."""
    lean = made(plan, loss)
    for _ in range(steps):
        lean.step(batch())
    return weights(lean.model)


def made(plan, loss):
    """A lean task whose loss is this one in its steps only, and a plain one while the plan is applied."""
    task = apply(Task(network(), classify, batch(), SGD(lr=0.1)), PLANS[plan]).task
    return LeanTask(task.with_(loss=loss), PLANS[plan])


def same(found, wanted):
    return all(torch.equal(f, w) for f, w in zip(found, wanted, strict=True))


@pytest.mark.parametrize("plan", PLANS)
def test_threads_with_models_of_their_own_get_the_weights_of_one_alone(plan):
    models = [network() for _ in range(3)]
    wanted, failed, start = trained(plan), [], threading.Barrier(3)

    def train(model):
        try:
            start.wait()
            lean = apply(Task(model, classify, batch(), SGD(lr=0.1)), PLANS[plan])
            for _ in range(2):
                lean.step(batch())
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=train, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert all(same(weights(model), wanted) for model in models)


def test_traces_that_overlap_in_two_threads_leave_everything_as_it_was():
    """The second begins while the first is under way and ends after it; a third thread meanwhile draws real numbers."""
    log, vf = logging.getLogger("torch._subclasses.fake_tensor"), vars(torch._VF)
    found = lambda: (random.random, torch.get_rng_state, log.disabled, dict(vf))  # noqa: E731
    before, state, begun, ended = found(), random.getstate(), Event(), Event()

    def first(model, batch):
        assert random.random() in (0.0, 1 - 2**-24)  # a choice of the trace
        if not begun.is_set():
            second.start()
            begun.wait()
            drawn.append(meanwhile(random.random))
        return classify(model, batch)

    def other(model, batch):
        begun.set()
        ended.wait()
        return classify(model, batch)

    drawn = []
    second = threading.Thread(target=lambda: profile(Task(network(), other, batch(), SGD(lr=0.1))))
    profile(Task(network(), first, batch(), SGD(lr=0.1)))
    ended.set()
    second.join()
    assert 0 < drawn[0] < 1 - 2**-24
    assert found() == before and random.getstate() == state


class Failing(nn.Module):
    def forward(self, x):
        raise ValueError("no")


@pytest.mark.parametrize("plan", PLANS)
def test_modules_that_run_in_another_thread_during_a_step_are_not_part_of_it(plan):
    other = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def loss(model, batch):
        hidden = model[0](batch[0])
        assert meanwhile(lambda: other(batch[0])).grad_fn is not None
        assert isinstance(meanwhile(lambda: nn.Sequential(other, Failing())(batch[0])), ValueError)
        return F.cross_entropy(model[1:](hidden), batch[1])

    assert same(trained(plan, loss), trained(plan))


@pytest.mark.parametrize("plan", PLANS)
def test_a_model_that_is_called_in_another_thread_during_its_step_answers_plainly(plan):
    def loss(model, batch):
        seen = meanwhile(lambda: model(batch[0]))
        result = classify(model, batch)
        assert torch.equal(F.cross_entropy(seen, batch[1]), result)
        return result

    assert same(trained(plan, loss), trained(plan))


WISHES = {
    "a step of the same task": lambda lean: lean.step(batch()),
    "a step of another task of the model": lambda lean: apply(
        Task(lean.model, classify, batch(), SGD(lr=0.1)), Plan()
    ).step(batch()),
    "a plan for the model": lambda lean: apply(
        Task(lean.model, classify, batch(), SGD(lr=0.1)), Plan(checkpoint="residual-1")
    ),
    "a profile of the model": lambda lean: profile(Task(lean.model, classify, batch(), SGD(lr=0.1))),
    "a model that shares a layer": lambda lean: apply(
        Task(nn.Sequential(lean.model[:2], nn.Linear(WIDTH, 10)), classify, batch(), SGD(lr=0.1)), Plan()
    ).step(batch()),
}


@pytest.mark.parametrize("wish", WISHES)
def test_who_wants_a_model_that_another_thread_trains_is_refused_and_the_step_goes_on(wish):
    told = []

    def loss(model, batch):
        told.append(meanwhile(lambda: WISHES[wish](lean)))
        return classify(model, batch)

    lean = made("residual-1, offload", loss)
    for _ in range(2):
        lean.step(batch())
    assert [type(error) for error in told] == [ShoestringError] * 2
    assert all("it is being trained in another thread" in str(error) for error in told)
    assert all("copy.deepcopy" in str(error) for error in told)
    assert same(weights(lean.model), trained("residual-1, offload"))


def test_a_model_is_free_again_whatever_was_raised():
    model = network()

    def loss(model, batch):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        apply(Task(model, loss, batch(), SGD(lr=0.1)), Plan()).step(batch())
    task = Task(model, classify, batch(), SGD(lr=0.1))
    assert torch.isfinite(meanwhile(lambda: apply(task, Plan()).step(batch())))


def test_a_copy_of_a_model_trains_beside_it():
    model, answers = network(), []

    def loss(model, batch):
        twin = Task(copy.deepcopy(model), classify, batch, SGD(lr=0.1))
        answers.append(meanwhile(lambda: apply(twin, Plan(checkpoint="residual-1")).step(batch)))
        return classify(model, batch)

    step = apply(Task(model, loss, batch(), SGD(lr=0.1)), Plan()).step(batch())
    assert torch.equal(answers[0], step)
