"""The table of the contract: small tasks of every kind of model, and the plans that each must pass with."""

import torch
from torch import nn

import shoestring
import zoo
from shoestring import SGD, Plan, Task
from shoestring.models.dynamicconv import PAD, DynamicConvTransformer, Settings
from shoestring.models.images import classification_loss
from shoestring.models.resnet import ResNet18
from shoestring.models.translation import count_target_tokens, random_pairs, translation_loss
from shoestring.models.vit import VisionTransformer

MOMENTUM = SGD(lr=0.05, momentum=0.9, nesterov=True)


def wrn() -> Task:
    return shoestring.builtin("wrn-10-1", batch=12, image=16).with_(optimizer=MOMENTUM)


def resnet() -> Task:
    """ResNet-18 up to its fourth block: the rest repeats at sizes that only cost time."""
    model = ResNet18()
    model.blocks, model.fc = model.blocks[:4], nn.Linear(128, 10)
    return Task(model, classification_loss, zoo.images(6, size=12), MOMENTUM, name="resnet")


def dynamicconv() -> Task:
    settings = Settings(60, 50, 64, 128, 2, (3, 7), (3, 7), most_positions=64)
    pairs = random_pairs(torch.Generator().manual_seed(0), 300, (9, 20), settings)
    model = DynamicConvTransformer(settings)
    return Task(model, translation_loss, pairs, SGD(lr=0.05), count_target_tokens, PAD, "dynamicconv")


def vit() -> Task:
    model = VisionTransformer(image=16, width=48, depth=3)
    return Task(model, classification_loss, zoo.images(12, size=16), SGD(lr=0.05), name="vit")


def mlp() -> Task:
    return zoo.mlp(32)


def unet() -> Task:
    return zoo.unet(6)


def gpt() -> Task:
    model = zoo.Causal(vocabulary=100, width=64, depth=3)
    return Task(model, zoo.predict_tokens, zoo.tokens(6, 32, 100), zoo.Adam(), name="gpt")


def bert() -> Task:
    model = zoo.Encoder(vocabulary=100, width=64, depth=2)
    return Task(model, zoo.predict_tokens, zoo.tokens(6, 32, 100), zoo.Adam(), name="bert")


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
    "optimal": (BLOCKS, Plan(checkpoint="optimal")),
    "disk": (("wrn", "unet", "gpt", "dynamicconv"), Plan(keep="disk")),
    "half": (("wrn", "gpt", "mlp"), Plan(keep="half")),
    "masks": (("dynamicconv", "mlp"), Plan(keep="masks")),
    "residual-1, disk": (("wrn", "gpt", "dynamicconv"), Plan(checkpoint="residual-1", keep="disk")),
    "microbatch": (IMAGES, Plan(microbatch=5)),
    "microbatch by tokens": (("dynamicconv",), Plan(microbatch=180)),
    "residual-2*, microbatch": (("wrn", "gpt"), Plan(checkpoint="residual-2*", microbatch=4)),
    "residual-1, microbatch by tokens": (("dynamicconv",), Plan(checkpoint="residual-1", microbatch=180)),
    "fp16": (("wrn", "vit", "gpt", "unet"), Plan(precision="fp16")),
    "bf16": (("wrn", "mlp"), Plan(precision="bf16")),
    "fp16, residual-2*, microbatch": (("wrn",), Plan(precision="fp16", checkpoint="residual-2*", microbatch=4)),
    "fp16, residual-1, microbatch by tokens": (
        ("dynamicconv",),
        Plan(precision="fp16", checkpoint="residual-1", microbatch=180),
    ),
    "8bit": (("wrn", "gpt"), Plan(optimizer="8bit")),
    "no-gradient": (("wrn", "gpt"), Plan(optimizer="no-gradient")),
}
CELLS = [(model, plan) for plan, (models, _) in PLANS.items() for model in models]
APPROXIMATE = ("half",)
NARROW = ("fp16", "bf16", "8bit", "no-gradient")  # other types, or no gradients left to compare: see their own tests
EXACT_CELLS = [cell for cell in CELLS if cell[1].split(",")[0] not in (*APPROXIMATE, *NARROW)]


def task(model: str) -> Task:
    """The task by that name, always with the same weights and the same batch."""
    torch.manual_seed(0)
    return TASKS[model]()
