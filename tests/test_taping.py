"""Tapes: a pass that is run again from its tape leaves what the model's code leaves, to the bit, or is not recorded."""

import gc
import weakref
from array import array

import numpy as np
import pytest
import torch
from processes import rank, run_in
from torch import nn

import shoestring
import zoo
from contract import table
from shoestring import SGD, Plan, Task, apply
from shoestring.data import Augment, on_images
from shoestring.distributed import joined
from shoestring.kernels.core import core
from shoestring.taping.tape import NOBODY, Head, Tape, longer
from shoestring.techniques.activations import adaptive, saving
from shoestring.training.job import CrossEntropy
from shoestring.training.processes import share_of

PLANS = [
    {"microbatch": 3},
    {"microbatch": 4},
    {"checkpoint": "residual-2*", "microbatch": 3},
    {"checkpoint": "no-bn"},
    {"precision": "fp16", "checkpoint": "residual-2*", "microbatch": 3},
    {"precision": "bf16", "microbatch": 3},
    {"nonzero": 30, "precision": "fp16", "checkpoint": "residual-2*", "microbatch": 3},
    {"nonzero": 30, "optimizer": "8bit", "microbatch": 3},
    {"optimizer": "8bit+no-gradient"},
    {"optimizer": "8bit+no-gradient", "microbatch": 3},  # folded into the momentum
    {"precision": "bf16", "optimizer": "sm3+no-gradient"},  # which rounds weights by chance
    {"nonzero": 30, "precision": "fp16", "checkpoint": "residual-2**", "microbatch": 3},
    {"nonzero": 30, "precision": "fp16", "optimizer": "8bit+8bit-gradient", "microbatch": 3},
]
COMPRESSED = [
    {"activations": "int4"},
    {"activations": "pool2"},
    {"activations": "pool8+int2"},
    {"activations": "int4,*:batch_norm=int8,*:layer_norm=int8,*:gelu=int2"},
    {"activations": "int4", "checkpoint": "residual-1*"},
    {
        "nonzero": 30,
        "precision": "fp16",
        "checkpoint": "residual-2**",
        "activations": "int4",
        "optimizer": "8bit+8bit-gradient",
    },
    {"activations": "adaptive/3"},
]


def trained(task, plan, static, steps=4):
    """A copy of the task's model after some updates, and the reason why there is no tape."""
    torch.manual_seed(0)
    lean = apply(task.with_(static_graph=static), plan, copy=True)
    lean.stepper.length = steps
    losses = [lean.step(task.batch) for _ in range(steps)]
    state = {**lean.model.state_dict(), "losses": torch.stack(losses)}
    return {name: value.clone() for name, value in state.items()}, lean.stepper


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: " ".join(f"{k}={v}" for k, v in plan.items()))
def test_a_tape_leaves_the_bits_of_the_code(plan):
    task = table.wrn()
    if "no-gradient" in plan.get("optimizer", ""):
        task = task.with_(optimizer=SGD(lr=0.05, momentum=0.9))  # Nesterov's needs the sum of the microbatches
    plain, _ = trained(task, Plan(**plan), static=False)
    taped, stepper = trained(task, Plan(**plan), static=True)
    assert_same(plain, taped)
    assert stepper.tapes.reason == ""
    assert stepper.tapes.length > 20


@pytest.mark.parametrize("make", [table.resnet, table.vit, table.mlp, table.unet, table.gpt, table.dynamicconv])
def test_every_kind_of_model(make):
    task = make()
    plain, _ = trained(task, Plan(), static=False)
    taped, stepper = trained(task, Plan(), static=True)
    assert_same(plain, taped)
    assert stepper.tapes.length or stepper.tapes.reason


@pytest.mark.parametrize("plan", COMPRESSED, ids=lambda plan: " ".join(f"{k}={v}" for k, v in plan.items()))
@pytest.mark.parametrize("make", [table.wrn, table.vit])
def test_activations_are_rounded_by_other_numbers_in_each_pass_from_a_tape_too(make, plan, monkeypatch):
    monkeypatch.setattr(saving, "SMALL_BYTES", 256)
    monkeypatch.setattr(adaptive, "MEASURE_EVERY", 3)  # and another choice makes another pass
    monkeypatch.setattr(adaptive, "CHOOSE_EVERY", 3)
    task = make()
    if "8+" in plan["activations"] and make is table.vit:
        pytest.skip("its grid of patches is smaller than 8 x 8")
    if "optimizer" in plan:
        task = task.with_(optimizer=table.MOMENTUM)  # which there is something to save of
    adapts = "adaptive" in plan["activations"]  # it measures its errors on examples of the whole batch
    plan = Plan(**plan) if adapts else Plan(**plan, microbatch=4)
    plain, by_code = trained(task, plan, static=False, steps=8)
    taped, stepper = trained(task, plan, static=True, steps=8)
    assert_same(plain, taped)
    assert stepper.tapes.reason == "" and (stepper.tapes.length > 20 or adapts)
    assert passes_of(stepper) == passes_of(by_code) > 0  # what a save has of them


