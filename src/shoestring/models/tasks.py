"""The built-in tasks: a name and a batch size -> model, loss, random batch and optimizer, as in the paper."""

import difflib
import inspect
import re
from collections.abc import Callable
from typing import Any

import torch

from ..errors import ShoestringError
from ..task import Task
from .build import check_count, materialise
from .images import convnext_tiny, resnet18, resnet18_imagenet, vit_tiny, wide_resnet
from .translation import dynamicconv_iwslt

MAKERS: dict[str, Callable[..., Task]] = {
    "resnet18": resnet18,
    "resnet18-imagenet": resnet18_imagenet,
    "dynamicconv-iwslt": dynamicconv_iwslt,
    "vit-tiny": vit_tiny,
    "convnext-tiny": convnext_tiny,
}
NAMES = ("wrn-DEPTH-WIDTH (such as wrn-28-2)", *MAKERS)
# For lists: a name, what it is, and what its batches are counted in.
CATALOGUE = {
    "wrn-28-2": ("the paper's WideResNet, on 32 x 32 images", "batch"),
    "wrn-16-4": ("a wider, shallower WideResNet", "batch"),
    "resnet18": ("ResNet-18 with a stem for 32 x 32 images", "batch"),
    "resnet18-imagenet": ("ResNet-18 on 224 x 224 images", "batch"),
    "vit-tiny": ("a vision transformer, 12 layers of width 192, 4 x 4 patches", "batch"),
    "convnext-tiny": ("ConvNeXt-T on 224 x 224 images", "batch"),
    "dynamicconv-iwslt": ("the paper's DynamicConv Transformer, for translation", "tokens"),
}


def builtin(
    name: str,
    batch: int | None = None,
    tokens: int | None = None,
    device: str | torch.device = "cpu",
    seed: int = 0,
    **options: Any,
) -> Task:
    """A built-in task by name: `builtin("wrn-28-2", batch=100)`, `builtin("dynamicconv-iwslt", tokens=4000)`.

    `device="meta"` gives a model without memory, for profiles of models too big to build; its batch is on the
    CPU, and `materialise(task.model, seed=seed)` gives it the weights that `device="cpu"` would have.
    """
    check_count("seed", seed, 2**63 - 1, least=0)
    device, make = usable_device(device), find(name)
    options |= {key: value for key, value in (("batch", batch), ("tokens", tokens)) if value is not None}
    check_options(name, make, options)
    # Their losses are means over images or target tokens, which could not be checked on the meta device.
    task = make(torch.Generator().manual_seed(seed), **options).with_(name=name, microbatches=True)
    if device.type == "meta":
        return task
    materialise(task.model, device, seed)
    return task.with_(batch=tuple(tensor.to(device) for tensor in task.batch))


def find(name: str) -> Callable[..., Task]:
    """A built-in name -> the function that makes its task, on meta, from a generator and options."""
    if wide := re.fullmatch(r"wrn-(\d{1,9})-(\d{1,9}(?:\.\d{1,9})?)", name):
        return wide_resnet(depth=int(wide[1]), width=float(wide[2]))
    if name not in MAKERS:
        near = _nearest(name)
        raise ShoestringError(
            f"there is no built-in model {name!r}: {f'did you mean {near}? There are' if near else 'use one of'} "
            f"{', '.join(NAMES)}; for a model of your own write file.py:function"
        )
    return MAKERS[name]


def is_known(name: str) -> bool:
    """Whether a built-in model has this name."""
    try:
        find(name)
    except ShoestringError:
        return False
    return True


def _nearest(name: str) -> str:
    """The built-in name that was probably meant; "" if none is near. Case and hyphens do not count."""
    plain, bare = {re.sub(r"[\W_]", "", known): known for known in CATALOGUE}, re.sub(r"[\W_]", "", name.lower())
    close = difflib.get_close_matches(bare, plain, n=1, cutoff=0.75)
    close = close or [known for known in plain if bare and known.startswith(bare)]  # vit: vit-tiny
    return plain[close[0]] if close else ""


def check_options(name: str, make: Callable[..., Task], options: dict[str, Any]) -> None:
    """Raises if `make` does not take one of the options."""
    known = list(inspect.signature(make).parameters)[1:]  # the generator is not an option
    if unknown := sorted(set(options) - set(known)):
        raise ShoestringError(f"{name} has no option {unknown[0]!r}: it takes {', '.join(known)}")


def usable_device(device: str | torch.device) -> torch.device:
    """The device of that name, if a tensor can be created on it."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ShoestringError(f"device {device} cannot be used here ({reason}): use cpu or meta") from error
