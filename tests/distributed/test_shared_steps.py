"""`lean.step(share)` in several processes is one step on the whole batch, under every technique."""

import pytest
import torch
from exact_models import TASKS, convolutions, layers
from processes import raised, rank, run_in
from runs import Watched, apart, distance, doubled

from shoestring import SGD, Plan, ShoestringError, apply
from shoestring.distributed import joined, reduction
from shoestring.errors import Diverged
from shoestring.structure import mapped
from shoestring.techniques.activations import saving
from shoestring.techniques.microbatch.pieces import cut
from shoestring.training.apply import LeanTask

PLANS = {
    "nothing": Plan(),
    "microbatch": Plan(microbatch=2),
    "checkpoint": Plan(checkpoint="every-2"),
    "checkpoint, microbatch": Plan(checkpoint="every-2", microbatch=3),
    "offload": Plan(activations="offload"),
    "8bit": Plan(optimizer="8bit"),
    "sm3": Plan(optimizer="sm3"),
    "adafactor": Plan(optimizer="adafactor"),
    "nonzero": Plan(nonzero=40),
    "nonzero, microbatch, 8bit": Plan(nonzero=40, microbatch=2, optimizer="8bit"),
}
NARROW = {
    "half": (Plan(activations="half"), 0.002),
    "int8": (Plan(activations="int8"), 0.05),
    "fp16": (Plan(precision="fp16"), 0.01),
    "bf16": (Plan(precision="bf16"), 0.1),
    "nonzero, fp16, microbatch": (Plan(nonzero=40, precision="fp16", microbatch=2), 0.01),
}
REFUSED = {"convolutions": {"adafactor"}, "layers": {"int8"}, "words": {"adafactor"}}  # by one process too
STEPS = 2


@pytest.fixture(autouse=True)
def small_activations_count(monkeypatch):
    """Tensors of models this small are stored as the plan says, too."""
    monkeypatch.setattr(saving, "SMALL_BYTES", 0)


def share_of(batch, process, size=2):
    """Unequal shares: a seventh and two sevenths at first, the rest for the last."""
    ends = [0, *range(2, 2 * size, 2), None]
    return cut(batch, slice(ends[process], ends[process + 1]))


def stepped(task, plan, batch):
    """A few steps -> their gradients and losses, and the weights after them."""
    lean = apply(task, plan)
    watched = Watched(lean.task.optimizer)
    lean = LeanTask(lean.task.with_(optimizer=watched), plan)
    losses = [float(lean.step(batch)) for _ in range(STEPS)]
    return watched.gradients, losses, [tensor.detach().clone() for tensor in lean.model.parameters()]


def made(model, plan):
    task = TASKS[model]()
    return doubled(task) if plan in PLANS else task


def all_plans(model):
    """Under every plan, in one process or in one of several."""
    found = {}
    for name, plan in (PLANS | {name: plan for name, (plan, _) in NARROW.items()}).items():
        task = made(model, name)
        batch = share_of(task.batch, rank()) if torch.distributed.is_initialized() else task.batch
        try:
            found[name] = stepped(task, plan, batch)
        except ShoestringError as error:  # as one process refuses it
            found[name] = str(error)
    return found


@pytest.mark.parametrize("model", TASKS)
def test_gradients_and_losses_are_those_of_one_process_with_the_whole_batch(model):
    alone = all_plans(model)
    first, second = run_in(2, all_plans, model)
    assert {name for name, found in alone.items() if isinstance(found, str)} == REFUSED[model]
    for name in alone.keys() - REFUSED[model]:
        (gradients, losses, weights), (wanted, mean, _) = first[name], alone[name]
        if name in PLANS:
            assert max(distance(f, w) for f, w in zip(gradients, wanted, strict=True)) < 1e-10, name
            assert losses == pytest.approx(mean, rel=1e-12), name
        else:
            assert max(apart(f, w) for f, w in zip(gradients, wanted, strict=True)) < NARROW[name][1], name
            assert losses == pytest.approx(mean, rel=0.01), name
        assert losses == second[name][1]
        assert all(map(torch.equal, weights, second[name][2])), f"{name}: the processes hold other bits"


# -- what is decided together ---------------------------------------------------------------------------------------
def nan_in(process, batch):
    return mapped(lambda t: t * torch.nan if rank() == process and t.is_floating_point() else t, batch)