def passes_of(stepper):
    return max(context._passes[0] for context in stepper.task.contexts if isinstance(context, saving.SavedPass))


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_the_code_of_the_model_is_not_run_again(pieces):
    class Counting(nn.Module):
        calls = 0

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x):
            Counting.calls += 1
            return self.layer(x)

    task = Task(
        Counting(), lambda model, x: model(x).square().mean(), torch.randn(4, 4), SGD(lr=0.1), static_graph=True
    )
    lean = apply(task, Plan(microbatch=4 // pieces) if pieces > 1 else Plan())
    Counting.calls = 0  # applying a plan may look at a pass
    for _ in range(10):
        lean.step(task.batch)
    assert Counting.calls == 2  # the first pass, and the one that was recorded: it serves where gradients begin too


def test_a_gradient_of_two_parameters_becomes_no_tensor_of_both():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Parameter(torch.eye(4)), nn.Parameter(torch.ones(4, 4))

        def forward(self, x):
            return x @ (self.one + self.two)

    task = Task(Twice(), lambda model, x: model(x).square().mean(), torch.randn(6, 4), SGD(lr=0.1))
    plain, _ = trained(task, Plan(microbatch=2), static=False)
    taped, stepper = trained(task, Plan(microbatch=2), static=True)
    assert stepper.tapes.length
    assert_same(plain, taped)


def test_rewiring_and_another_loss_scale_are_followed():
    task = table.wrn()
    plan = Plan(nonzero={"nonzero": 30, "method": "dsr"}, precision="fp16", microbatch=3)
    plain, _ = trained(task, plan, static=False, steps=30)
    taped, stepper = trained(task, plan, static=True, steps=30)
    assert_same(plain, taped)
    assert any(hook.times for hook in stepper.task.after_update)


def test_batches_of_changing_sizes_are_run_by_their_code_or_tape():
    task = table.mlp()
    sizes = [32, 32, 32, 7, 32, 7, 7, 7, 32]
    states = []
    for static in (False, True):
        torch.manual_seed(0)
        lean = apply(task.with_(static_graph=static), Plan(), copy=True)
        for size in sizes:
            lean.step(tuple(leaf[:size] for leaf in task.batch))
        states.append(lean.model.state_dict())
    assert_same(*states)


def test_training_on_images_as_bytes_is_taped():
    """What `train` and the studies run: crops, flips and the normalisation are part of each pass."""
    augment = Augment(mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.25), shrink=2)
    images, labels = torch.randint(256, (12, 3, 16, 16), dtype=torch.uint8), torch.arange(12) % 10
    batch = images, labels, augment.draw(np.arange(12, dtype=np.uint64))
    model = table.wrn().model
    task = Task(model, on_images(CrossEntropy(), augment), batch, SGD(lr=0.1))
    plain, _ = trained(task, Plan(microbatch=3), static=False)
    taped, stepper = trained(task, Plan(microbatch=3), static=True)
    assert_same(plain, taped)
    assert stepper.tapes.reason == ""
    assert stepper.tapes.length > 20


def test_evaluation_mode_between_steps_is_another_pass():
    task = table.wrn()
    states = []
    for static in (False, True):
        lean = apply(task.with_(static_graph=static), Plan(), copy=True)
        for number in range(6):
            lean.model.train(number != 4)
            lean.step(task.batch)
        states.append(lean.model.state_dict())
    assert_same(*states)


class Odd(nn.Module):
    """A linear layer, and something besides that no tape can hold."""

    def __init__(self, besides):
        super().__init__()
        self.layer, self.besides = nn.Linear(8, 8), besides
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        return self.besides(self, self.layer(x))


def reading(model, x):
    return x * 2 if x.sum() > 0 else x


def replacing(model, x):
    model.seen = model.seen + x.detach().mean()
    return x


def from_numpy(model, x):
    return x + torch.from_numpy(np.sin(x.detach().numpy()))


def filled_by_numpy(model, x):
    filled = torch.empty(x.shape)
    filled.numpy()[:] = x.detach().numpy() * 2
    return x + filled


def drawing(model, x):
    return nn.functional.dropout(x, 0.5)


@pytest.mark.parametrize(
    ("besides", "reason"),
    [
        (reading, "reads a value"),
        (replacing, "replaces a tensor"),
        (from_numpy, "without an operator"),
        (filled_by_numpy, "without an operator"),
        (drawing, "draws random numbers"),
    ],
)
def test_what_a_tape_cannot_hold_is_run_by_the_code(besides, reason):
    batch = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    states = []
    for static in (False, True):
        torch.manual_seed(0)
        task = Task(Odd(besides), lambda model, x: model(x).square().mean(), batch, SGD(lr=0.1), static_graph=static)
        lean = apply(task, Plan())
        for number in range(5):
            lean.step(batch * (-1) ** number)
        states.append(lean.model.state_dict())
    assert_same(*states)
    assert reason in lean.stepper.tapes.reason


def test_a_hook_of_the_user_is_called_in_every_pass():
    task, calls = table.mlp().with_(static_graph=True), []
    lean = apply(task, Plan())
    lean.model.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(5):
        lean.step(task.batch)
    assert len(calls) == 5
    assert "hook" in lean.stepper.tapes.reason


@pytest.mark.parametrize("register", [
    lambda model, hook: model.register_forward_hook(hook),
    lambda model, hook: nn.modules.module.register_module_forward_hook(hook),
    lambda model, hook: next(model.parameters()).register_hook(lambda gradient: hook()),
], ids=["module", "global", "parameter"])  # fmt: skip
def test_a_hook_that_comes_after_the_tape_is_called(register):
    model, calls = Odd(lambda model, x: x), []
    task = Task(model, lambda model, x: model(x).square().mean(), torch.randn(6, 8), SGD(lr=0.1), static_graph=True)
    lean = apply(task, Plan())
    for _ in range(4):
        lean.step(task.batch)
    assert lean.stepper.tapes.length
    handle = register(lean.model, lambda *_: calls.append(1))
    try:
        for _ in range(4):
            lean.step(task.batch)
    finally:
        handle.remove()
    assert len(calls) >= 4


def test_a_batch_may_hold_what_cannot_be_compared():
    model = Odd(lambda model, x: x)
    batch = {"x": torch.randn(6, 8), "ids": np.arange(6)}
    task = Task(model, lambda model, batch: model(batch["x"]).square().mean(), batch, SGD(lr=0.1), static_graph=True)
    lean = apply(task, Plan())
    losses = [float(lean.step(batch)) for _ in range(4)]
    assert losses == sorted(losses, reverse=True)


def test_constants_of_the_model_are_read_where_they_are():
    scale = torch.full((8,), 2.0)
    model = Odd(lambda model, x: x * scale)
    task = Task(model, lambda model, x: model(x).square().mean(), torch.randn(6, 8), SGD(lr=0.1), static_graph=True)
    lean = apply(task, Plan())
    for _ in range(4):
        lean.step(task.batch)
    assert lean.stepper.tapes.length
    before = float(lean.step(task.batch))
    scale.zero_()
    assert float(lean.step(task.batch)) == 0 < before


def test_a_loss_that_is_not_finite_is_found_from_the_tape_too():
    task = table.vit().with_(static_graph=True)
    lean = apply(task, Plan())
    for _ in range(4):
        lean.step(task.batch)
    assert lean.stepper.tapes.length
    weights = {name: value.clone() for name, value in lean.model.state_dict().items()}
    with pytest.raises(shoestring.ShoestringError, match="nan"):
        lean.step((task.batch[0] * float("nan"), task.batch[1]))
    assert_same(weights, lean.model.state_dict())
    assert all(parameter.grad is None for parameter in lean.model.parameters())


def test_an_infinite_loss_with_finite_gradients_stops_a_taped_pass_before_any_weight_changes():
    def loss_of(model, batch):
        x, added = batch
        return model(x).square().mean() + added

    optimizer = SGD(lr=0.1, momentum=0.9)
    batch = torch.randn(6, 8), torch.zeros(())
    task = Task(Odd(lambda model, x: x), loss_of, batch, optimizer, static_graph=True)
    lean = apply(task, Plan(optimizer="8bit+no-gradient"))
    for _ in range(4):
        lean.step(batch)
    assert lean.stepper.tapes.length
    weights = {name: value.clone() for name, value in lean.model.state_dict().items()}
    with pytest.raises(shoestring.ShoestringError, match="the loss is inf after 4 updates"):
        lean.step((batch[0], torch.tensor(float("inf"))))
    assert_same(weights, lean.model.state_dict())


def test_a_tape_does_not_keep_its_step_alive():
    task = table.vit().with_(static_graph=True)
    lean = apply(task, Plan(optimizer="8bit+no-gradient"))
    for _ in range(4):
        lean.step(task.batch)
    stepper = weakref.ref(lean.stepper)
    assert stepper().tapes.length
    gc.disable()  # memory is to come back at once, not when cycles are looked for
    try:
        del lean
        assert stepper() is None
    finally:
        gc.enable()


def test_offloaded_tensors_are_not_taken_from_a_tape():
    task = zoo.mlp(512)
    plain, _ = trained(task, Plan(activations="offload"), static=False)
    taped, _ = trained(task, Plan(activations="offload"), static=True)
    assert_same(plain, taped)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"activations": "half"}, "reads a value")],
)
def test_what_cannot_be_recorded_says_why(settings, reason):
    task = shoestring.builtin("wrn-10-1", batch=24, image=16)
    lean = apply(task, Plan(microbatch=8, **settings))
    for _ in range(2):
        lean.step(task.batch)
    assert lean.stepper.tapes.length == 0 and reason in lean.stepper.tapes.reason


