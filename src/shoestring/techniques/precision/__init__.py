"""Low precision: weights, gradients, momenta and activations in 16 bits, without an FP32 master copy.

The card is docs/techniques/precision.md.

Normalisation keeps its parameters and statistics in FP32, and the loss is FP32. Arithmetic is FP32 wherever this CPU
has none in 16 bits: convolutions and linear layers widen a piece at a time in their kernels, the other products widen
their operands for the one call (`Widened`). FP16 comes with dynamic loss scaling.

The lean mode that does this also fuses batch norm with the ReLU and convolution after it, and saves one bit per element
of ReLU and dropout: precision alone includes `checkpoint="no-bn"` and `activations="masks"`. A checkpoint strategy
decides about the fusion itself (without a star, it is off).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...errors import ShoestringError
from ...passes.boundary import bound
from ...passes.mode import with_mode
from ...task import Task
from ..copies import copied
from ..evidence import SHORT
from ..optimizer import lean_update, runs_in_backward
from ..technique import Bounds, Risk, Technique
from .loss_scale import Scaling

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
NORMS = (
    nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm,
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """`form`: fp16 or bf16."""

    form: str


def options(task: Task) -> list[str]:
    """FP16, and BF16 if the optimizer can run in backward, which FP16's loss scale does not allow. Without that, BF16
    takes as many bytes as FP16 and holds fewer digits."""
    return ["fp16", "bf16"] if runs_in_backward(task) else ["fp16"]


def risk(task: Task, form: str) -> Risk:
    return Risk.NEUTRAL


def evidence(task: Task, form: str) -> str:
    """Beside our own runs: the paper's section 3.2 finds no loss of accuracy in FP16 on WRN-28-2, and 0.15 BLEU on the
    Transformer."""
    return str(SHORT[form.upper()])


def bounds(task: Task, form: str) -> Bounds:
    """Half of the lasting bytes, except 8-bit state, which is smaller already. Both dtypes make tensors of one size."""
    return Bounds(lasting=0.45, traced_as="fp16")


def apply(task: Task, settings: Settings) -> Task:
    """A task -> the same task with all tensors in 16 bits, except normalisation's."""
    if settings.form not in DTYPES:
        raise ShoestringError(f"there is no precision {settings.form!r}: use fp32, {' or '.join(DTYPES)}")
    dtype = DTYPES[settings.form]
    check_convertible(task.model, dtype)
    task = with_mode(task, "precision")[0]
    if any(parameter.is_meta for parameter in task.model.parameters()):
        task = task.with_(model=copied(task.model))  # costs nothing, and others may hold the model
    convert(task.model, dtype)
    bound(task.model, dtype)
    return task.with_(
        optimizer=lean_update(task, state=settings.form),
        scaling=Scaling() if dtype == torch.float16 else task.scaling,
    )


TECHNIQUE = Technique(Settings, apply, options, risk, bounds=bounds, evidence=evidence)


def check_convertible(model: nn.Module, dtype: torch.dtype) -> None:
    """Refuses parameters and buffers that 16 bits cannot hold, with name, number and range; no parameter is copied."""
    for name, parameter in converted(model, nn.Module.named_parameters):
        if not parameter.is_floating_point():
            raise ShoestringError(
                f"parameter {name} is {parameter.dtype}, which has no 16-bit form: make it a buffer, or use fp32"
            )
        check_range(f"parameter {name}", parameter.detach(), dtype)
    for name, buffer in converted(model, nn.Module.named_buffers):
        if buffer.is_floating_point():
            check_range(f"buffer {name}", buffer.masked_fill(buffer.isinf(), 0), dtype)  # a mask may have -inf


def check_range(what: str, values: Tensor, dtype: torch.dtype) -> None:
    """Refuses values out of a dtype's range."""
    if values.is_meta or not values.numel():
        return
    limit = torch.finfo(dtype).max
    lowest, highest = (float(value) for value in torch.aminmax(values))
    if not -limit <= lowest <= highest <= limit:  # NaN too is not between
        worst = lowest if -lowest > highest else highest
        raise ShoestringError(
            f"{what} has a value of {worst:.5g}, and {dtype} holds -{limit:.5g} to {limit:.5g}: "
            "look where it comes from, or use bf16 or fp32"
        )


def converted(model: nn.Module, named: Callable[..., Iterator]) -> Iterator[tuple[str, Tensor]]:
    """The parameters, or buffers, that become 16 bits, with their names: all but those of normalisation."""
    for prefix, module in model.named_modules():
        if not isinstance(module, NORMS):
            yield from named(module, prefix, recurse=False)


def convert(model: nn.Module, dtype: torch.dtype) -> None:
    """Puts every floating parameter and buffer into `dtype`, one at a time; normalisation stays as it is."""
    for module in model.modules():
        if isinstance(module, NORMS):
            continue
        for parameter in module._parameters.values():
            if parameter is not None and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)
