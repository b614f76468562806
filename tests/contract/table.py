"""The table of the contract: small tasks of every kind of model, and the plans that each must pass with."""

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import shoestring
import zoo
from shoestring import SGD, Plan, Task, apply
from shoestring.models.dynamicconv import DynamicConvTransformer, Settings
from shoestring.models.images import classification_loss
from shoestring.models.resnet import ResNet18
from shoestring.models.translation import count_target_tokens, random_pairs, translation_loss
from shoestring.models.vit import VisionTransformer
from shoestring.tokens import PAD

MOMENTUM = SGD(lr=0.05, momentum=0.9, nesterov=True)
STATELESS = SGD(lr=0.05)  # its second step is like its first


def wrn() -> Task:
    return shoestring.builtin("wrn-10-1", batch=12, image=16).with_(optimizer=MOMENTUM)


def resnet() -> Task:
    """ResNet-18 up to its third block: the rest repeats at sizes that only cost time."""
    model = ResNet18()
    model.blocks, model.fc = model.blocks[:3], nn.Linear(128, 10)
    return Task(model, classification_loss, zoo.images(6, size=12), MOMENTUM, name="resnet")


def dynamicconv() -> Task:
    settings = Settings(60, 50, 64, 128, 2, (3, 7), (3, 7), most_positions=64)
    pairs = random_pairs(torch.Generator().manual_seed(0), 200, (9, 20), settings)
    model = DynamicConvTransformer(settings)
    return Task(model, translation_loss, pairs, STATELESS, count_target_tokens, PAD, "dynamicconv")


def vit() -> Task:
    model = VisionTransformer(image=16, width=48, depth=2)
    return Task(model, classification_loss, zoo.images(12, size=16), STATELESS, name="vit")


def mlp() -> Task:
    return zoo.mlp(32)


def unet() -> Task:
    return zoo.unet(6).with_(optimizer=STATELESS)


def gpt() -> Task:
    model = zoo.Causal(vocabulary=100, width=64, depth=2)
    return Task(model, zoo.predict_tokens, zoo.tokens(6, 32, 100), STATELESS, name="gpt")


def bert() -> Task:
    model = zoo.Encoder(vocabulary=100, width=64, depth=2)
    return Task(model, zoo.predict_tokens, zoo.tokens(6, 32, 100), STATELESS, name="bert")


TASKS = {make.__name__: make for make in (wrn, resnet, dynamicconv, vit, mlp, unet, gpt, bert)}
NORMED = ("wrn", "resnet", "unet")
IMAGES = ("wrn", "resnet", "vit", "unet", "mlp")
NORMED_BLOCKS = ("wrn", "resnet")  # without batch norm, residual-1* is residual-1
BLOCKS = ("wrn", "resnet", "dynamicconv", "vit", "gpt", "bert")
REORDERED = (*NORMED, "vit")  # they have convolutions, whose sums a lean step does in another order

PLANS = {
    "no-bn": (NORMED, Plan(checkpoint="no-bn")),
    "every-3": (("wrn", "mlp", "unet", "gpt", "bert"), Plan(checkpoint="every-3")),
    "residual-1": (BLOCKS, Plan(checkpoint="residual-1")),
    "residual-1*": (NORMED_BLOCKS, Plan(checkpoint="residual-1*")),
    "residual-2": (BLOCKS, Plan(checkpoint="residual-2")),
    "residual-2*": (BLOCKS, Plan(checkpoint="residual-2*")),
    "residual-1**": (NORMED_BLOCKS, Plan(checkpoint="residual-1**")),
    "residual-2**": (NORMED_BLOCKS, Plan(checkpoint="residual-2**")),
    "optimal": (BLOCKS, Plan(checkpoint="optimal")),
    "offload": (("wrn", "unet", "gpt", "dynamicconv"), Plan(activations="offload")),
    "half": (("wrn", "gpt", "mlp"), Plan(activations="half")),
    "masks": (("dynamicconv", "mlp"), Plan(activations="masks")),
    "int8": (("wrn", "resnet", "unet"), Plan(activations="int8")),
    "int4": (("wrn", "resnet", "unet"), Plan(activations="int4")),
    "int2": (("wrn",), Plan(activations="int2")),
    "pool2": (("wrn", "resnet", "unet"), Plan(activations="pool2")),
    "pool4+int2": (("wrn", "resnet"), Plan(activations="pool4+int2")),
    "int8 of batch norm too": (("wrn",), Plan(activations="int8,*:batch_norm=int8")),
    "int8, residual-2*, microbatch": (
        ("wrn",),
        Plan(activations="int8", checkpoint="residual-2*", microbatch=6),
    ),
    "int8, fp16, no-bn": (("wrn",), Plan(activations="int8", precision="fp16", checkpoint="no-bn")),
    "residual-1, offload": (("wrn", "gpt", "dynamicconv"), Plan(checkpoint="residual-1", activations="offload")),
    "microbatch": (IMAGES, Plan(microbatch=5)),
    "microbatch by tokens": (("dynamicconv",), Plan(microbatch=160)),
    "residual-2*, microbatch": (("wrn", "gpt"), Plan(checkpoint="residual-2*", microbatch=4)),
    "residual-2**, microbatch": (("wrn",), Plan(checkpoint="residual-2**", microbatch=4)),
    "residual-1, microbatch by tokens": (("dynamicconv",), Plan(checkpoint="residual-1", microbatch=160)),
    "no-gradient": (("resnet", "mlp"), Plan(optimizer="no-gradient")),
    "8bit": (("wrn", "mlp"), Plan(optimizer="8bit")),
    "8bit, no-gradient": (("mlp",), Plan(optimizer="8bit+no-gradient")),
    "8bit-gradient, microbatch": (("wrn", "mlp"), Plan(optimizer="8bit-gradient", microbatch=4)),
    "sm3": (("mlp",), Plan(optimizer="sm3")),
    "adafactor": (("mlp",), Plan(optimizer="adafactor")),
    "fp16": (("wrn", "vit", "gpt", "unet"), Plan(precision="fp16")),
    "bf16": (("wrn", "mlp"), Plan(precision="bf16")),
    "nonzero": (("wrn", "gpt"), Plan(nonzero=30)),
    "fp16, residual-1, microbatch by tokens": (
        ("dynamicconv",),
        Plan(precision="fp16", checkpoint="residual-1", microbatch=160),
    ),
    "nonzero, residual-2*, microbatch": (("wrn",), Plan(nonzero=30, checkpoint="residual-2*", microbatch=4)),
    "everything": (("wrn",), Plan(nonzero=30, precision="fp16", checkpoint="residual-2*", microbatch=4)),
    "the hundredth": (
        ("wrn",),
        Plan(
            nonzero=30,
            precision="fp16",
            optimizer="8bit+8bit-gradient",
            checkpoint="residual-2**",
            activations="int4",
            microbatch=8,
        ),
    ),
}
CELLS = [(model, plan) for plan, (models, _) in PLANS.items() for model in models]


