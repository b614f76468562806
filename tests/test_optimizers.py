"""Every way to say which optimizer: each trains as plain PyTorch does, and each has its lean forms."""

from functools import partial

import pytest
import torch
from torch import nn

from shoestring import SGD, Adam, Plan, ShoestringError, Task, apply, train
from shoestring.optimizers import make
from shoestring.profiling import profile
from shoestring.step import Stepper
from shoestring.techniques.optimizer import lean_update, options
from shoestring.techniques.sparsity.layer import SparseLayer


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 300), nn.LayerNorm(300), nn.Tanh(), nn.Linear(300, 3))


def loss(model, batch):
    return (model(batch) - batch[:, :3]).square().mean()


BATCH = torch.randn(24, 20, generator=torch.Generator().manual_seed(1))


def task(optimizer, model=None) -> Task:
    return Task(model or net(), loss, BATCH, optimizer)


def by_name(named_parameters):
    """No decay for norms and biases, and another learning rate for the last layer."""
    named = list(named_parameters)
    plain = [p for name, p in named if name.endswith("bias") or name.startswith("1.")]
    last = [p for name, p in named if name == "3.weight"]
    rest = [p for _, p in named if not any(p is other for other in (*plain, *last))]
    groups = [{"params": rest}, {"params": plain, "weight_decay": 0.0}, {"params": last, "lr": 0.003}]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.3)


def by_dimensions(parameters):
    decayed, others = ([p for p in parameters if (p.dim() > 1) is matrix] for matrix in (True, False))
    groups = [{"params": decayed, "weight_decay": 0.2}, {"params": others}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


class Settings:
    """A callable without a plain signature of its own."""

    def __init__(self, lr):
        self.lr = lr

    def __call__(self, parameters):
        return torch.optim.Adam(parameters, lr=self.lr, betas=(0.8, 0.99), weight_decay=0.1)


WAYS = {
    "settings": lambda model: Adam(lr=0.01),
    "class": lambda model: torch.optim.AdamW,
    "partial": lambda model: partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "lambda": lambda model: lambda parameters: torch.optim.Adam(parameters, lr=0.02, eps=1e-3),
    "object": lambda model: Settings(0.01),
    "names": lambda model: by_name,
    "names by partial": lambda model: partial(lambda extra, named_parameters: by_name(named_parameters), 3),
    "dimensions": lambda model: by_dimensions,
    "instance": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "instance with groups": lambda model: by_name(model.named_parameters()),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), fused=True),
}


def plain_losses(way: str, steps: int = 4) -> tuple[list[float], nn.Module]:
    """A loop as anybody writes it."""
    model = net()
    given = WAYS[way](model)
    if not isinstance(given, torch.optim.Optimizer):
        given = given(list(model.named_parameters()) if way.startswith("names") else list(model.parameters()))
    losses = []
    for _ in range(steps):
        given.zero_grad()
        value = loss(model, BATCH)
        value.backward()
        given.step()
        losses.append(float(value.detach()))
    return losses, model


def lean_losses(way: str, plan: dict, steps: int = 4) -> tuple[list[float], nn.Module]:
    model = net()
    lean = apply(task(WAYS[way](model), model), Plan(**plan))
    return [float(lean.step(BATCH)) for _ in range(steps)], lean.model


