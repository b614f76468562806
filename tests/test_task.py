from dataclasses import dataclass

import pytest
import torch
from torch import nn

import shoestring
from shoestring import SGD, Adam, Plan, ShoestringError, Task
from shoestring.items import counted
from shoestring.ledger import Phase
from shoestring.phases import listen
from shoestring.profiling import profile
from shoestring.step import Stepper


def loss(model, batch):
    return model(batch).square().mean()


def make(**changes) -> Task:
    torch.manual_seed(0)
    fields = {"model": nn.Linear(4, 2), "loss": loss, "batch": torch.randn(8, 4), "optimizer": SGD(lr=0.1)}
    return Task(**(fields | changes))


def parameters_after(task: Task, batch) -> list[torch.Tensor]:
    Stepper(task).step(batch)
    return [p.detach().clone() for p in task.model.parameters()]


@pytest.mark.parametrize("call", [
    shoestring.profile, lambda found: shoestring.plan(found, "1MB"), lambda found: shoestring.apply(found, Plan())
], ids=["profile", "plan", "apply"])  # fmt: skip
def test_a_model_alone_is_no_task(call):
    with pytest.raises(ShoestringError, match=r"a Linear is no task: make one, shoestring\.Task\(model, loss"):
        call(nn.Linear(4, 2))


def test_other_arguments_of_a_wrong_kind_are_named():
    with pytest.raises(ShoestringError, match=r"apply\(\) takes a Plan, as in .*, not a str"):
        shoestring.apply(make(), "fp16")
    with pytest.raises(ShoestringError, match="the allocator meter runs a function, not Task"):
        shoestring.measure(make())
    with pytest.raises(ShoestringError, match="nosuch holds no run: name the folder that `shoestring train` wrote"):
        shoestring.load("nosuch")


# -- what a task is made of ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "change, words",
    [
        ({"model": 3}, "needs an nn.Module, not int"),
        ({"model": nn.Linear}, "needs an nn.Module, not type"),
        ({"loss": 0.5}, "needs a loss"),
        ({"optimizer": 0.1}, "needs optimizer settings"),
        ({"reduction": "max"}, "reduction is 'mean' or 'sum', not 'max'"),
        ({"microbatches": 4}, "not 4: a plan has their size"),
        ({"shared": "mask"}, r"a list of names or a function, not 'mask': pass shared=\['mask'\]"),
        ({"shared": 3}, "a list of names or a function, not 3"),
    ],
)
def test_a_field_of_the_wrong_kind_is_refused(change, words):
    with pytest.raises(ShoestringError, match=words):
        make(**change)


def test_a_changed_task_leaves_the_first_as_it_was():
    task = make()
    assert task.with_(clip=1.0).clip == 1.0
    assert task.clip is None


def test_what_is_said_of_a_loss_is_not_said_of_another():
    task = make(microbatches=True)
    assert task.with_(clip=1.0).microbatches is True
    assert task.with_(loss=lambda model, batch: model(batch).sum()).microbatches is None
    assert task.with_(loss=loss, microbatches=True).microbatches is True


def test_items_are_the_first_dimension_of_the_first_tensor_unless_told():
    assert make().count({"weight": torch.tensor(1.0), "rows": [torch.zeros(5, 3)]}) == 5
    assert make(items=lambda batch: batch.numel()).count(torch.zeros(5, 3)) == 15


def test_items_of_labelled_tokens_are_the_labels_that_are_not_ignored():
    labels = torch.tensor([[5, 6, -100], [7, -100, -100]])
    batch = {"input_ids": torch.ones(2, 3, dtype=torch.int64), "labels": labels}
    assert make().count(batch) == 3
    assert make(padding=7).count(batch) == 2
    assert make(shared=["labels"]).count(batch) == 2
    assert make().count({"x": torch.zeros(2, 3), "labels": torch.tensor([1, -100])}) == 2  # a class each: examples
    assert make().count({"x": torch.zeros(2, 3), "labels": torch.zeros(2, 9)}) == 2  # scores, not classes


def test_what_is_shared_does_not_count_the_examples():
    batch = {"mask": torch.zeros(9, 9), "rows": torch.zeros(5, 3)}
    assert make(shared=["mask"]).count(batch) == 5
    assert make(shared=lambda path, value: path == "mask").count(batch) == 5


def test_a_batch_without_a_dimension_asks_for_items():
    with pytest.raises(ShoestringError, match=r"items\(batch\)"):
        counted(("words", torch.tensor(1.0)))


@pytest.mark.parametrize(
    "settings, kind",
    [
        (SGD(momentum=0.9, nesterov=True), torch.optim.SGD),
        (Adam(), torch.optim.Adam),
        (Adam(decoupled=True), torch.optim.AdamW),
    ],
)
def test_settings_make_the_optimizer_that_they_describe(settings, kind):
    optimizer = settings(nn.Linear(2, 2).parameters())
    assert type(optimizer) is kind
    wanted = {name: value for name, value in vars(settings).items() if name != "decoupled"}
    assert wanted.items() <= optimizer.defaults.items()


# -- the step ------------------------------------------------------------------------------------------------
def test_hooks_run_after_each_update_when_the_gradients_are_gone():
    seen = []

    def hook(stepper):
        seen.append([p.grad for p in stepper.task.model.parameters()])

    task = make(after_update=(hook,))
    Stepper(task).step(task.batch)
    assert seen == [[None, None]]
    profile(task)
    assert len(seen) == 1  # a trace has no weights that a hook could change


