"""Networks that nobody wrote train under every exact plan as they train under plain PyTorch.

The number in a test's name is the network's seed: `networks.draw(seed)` gives it again, and the message of a failure
has the least network that fails alike, to be pasted into `comparing.verdict`.
"""

from random import Random

import pytest
from comparing import EXACT, least, verdict
from networks import CONVOLUTIONS, JOINS, NORMS, TOKENS, WALKS, WATCHES, Network, draw
from pieces import ACTIVATIONS

from shoestring.techniques.activations import saving


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch):
    monkeypatch.setattr(saving, "SMALL_BYTES", 256)  # else no tensor of these networks would go to a file


def hold(network, plans):
    """Fails where a plan changes the training -> the plans that were refused, with the reasons."""
    refused = {}
    for plan in plans:
        found = verdict(network, EXACT[plan])
        if found.failure:
            simplest = least(network, EXACT[plan])
            likewise = verdict(simplest, EXACT[plan]).failure
            pytest.fail(f"{plan}: {found.failure}\nof {network}\nlikewise {likewise}\nof {simplest}")
        if found.refusal:
            refused[plan] = found.refusal
    return refused


@pytest.mark.parametrize("seed", range(200))
def test_a_network_trains_under_an_exact_plan_as_under_plain_pytorch(seed):
    hold(draw(seed), Random(seed).sample(list(EXACT), 1))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 2200))
def test_a_network_trains_under_exact_plans_as_under_plain_pytorch(seed):
    hold(draw(seed), Random(seed).sample(list(EXACT), 3))


# -- each way of writing a layer, by itself ---------------------------------------------------------------------------
def images(norm="BatchNorm2d", activation="ReLU", convolution="Conv2d", **how):
    return Network("images", ((norm, activation, convolution),) * 2, **how)


ALONE = (
    {name: images(norm=name) for name in NORMS}
    | {name: images(activation=name) for name in ACTIVATIONS}
    | {name: images(convolution=name) for name in CONVOLUTIONS}
    | {f"tokens: {name}": Network("tokens", (("LayerNorm", name),) * 2) for name in TOKENS}
    | {f"joined: {name}": images(join=name) for name in JOINS}
    | {f"blocks: {name}": images(walk=name) for name in WALKS}
    | {f"watched: {name}": images(watch=name) for name in WATCHES}
    | {f"tokens, blocks: {name}": Network("tokens", (("LayerNorm", "attention"),) * 3, walk=name) for name in WALKS}
)


@pytest.mark.parametrize(("what", "number"), [(what, number) for number, what in enumerate(ALONE)])
def test_each_way_of_writing_a_layer_trains_as_under_plain_pytorch(what, number):
    refused = hold(ALONE[what], ("residual-1*", list(EXACT)[number % len(EXACT)]))
    assert "residual-1*" not in refused


@pytest.mark.slow
@pytest.mark.parametrize("what", ALONE)
def test_each_way_of_writing_a_layer_trains_under_every_exact_plan(what):
    assert len(hold(ALONE[what], EXACT)) < len(EXACT) / 2