LOOPS = {"python": Tape._do} | ({"compiled": Tape._do_compiled} if core else {})


def calls(*heads_and_numbers: tuple, width="h") -> Tape:
    heads = [Head(*head) for *head, _ in heads_and_numbers]
    numbers = [number for place, (*_, slots) in enumerate(heads_and_numbers) for number in (place, *slots)]
    return Tape(heads, len(heads), array(width, numbers), 4, array("i"), {}, 0, [], False)


@pytest.mark.parametrize("width", ["h", "i"])
@pytest.mark.parametrize("loop", LOOPS)
def test_calls_of_a_tape_take_their_tensors_from_slots_and_free_them_after_the_last_use(loop, width):
    tape = calls(  # what is read, how much is freed and what, what is filled
        (torch.cat, ([None, None],), {"dim": 1}, ((0, 0), (0, 1)), 1, (0, 1, 1, 1, 2)),
        (torch.split, (None, 2, 1), {}, (0,), 3, (2, 1, 2, 1, NOBODY, 2)),
        (torch.add, (None, None), {"alpha": 2}, (0, 1), 1, (1, 2, 2, 1, 2, 3)),
        (torch.Tensor.mul_, (None, 3), {}, (0,), 0, (3, 0)),
        width=width,
    )
    x, y = torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)
    for _ in range(2):  # nothing of a run is left in the tape
        slots = [x, y, None, None]
        LOOPS[loop](tape, slots)
        assert slots[0] is x and slots[1] is slots[2] is None
        assert torch.equal(slots[3], 3 * (x[:, :2] + 2 * y[:, :2]))