def together():
    """Many checks in one pair of processes -> what each saw."""
    seen = {}
    mine = share_of(layers().batch, rank())

    lean = apply(layers().with_(on_nonfinite="skip"), Plan(microbatch=2))
    seen["skipped"] = torch.isnan(lean.step(nan_in(1, mine))).item(), lean.stepper.skipped, lean.stepper.updates
    lean.step(mine)
    seen["after a skipped step"] = lean.stepper.updates, lean.model[0].weight.detach().clone()

    lean = apply(layers(), Plan())
    seen["diverged"] = raised(lambda: lean.step(nan_in(1, mine)))
    seen["goes on"] = float(lean.step(mine))

    def failing(model, batch):
        if rank() == 1:
            raise KeyError("labels")
        return layers().loss(model, batch)

    seen["a loss that raises"] = raised(lambda: apply(layers().with_(loss=failing), Plan()).step(mine))

    def exhausting(model, batch):
        if rank() == 1:
            raise MemoryError("16 TB")
        return layers().loss(model, batch)

    seen["out of memory"] = raised(lambda: apply(layers().with_(loss=exhausting), Plan()).step(mine))
    seen["a batch that cannot be cut"] = raised(
        lambda: apply(layers(), Plan(microbatch=2)).step(mine if rank() == 0 else {"text": "none"})
    )

    def large(model, batch):
        return layers().loss(model, batch) * (1e4 if rank() == 1 else 1.0)

    scaled = apply(layers().with_(loss=large), Plan(precision="fp16"))
    scaled.step(mine)
    seen["loss scale"] = scaled.stepper.scale.value, bool(scaled.stepper.skipped)

    lean = apply(layers(), Plan())
    seen["no items"] = float(lean.step(mine if rank() == 1 else cut(mine, slice(0, 0)))), lean.model[0].weight.detach()
    seen["no-gradient"] = raised(lambda: apply(layers(), Plan(optimizer="no-gradient")))
    return seen


def test_what_one_process_meets_all_processes_decide():
    zero, one = run_in(2, together)
    assert one["skipped"][0] and one["skipped"][2] == 0 and "nan" in one["skipped"][1]
    assert zero["skipped"] == (True, one["skipped"][1] + " (process 1)", 0)
    assert zero["after a skipped step"][0] == 1
    assert torch.equal(zero["after a skipped step"][1], one["after a skipped step"][1])
    assert zero["diverged"][0] == one["diverged"][0] == Diverged.__name__
    assert zero["goes on"] == one["goes on"]
    assert one["a loss that raises"] == ("KeyError", "'labels'")
    assert zero["a loss that raises"] == ("ShoestringError", "KeyError: 'labels' (process 1)")
    assert zero["out of memory"][0] == "OutOfMemory" and "16 TB" in zero["out of memory"][1]
    assert "no tensor" in one["a batch that cannot be cut"][1]
    assert zero["a batch that cannot be cut"][1].endswith("(process 1)")
    assert zero["loss scale"] == one["loss scale"] == (2.0**15, True)
    alone = apply(layers(), Plan())
    assert zero["no items"][0] == one["no items"][0] == pytest.approx(float(alone.step(share_of(layers().batch, 1))))
    torch.testing.assert_close(zero["no items"][1], alone.model[0].weight.detach())
    assert "2 processes add up their gradients" in zero["no-gradient"][1]


# -- bits -----------------------------------------------------------------------------------------------------------
class Drawing:
    """A hook that draws from PyTorch's own generator, which need not be the same in all processes."""

    def __call__(self, stepper):
        with torch.no_grad():
            stepper.task.model[0].weight[0, 0] = torch.rand(())
        return {"drawn": 1}


def same_bits():
    seen = {}
    torch.manual_seed(rank())
    sparse = {"nonzero": 40, "frequency_multiplier": 1000, "fraction": 0.1}
    lean = apply(convolutions(examples=8), Plan(nonzero=sparse, precision="bf16", optimizer="8bit"))
    before = lean.model[1].conv.index.clone()
    mine = cut(lean.task.batch, slice(4 * rank(), 4 * rank() + 4))
    told = []
    for _ in range(12):
        lean.step(mine)
        told.append(lean.stepper.told.get("rewired", 0))
    seen["rewired"] = sum(told), not torch.equal(before, lean.model[1].conv.index)
    seen["bits"] = [tensor.detach().clone() for tensor in (*lean.model.parameters(), *lean.model.buffers())]

    lean = apply(layers().with_(after_update=(Drawing(),)), Plan())
    torch.manual_seed(rank())
    seen["a hook that draws"] = raised(lambda: lean.step(share_of(lean.task.batch, rank())))

    lean = apply(layers().with_(after_update=(lambda stepper: {"told": 1} if rank() == 1 else {},)), Plan())
    seen["a hook of one process"] = float(lean.step(share_of(lean.task.batch, rank())))

    with torch.no_grad():
        different = layers()
        different.model[0].bias.add_(rank())
    seen["other weights"] = raised(lambda: apply(different, Plan()).step(different.batch))
    seen["another plan"] = raised(lambda: apply(layers(), Plan(microbatch=2 + rank())).step(layers().batch))
    seen["another optimizer"] = raised(lambda: apply(layers(SGD(lr=0.1 + rank())), Plan()).step(layers().batch))

    normed = apply(convolutions(norm=torch.nn.BatchNorm2d), Plan())
    normed.step(share_of(normed.task.batch, rank()))
    seen["statistics"] = {name: buffer.clone() for name, buffer in normed.model.named_buffers()}
    seen["activations"] = rounded_activations()
    return seen