def _in_turn() -> list[tuple[str, str]]:
    turns, plans = dict.fromkeys(TASKS, 0), [model for model, _ in CELLS]
    found = []
    for plan, (models, _) in PLANS.items():
        model = min(models, key=lambda model: (turns[model], plans.count(model)))
        turns[model] += 1
        found.append((model, plan))
    return found


IN_TURN = _in_turn()  # each plan on one of its models, each model in turn: these are quick, and all others slow
# By word: a value that sets every setting of the technique, and how the command line says it.
EVERY_SETTING = {
    "nonzero": (
        {"nonzero": 30.5, "method": "set", "layers": ("conv", "blocks.*"), "fraction": 0.02, "fraction_multiplier": 2,
         "frequency_multiplier": 0.5, "updates": 500, "positions": "largest", "seed": 3},
        "30.5,method=set,layers=conv+blocks.*,fraction=0.02,fraction_multiplier=2,frequency_multiplier=0.5,updates=500,"
        "positions=largest,seed=3",
    ),
    "precision": ("bf16", "bf16"),
    "optimizer": ("8bit+no-gradient", "8bit+no-gradient"),
    "checkpoint": ({"strategy": "residual-2*", "blocks": ("one", "t?o")}, "residual-2*,blocks=one+t?o"),
    "activations": ("head:softmax=half,masks,offload", "head:softmax=half,masks,offload"),
    "microbatch": ({"size": 4, "by": "examples", "simulated": True}, "4,by=examples,simulated=true"),
    "shard": ("fsdp", "fsdp"),
}  # fmt: skip


class Nearness(NamedTuple):
    """How far what a plan rounds may be from FP64, relative, in L2 over the whole model. Of two steps' gradients: the
    rounding of all activations. Of the weights' way: the rounding of gradients and moments, and of each weight by up to
    half a spacing, which is large beside a small update and cancels in `went`."""

    gradients: float
    weights: float


NEAR = {
    "half": Nearness(0.001, 0.01),
    "int8": Nearness(0.02, 0.03),
    "int4": Nearness(0.3, 0.4),
    "int8 of batch norm too": Nearness(0.03, 0.04),
    "int8, residual-2*, microbatch": Nearness(0.03, 0.04),
    "int8, fp16, no-bn": Nearness(0.08, 0.2),
    "8bit": Nearness(1e-5, 0.01),
    "8bit-gradient, microbatch": Nearness(0.04, 0.12),
    "8bit, no-gradient": Nearness(1e-5, 0.01),
    "fp16": Nearness(0.08, 0.2),
    "bf16": Nearness(0.2, 0.3),
    "fp16, residual-1, microbatch by tokens": Nearness(0.04, 0.12),
    "everything": Nearness(0.08, 0.08),
    "the hundredth": Nearness(0.3, 0.3),
}
OTHER_METHODS = ("sm3", "adafactor")
COARSE = ("int2", "pool2", "pool4+int2")  # how near they come is what `shoestring fidelity` measures
SPARSE = [cell for cell in CELLS if PLANS[cell[1]][1].nonzero]
NEAR_CELLS = [cell for cell in CELLS if cell[1] in NEAR]
EXACT_CELLS = [cell for cell in CELLS if cell not in SPARSE and cell[1] not in (*NEAR, *OTHER_METHODS, *COARSE)]


def rows(cells: list[tuple[str, str]]) -> list[Any]:
    """Cells as parameters of a test: those that are not of the quick ones are slow."""
    return [pytest.param(*cell, marks=() if cell in IN_TURN else pytest.mark.slow) for cell in cells]


def task(model: str) -> Task:
    """The task by that name, always with the same weights and the same batch."""
    torch.manual_seed(0)
    return TASKS[model]()


@cache
def lean(model: str, plan: str) -> Task:
    """The task under the plan, one for all tests that do not look at its weights: it takes long to make."""
    return apply(task(model), PLANS[plan][1]).task