@pytest.mark.parametrize("plan", [{}, {"optimizer": "no-gradient"}], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_each_way_trains_as_plain_pytorch_does(way, plan):
    (wanted, plain), (found, lean) = plain_losses(way), lean_losses(way, plan)
    assert found == pytest.approx(wanted, rel=1e-5)
    for a, b in zip(plain.parameters(), lean.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("plan", [{"optimizer": "8bit"}, {"precision": "bf16"}, {"precision": "fp16"}], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_each_way_has_its_narrow_forms(way, plan):
    assert "8bit" in options(task(WAYS[way](model := net()), model))
    assert lean_losses(way, plan)[0] == pytest.approx(plain_losses(way)[0], rel=0.05)


@pytest.mark.parametrize("way", WAYS)
def test_each_way_can_be_profiled_and_leaves_no_fake_behind(way):
    model = net()
    made = task(WAYS[way](model), model)
    state = profile(made).bytes_by_category["optimizer_state"]
    stepper = Stepper(made)
    stepper.step(BATCH)
    tensors = [t for part in stepper.optimizer.state.values() for t in part.values() if isinstance(t, torch.Tensor)]
    assert all(type(t) is torch.Tensor for t in tensors) and state >= sum(t.nbytes for t in tensors if t.dim())


def test_a_lean_group_keeps_its_own_settings():
    made = make(lean_update(task(by_name), "8bit"), net())
    assert [(g["lr"], g["weight_decay"], len(g["params"])) for g in made.param_groups] == [
        (0.01, 0.3, 1), (0.01, 0.0, 4), (0.003, 0.3, 1)]  # fmt: skip


@pytest.mark.parametrize("plan", [{}, {"optimizer": "8bit"}], ids=str)
@pytest.mark.parametrize("way", ["dimensions", "names", "instance with groups"])
def test_groups_go_by_the_dense_weight_where_layers_hold_their_nonzeros_only(way, plan):
    model = net()
    lean = apply(task(WAYS[way](model), model), Plan(nonzero=50, **plan))
    values = {id(m.values) for m in lean.model.modules() if isinstance(m, SparseLayer)}
    decayed = {id(p) for g in lean.stepper.optimizer.param_groups if g["weight_decay"] for p in g["params"]}
    assert values and values <= decayed
    assert lean.step(BATCH).isfinite()


@pytest.mark.parametrize("plan", [{}, {"optimizer": "8bit"}], ids=str)
def test_a_run_with_groups_is_resumed_to_the_bit(tmp_path, plan):
    class Killed(Exception):
        pass

    def kill(event):
        if event.update == 5:
            raise Killed

    whole, broken, resumed = (apply(task(by_name), Plan(**plan)) for _ in range(3))
    train(whole, [BATCH, 2 * BATCH], epochs=4)
    with pytest.raises(Killed):
        train(broken, [BATCH, 2 * BATCH], epochs=4, run=tmp_path / "run", listeners=[kill])
    train(resumed, [BATCH, 2 * BATCH], epochs=4, run=tmp_path / "run", resume=True)
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True))
    other = task(lambda named_parameters: torch.optim.AdamW([p for _, p in named_parameters], lr=0.01))
    with pytest.raises(ShoestringError, match="optimizer was"):
        train(apply(other, Plan(**plan)), [BATCH, 2 * BATCH], epochs=4, run=tmp_path / "run", resume=True)


def test_heavy_ball_groups_gather_microbatches_and_mixed_ones_are_refused():
    def mixed(parameters):
        first, *rest = parameters
        return torch.optim.SGD([{"params": [first], "momentum": 0.0}, {"params": rest}], lr=0.05, momentum=0.9)

    split = {"split": lambda batch: batch.split(7)}
    lean, plain = (apply(task(by_dimensions).with_(**split), Plan(optimizer=o)) for o in ("no-gradient", None))
    for _ in range(3):
        torch.testing.assert_close(lean.step(BATCH), plain.step(BATCH))
    with pytest.raises(ShoestringError, match="no-gradient cannot be used with 4 microbatches"):
        apply(task(mixed).with_(**split), Plan(optimizer="no-gradient")).step(BATCH)


# -- what cannot be -----------------------------------------------------------------------------------------------
def used(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss(model, BATCH).backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    "make_optimizer, words",
    [
        (used, "already has state for 6 parameters"),
        (lambda model: torch.optim.SGD(net().parameters(), lr=0.1), r"\(300, 20\) that is not the model's"),
    ],
)
def test_an_optimizer_that_cannot_be_taken_over_is_refused(make_optimizer, words):
    model = net()
    with pytest.raises(ShoestringError, match=words):
        task(make_optimizer(model), model)


def test_groups_of_parameters_that_the_function_was_not_given_are_refused():
    groups = [{"params": list(net().parameters())}]
    for use in (profile, Stepper, lean_update):
        with pytest.raises(ShoestringError, match=r"that its function was not given.*called named_parameters"):
            use(task(lambda parameters: torch.optim.SGD(groups, lr=0.1)))


def test_a_function_that_makes_something_else_is_refused():
    with pytest.raises(ShoestringError, match=r"made a list, not a torch.optim.Optimizer"):
        Stepper(task(lambda parameters: [parameters]))


@pytest.mark.parametrize(
    "optimizer, words",
    [
        (partial(torch.optim.AdamW, amsgrad=True), "AdamW with amsgrad=True"),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5), "SGD with dampening=0.5"),
        (partial(torch.optim.Adam, maximize=True), "Adam with maximize=True"),
        (torch.optim.Adagrad, "Adagrad"),
        (torch.optim.NAdam, "NAdam"),
    ],
)
def test_what_has_no_lean_form_says_so_and_trains_without(optimizer, words):
    with pytest.raises(ShoestringError, match=f"the lean form of {words} is not known"):
        apply(task(optimizer), Plan(optimizer="8bit"))
    with pytest.raises(ShoestringError, match=words):
        options(task(optimizer))
    assert apply(task(optimizer), Plan()).step(BATCH).isfinite()


def test_the_learning_rate_is_the_one_that_a_scheduler_started_from():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    assert optimizer.param_groups[0]["lr"] == 0.0
    assert Stepper(task(optimizer, model)).optimizer.param_groups[0]["lr"] == 0.05
    assert lean_update(task(optimizer, model)).rule == SGD(lr=0.05)