def rounded_activations():
    """A gradient of compressed activations, of this process alone."""
    lean = apply(convolutions(examples=64), Plan(activations="int2"))
    lean = LeanTask(lean.task.with_(optimizer=(watched := Watched(lean.task.optimizer))), Plan())
    mine = lean.task.batch if rank() == 0 else cut(lean.task.batch, slice(0, 0))
    lean.step(mine)
    first = watched.gradients[0]
    lean = apply(convolutions(examples=64), Plan(activations="int2"))
    lean = LeanTask(lean.task.with_(optimizer=(watched := Watched(lean.task.optimizer))), Plan())
    lean.step(lean.task.batch if rank() == 1 else cut(lean.task.batch, slice(0, 0)))
    return [*map(torch.equal, first, watched.gradients[0])]


def test_all_processes_hold_the_same_bits():
    zero, one = run_in(2, same_bits)
    assert zero["rewired"] == one["rewired"] and zero["rewired"][0] > 0 and zero["rewired"][1]
    assert all(map(torch.equal, zero["bits"], one["bits"]))
    assert zero["a hook of one process"] == one["a hook of one process"]
    for name, words in (
        ("a hook that draws", "the rewired model of process 1 is not that of process 0"),
        ("other weights", "the weights of process 1"),
        ("another plan", "the plan of process 1"),
        ("another optimizer", "the plan of process 1"),
    ):
        assert zero[name] == one[name] and zero[name][0] == "ShoestringError" and words in zero[name][1], name
    assert zero["statistics"].keys() == one["statistics"].keys()
    assert all(torch.equal(zero["statistics"][name], one["statistics"][name]) for name in zero["statistics"])
    whole = convolutions(norm=torch.nn.BatchNorm2d)
    x = whole.model[0](whole.batch[0]).detach()  # the input of the first batch norm
    torch.testing.assert_close(zero["statistics"]["1.norm.running_mean"], 0.1 * x.mean((0, 2, 3)))
    assert not all(zero["activations"]), "both processes round activations alike"


# -- what is sent ---------------------------------------------------------------------------------------------------
class Wide(torch.nn.Sequential):
    """A convolution over each channel's bytes and a linear layer: nearly all of its weights can be sparse."""

    def __init__(self):
        super().__init__(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU())
        self.append(torch.nn.Linear(256, 4))


def wide():
    torch.manual_seed(0)
    return layers(SGD(lr=0.1)).with_(model=Wide(), batch=(torch.randn(8, 64), torch.randint(4, (8,))))


def sending():
    seen, world = {}, joined()
    for name, plan in {"dense": Plan(), "lean": Plan(nonzero=30, precision="fp16")}.items():
        before = world.sent_bytes
        apply(wide(), plan).step(wide().batch)
        seen[name] = world.sent_bytes - before

    events = []
    add_up, one_pass = world.add_up, None
    lean = apply(wide(), Plan(microbatch=3))
    one_pass = lean.stepper.one_pass
    world.add_up = lambda flat: (events.append("sent"), add_up(flat))[1]
    lean.stepper.one_pass = lambda *a, **k: (events.append("pass"), one_pass(*a, **k), events.append("end"))[1]
    lean.model[0].weight.register_post_accumulate_grad_hook(lambda _: events.append("first layer"))
    reduction.BUCKET_BYTES = 1024
    lean.step(wide().batch)
    seen["events"] = events
    del world.add_up

    embedding = torch.nn.Sequential(torch.nn.Embedding(9, 4, sparse=True), torch.nn.Flatten(), torch.nn.Linear(8, 4))
    ids = torch.tensor([[1, 2], [3, 4]]), torch.tensor([0, 1])
    task = layers(SGD(lr=0.1)).with_(model=embedding, batch=ids)
    torch.manual_seed(1)
    embedding[0].reset_parameters(), embedding[2].reset_parameters()
    seen["sparse gradient"] = raised(lambda: apply(task, Plan()).step(ids))

    unused = layers(SGD(lr=0.1, weight_decay=0.5))
    unused.model.register_parameter("spare", torch.nn.Parameter(torch.ones(3)))
    unused.model[0].bias.requires_grad_(False)
    kept = unused.model[0].bias.clone()
    apply(unused, Plan()).step(unused.batch)
    seen["unused"] = unused.model.spare.detach().clone(), torch.equal(kept, unused.model[0].bias)
    return seen


def test_what_is_sent_is_what_is_stored_and_after_the_last_microbatch_only():
    seen, _ = run_in(2, sending)
    assert seen["dense"] == sum(parameter.nbytes for parameter in Wide().parameters())
    assert 0 < seen["lean"] <= 0.16 * seen["dense"]
    passes = [place for place, event in enumerate(seen["events"]) if event == "pass"]
    assert len(passes) == 3 and "sent" not in seen["events"][: passes[-1]]
    sent = [place for place, event in enumerate(seen["events"]) if event == "sent"]
    *_, last_gradient = (place for place, event in enumerate(seen["events"]) if event == "first layer")
    assert passes[-1] < sent[0] < last_gradient, "nothing was sent before the backward pass had ended"
    assert "sparse=False" in seen["sparse gradient"][1]
    assert torch.equal(seen["unused"][0], torch.ones(3)), "a parameter without a gradient was decayed"
    assert seen["unused"][1]