def test_a_step_is_what_plain_pytorch_does():
    task, plain = make(optimizer=SGD(lr=0.1, momentum=0.9)), make()
    optimizer = torch.optim.SGD(plain.model.parameters(), lr=0.1, momentum=0.9)
    stepper = Stepper(task)
    for _ in range(3):
        optimizer.zero_grad()
        expected = plain.loss(plain.model, plain.batch)
        expected.backward()
        optimizer.step()
        assert stepper.step(task.batch) == expected
    assert torch.equal(task.model.weight, plain.model.weight)


def test_unequal_microbatches_weigh_by_their_items():
    def whole(**changes):
        task = make(model=nn.Linear(4, 2).double(), batch=torch.randn(8, 4).double(), **changes)
        task.model.load_state_dict({k: torch.full_like(v, 0.3) for k, v in task.model.state_dict().items()})
        return task

    batch = torch.randn(8, 4).double()
    once = parameters_after(whole(), batch)
    parts = parameters_after(whole(split=lambda batch: batch.split(3)), batch)  # 3, 3 and 2
    for a, b in zip(once, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-15)


def test_losses_that_are_sums_are_added_as_they_are():
    def summed(**changes):
        return make(loss=lambda model, batch: model(batch).square().sum(), optimizer=SGD(lr=1e-3), **changes)

    once = parameters_after(summed(), make().batch)
    parts = parameters_after(summed(reduction="sum", split=lambda batch: batch.split(3)), make().batch)
    for a, b in zip(once, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_a_piece_without_items_is_not_run():
    labels = torch.tensor([1, 0, -100, -100])

    def masked(**changes):
        return make(
            batch=(torch.randn(4, 4), labels),
            loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
            items=lambda batch: int((batch[1] != -100).sum()),
            **changes,
        )

    halves = masked(split=lambda batch: zip(*(part.split(2) for part in batch), strict=True))
    for a, b in zip(parameters_after(masked(), masked().batch), parameters_after(halves, halves.batch), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7)


@dataclass
class Output:
    loss: torch.Tensor | None
    scores: torch.Tensor


@pytest.mark.parametrize("kind", [Output, lambda loss, scores: {"loss": loss, "s": scores}], ids=["object", "dict"])
def test_a_loss_may_return_an_output_that_has_it(kind):
    def output(model, batch):
        scores = model(batch)
        return kind(scores.square().mean(), scores)

    task, plain = make(loss=output), make()
    for a, b in zip(parameters_after(task, task.batch), parameters_after(plain, plain.batch), strict=True):
        assert torch.equal(a, b)
    assert profile(task).peak_bytes >= profile(plain).peak_bytes


def test_the_gradient_is_clipped_to_its_norm_before_the_update():
    task = make(clip=1e-3, optimizer=SGD(lr=1.0))
    before = [p.detach().clone() for p in task.model.parameters()]
    moved = [a - b for a, b in zip(parameters_after(task, 1e3 * task.batch), before, strict=True)]
    assert torch.stack([m.norm() for m in moved]).norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_no_gradient_is_left_after_a_step():
    task = make()
    Stepper(task).step(task.batch)
    assert all(p.grad is None for p in task.model.parameters())


def test_contexts_are_around_each_pass_outermost_first_and_end_with_it():
    events = []

    def context(name):
        class Entered:
            def __init__(self, model):
                self.model = model

            def __enter__(self):
                events.append(f"+{name}")

            def __exit__(self, *error):
                events.append(f"-{name}")

        return Entered

    task = make(split=lambda batch: batch.split(4), contexts=(context("a"), context("b")))
    Stepper(task).step(task.batch)
    assert events == ["+a", "+b", "-b", "-a"] * 2


def test_a_listener_hears_the_phases_in_order():
    heard = []
    with listen(heard.append):
        Stepper(make()).step(make().batch)
    assert [p for p in heard if p != Phase.BUILD] == [Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE]


@pytest.mark.parametrize(
    "change, words",
    [
        ({"loss": lambda model, batch: 3.0}, "the loss is float, not a tensor: return the mean"),
        ({"loss": lambda model, batch: (model(batch).mean(), 3)}, r"is tuple, not a tensor: return .* output\[0\]"),
        ({"loss": lambda model, batch: Output(None, model(batch))}, "Output, .* `loss` is empty, so pass the labels"),
        ({"loss": lambda model, batch: {"a": model(batch).mean()}}, r"is dict, .* such as sum\(losses.values\(\)\)"),
        ({"loss": lambda model, batch: model(batch)}, r"the loss has shape \(8, 2\)"),
        ({"loss": lambda model, batch: batch.sum()}, "does not depend on any trainable parameter"),
        ({"model": nn.ReLU()}, "no parameter that requires a gradient"),
        ({"split": lambda batch: []}, "holds no items"),
        ({"batch": torch.zeros(0, 4)}, "holds no items"),
    ],
)
def test_a_step_that_cannot_train_is_refused_with_the_reason(change, words):
    task = make(**change)
    with pytest.raises(ShoestringError, match=words):
        Stepper(task).step(task.batch)


@pytest.mark.parametrize("make", [SGD, Adam])
@pytest.mark.parametrize("wrong", [{"lr": -1}, {"lr": float("nan")}, {"weight_decay": float("inf")}])
def test_a_senseless_setting_of_an_optimizer_is_refused_where_it_is_written(make, wrong):
    (name,) = wrong
    with pytest.raises(ShoestringError, match=rf"{make.__name__}\({name}="):
        make(**wrong)
