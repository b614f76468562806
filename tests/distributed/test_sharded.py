"""FSDP2 holds the parameters, and a step is still one step on the whole batch."""

import pytest
import torch
from exact_models import layers, maps, words
from processes import rank, run_in
from runs import doubled
from torch import nn

import shoestring
from shoestring import SGD, Adam, Plan, ShoestringError, apply
from shoestring.structure import tensors
from shoestring.techniques.microbatch.pieces import cut
from shoestring.techniques.shard import refuses

PLANS = {
    "nothing": Plan(),
    "checkpoint": Plan(checkpoint="every-2"),
    "checkpoint, microbatch": Plan(checkpoint="every-2", microbatch=2),
    "averages, checkpoint": Plan(activations="pool2", checkpoint="residual-1"),
    "16 bits, microbatch": Plan(activations="half", microbatch=2),
    "our own update": Plan(optimizer="fp32", microbatch=2),
    "sm3": Plan(optimizer="sm3"),
    "adafactor": Plan(optimizer="adafactor"),
}
# What they round is neither the same nor in the same blocks in shards: it must be as little.
ROUNDING = {
    "8 bits": Plan(optimizer="8bit"),
    "state in FP16": Plan(optimizer="fp16"),
    "state in BF16": Plan(optimizer="bf16"),
    "sm3, 8 bits": Plan(optimizer="sm3+8bit"),
    "FP16": Plan(precision="fp16"),
    "BF16, 8 bits": Plan(precision="bf16", optimizer="8bit"),
}
MAKE = {
    "words": lambda: words(Adam(lr=0.01), examples=8),
    "layers": lambda: layers(SGD(lr=0.1, momentum=0.9), 8),
    "maps": lambda: maps(examples=8),
    "adam": lambda: layers(Adam(lr=0.01), 8),
}
MODELS = {"activations": ("maps",), "optimizer": ("adam",)}
CELLS = [
    (model, name)
    for name, plan in PLANS.items()
    for model in next((MODELS[word] for word in MODELS if word in plan.techniques()), ("words", "layers"))
]


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


