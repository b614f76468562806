"""FSDP2 holds the parameters, and a step is still one step on the whole batch."""

import pytest
import torch
from exact_models import layers, maps, words
from processes import rank, run_in
from runs import doubled

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
}
MAKE = {
    "words": lambda: words(Adam(lr=0.01), examples=8),
    "layers": lambda: layers(SGD(lr=0.1, momentum=0.9), 8),
    "maps": lambda: maps(examples=8),
}
CELLS = [(model, name) for model in MAKE for name in PLANS if (model == "maps") == bool(PLANS[name].activations)]


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
    for name, plan in {
        "precision": Plan(precision="bf16"),
        "nonzero": Plan(nonzero=50),
        "optimizer": Plan(optimizer="8bit"),
    }.items():
        lean = apply(layers(), plan)
        refused[name] = raised(lean.shard)
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
    for name in ("precision", "nonzero", "optimizer", "activations adaptive"):
        assert f"{name} cannot be sharded" in refused[name]
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