def test_numbers_that_do_not_fit_in_16_bits_are_widened_and_none_is_lost():
    numbers = longer(longer(array("h"), [1, NOBODY]), [2, 32767])
    assert numbers.typecode == "h"
    numbers = longer(numbers, [3, 32768])
    assert numbers.typecode == "i" and [*numbers] == [1, NOBODY, 2, 32767, 3, 32768]


@pytest.mark.parametrize("loop", LOOPS)
def test_an_error_of_a_call_is_raised_as_it_is(loop):
    tape = calls((torch.cat, ([None, None],), {"dim": 1}, ((0, 0), (0, 1)), 1, (0, 1, 1, 1, 2)))
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        LOOPS[loop](tape, [torch.ones(2, 3), torch.ones(3, 3), None, None])


def taped_in_a_process(plan, changes):
    task = table.wrn().with_(**changes)
    task = task.with_(batch=share_of(task, task.batch, rank(), joined().size))
    plain, _ = trained(task, plan, static=False)
    taped, stepper = trained(task, plan, static=True)
    assert_same(plain, taped)
    return stepper.tapes.length


@pytest.mark.parametrize(
    ("plan", "changes", "tapes"),
    [
        (Plan(microbatch=2), {}, True),
        (Plan(nonzero=30, precision="fp16", checkpoint="residual-2*", microbatch=2), {}, True),
        (Plan(microbatch=2), {"sync_batch_norm": True}, False),
        (Plan(microbatch=2, shard="fsdp"), {}, False),
        (Plan(), {}, False),
    ],
    ids=["microbatches", "sparse", "synchronised", "shards", "one pass"],
)
def test_in_several_processes_passes_that_send_nothing_are_taped(plan, changes, tapes):
    """All but the last, in which gradients are on their way."""
    assert [length > 20 for length in run_in(2, taped_in_a_process, plan, changes)] == [tapes, tapes]