def local_bytes(lean):
    held = [*lean.model.parameters(), *tensors(list(lean.stepper.optimizer.state.values()))]
    return sum((tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes for tensor in held)


def trained(task, plan, share, shards):
    """Three steps -> losses, whole weights, and the bytes of weights and state in this process."""
    lean = apply(task, plan.with_(shard="fsdp") if shards else plan)
    losses = [float(lean.step(share)) for _ in range(3)]
    return losses, [whole(tensor) for tensor in lean.model.parameters()], local_bytes(lean)


def wide():
    """Layers with more values than state in FP32 is kept for, in rows that 4 processes share unequally."""
    torch.manual_seed(0)
    blocks = nn.Linear(20, 250), nn.ReLU(), nn.Linear(250, 250), nn.LayerNorm(250), nn.GELU(), nn.Linear(250, 4)
    return layers(Adam(lr=0.01), 8).with_(model=nn.Sequential(*blocks))


def rounded(size):
    """The weights after a few steps under each plan that rounds; clipped, so that the norm is needed, too."""
    rows, task = 8 // size, wide()
    share = cut(task.batch, slice(rank() * rows, (rank() + 1) * rows)) if size > 1 else task.batch
    shards = {"shard": "fsdp"} if size > 1 else {}
    return {
        name: trained(wide().with_(clip=1.0), plan.with_(**shards), share, False) for name, plan in ROUNDING.items()
    }


def apart(some, others):
    pairs = zip(some, others, strict=True)
    return sum(float((one.detach().double() - other.detach().double()).square().sum()) for one, other in pairs)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_what_is_rounded_in_shards_moves_weights_as_little_as_in_one_process(size):
    alone, everyone = rounded(1), run_in(size, rounded, size)
    for name, plan in ROUNDING.items():
        method = Plan(optimizer="sm3") if "sm3" in str(plan.optimizer) else Plan()
        _, exact, _ = trained(wide().with_(clip=1.0), method, wide().batch, False)
        first = everyone[0][name]
        assert apart(first[1], exact) <= 1.2**2 * apart(alone[name][1], exact), name
        assert apart(first[1], exact) > 0
        for other in everyone[1:]:
            assert apart(first[1], other[name][1]) == 0 and first[0] == other[name][0], name
        assert max(one[name][2] for one in everyone) <= {2: 0.54, 4: 0.29}[size] * alone[name][2], name


def raised(act):
    try:
        act()
    except ShoestringError as error:
        return str(error)
    return ""


def sharded(size):
    found, refused = {}, {}
    for model, name in CELLS:
        task = doubled(MAKE[model]())
        rows = 8 // size
        share = cut(task.batch, slice(rank() * rows, (rank() + 1) * rows))
        found[model, name] = trained(task, PLANS[name], share, shards=True)
    refused["nonzero"] = raised(apply(layers(), Plan(nonzero=50)).shard)
    refused["in backward"] = raised(lambda: apply(layers(), Plan(optimizer="no-gradient", shard="fsdp")))
    refused["activations adaptive"] = raised(apply(maps(examples=8), Plan(activations="adaptive-400KB")).shard)
    lean = apply(layers(), Plan(microbatch=2))
    lean.shard()
    mine = cut(layers(examples=8).batch, slice(0, 2) if rank() == 0 else slice(2, 8))
    refused["unequal microbatches"] = raised(lambda: lean.step(mine))
    lean.step(cut(mine, slice(0, 2)))
    refused["after a step"] = raised(lean.shard)
    refused["a profile"] = raised(lambda: shoestring.profile(lean.task))
    clipped = apply(layers(SGD(lr=0.1)).with_(clip=0.01), Plan())
    clipped.shard()
    clipped.step(layers(examples=4).batch)
    refused["clipped"] = [whole(tensor) for tensor in clipped.model.parameters()]
    return found, refused


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_sharded_step_is_that_of_one_process_with_the_whole_batch(size):
    alone = {
        (model, name): trained(doubled(MAKE[model]()), PLANS[name], doubled(MAKE[model]()).batch, shards=False)
        for model, name in CELLS
    }
    everyone = run_in(size, sharded, size)
    for found, _ in everyone:
        for cell, (losses, weights, _) in found.items():
            assert losses == pytest.approx(alone[cell][0], rel=1e-10), cell
            for tensor, wanted in zip(weights, alone[cell][1], strict=True):
                torch.testing.assert_close(tensor, wanted, rtol=1e-9, atol=1e-10)
    shares = [found["layers", "nothing"][2] / alone["layers", "nothing"][2] for found, _ in everyone]
    assert max(shares) <= {2: 0.52, 4: 0.27}[size]
    refused = everyone[0][1]
    for name in ("nonzero", "activations adaptive"):
        assert f"{name} cannot be sharded" in refused[name]
    assert "add up their gradients before any weight changes" in refused["in backward"]
    assert "equal shares" in refused["unequal microbatches"] and "stepped already" in refused["after a step"]
    assert "before it is sharded" in refused["a profile"]
    plain = apply(layers(SGD(lr=0.1)).with_(clip=0.01), Plan())
    plain.step(layers(examples=4).batch)
    for tensor, wanted in zip(refused["clipped"], plain.model.parameters(), strict=True):
        torch.testing.assert_close(tensor, wanted.detach())


def test_one_process_has_nothing_to_shard():
    with pytest.raises(ShoestringError, match="one process alone"):
        apply(layers(), Plan()).shard()


def test_adaptive_activations_are_refused_beside_shards_and_a_module_of_that_name_is_not():
    assert "cannot be sharded" in refuses(layers(), {"shard": "fsdp", "activations": "adaptive-1MB"})
    assert refuses(layers(), {"shard": "fsdp", "activations": "adaptive_pool=half"}) == ""
