"""The built-in tasks: a name and a batch size -> model, loss, random batch and the optimizer of the seeds."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ShoestringError
from ..task import SGD, Task
from .build import materialise
from .wrn import WideResNet

MOST_BATCH_BYTES = 10**9  # the random batch is real, even where the model is not
VISION_SGD = SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)


def builtin(
    name: str,
    batch: int | None = None,
    tokens: int | None = None,
    device: str | torch.device = "cpu",
    seed: int = 0,
    **options: Any,
) -> Task:
    """A built-in task by name: `builtin("wrn-28-2", batch=100)`.

    `device="meta"` gives a model without memory, for profiles of models too big to build; its batch is on the
    CPU, and `materialise(task.model, seed=seed)` gives it the very weights that `device="cpu"` would have.
    """
    maker, sizes = find(name)
    options |= {key: value for key, value in (("batch", batch), ("tokens", tokens)) if value is not None}
    known = list(inspect.signature(maker).parameters)[len(sizes) + 1 :]
    if unknown := sorted(set(options) - set(known)):
        raise ShoestringError(f"{name} has no option {unknown[0]!r}: it takes {', '.join(known)}")
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        task = maker(generator, *sizes, **options)
    if torch.device(device).type == "meta":
        return task.with_(name=name)
    materialise(task.model, device, seed)
    moved = tuple(tensor.to(device) for tensor in task.batch)
    return task.with_(name=name, batch=moved)


def find(name: str) -> tuple[Callable[..., Task], tuple[Any, ...]]:
    """A built-in name -> the function that makes its task, and the sizes that the name holds."""
    for pattern, maker, *kinds in MAKERS:
        if match := re.fullmatch(pattern, name):
            return maker, tuple(kind(text) for kind, text in zip(kinds, match.groups(), strict=True))
    raise ShoestringError(f"there is no built-in model {name!r}: use one of {', '.join(NAMES)}")


def wide_resnet(
    generator: torch.Generator, depth: int, width: float, batch: int = 100, classes: int = 10, image: int = 32
) -> Task:
    """WRN-`depth`-`width` on random images of CIFAR-10's shape."""
    images = image_batch(generator, batch, classes, image)
    return Task(WideResNet(depth, width, classes), classification_loss, images, VISION_SGD)


def image_batch(generator: torch.Generator, batch: int, classes: int, image: int) -> tuple[Tensor, Tensor]:
    """Random images (batch, 3, image, image) and labels."""
    check_count("image", image, 8192)
    check_count("classes", classes, 10**6)
    check_count("batch", batch, MOST_BATCH_BYTES // (4 * 3 * image**2))
    images = torch.randn(batch, 3, image, image, generator=generator, device="cpu")
    return images, torch.randint(classes, (batch,), generator=generator, device="cpu")


def classification_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy over the images of a batch."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def check_count(what: str, count: int, largest: int) -> None:
    """Raises unless `count` is a whole number from 1 to `largest`."""
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= largest:
        raise ShoestringError(f"{what} {count} is out of range: give a whole number from 1 to {largest:,}")


MAKERS: tuple[tuple, ...] = ((r"wrn-(\d{1,9})-(\d{1,9}(?:\.\d{1,9})?)", wide_resnet, int, float),)
NAMES = ("wrn-DEPTH-WIDTH (such as wrn-28-2)",)
