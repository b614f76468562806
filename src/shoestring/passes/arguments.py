"""The arguments of PyTorch's functions by name, whichever way they were called: f(*args, **kwargs) as a mapping."""

from typing import Any

import torch
from torch import Tensor

from ..kernels.windows import Window


def _pairs(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value) * (2 // len(value))


def convolution_arguments(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: Any = 1
) -> dict[str, Any]:
    dilation = _pairs(dilation)
    padding = _padding(padding, weight.shape[-2:], dilation)
    return {"input": input, "weight": weight, "bias": bias, "stride": _pairs(stride), "padding": padding,
            "dilation": dilation, "groups": groups}  # fmt: skip


def _padding(padding: Any, kernel: torch.Size, dilation: tuple[int, int]) -> tuple[int, int] | str:
    """Padding in numbers; "same" stays a word if it would be one wider on one side."""
    if padding == "valid":
        return 0, 0
    if padding == "same":
        total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return padding if any(t % 2 for t in total) else (total[0] // 2, total[1] // 2)
    return padding if isinstance(padding, str) else _pairs(padding)


def instance_norm_arguments(
    input: Any, running_mean: Any = None, running_var: Any = None, weight: Any = None, bias: Any = None,
    use_input_stats: Any = True, momentum: Any = 0.1, eps: Any = 1e-05,
) -> dict[str, Any]:  # fmt: skip
    return locals()


def relu_arguments(input: Any, inplace: Any = False) -> dict[str, Any]:
    return locals()


def linear_arguments(input: Any, weight: Any, bias: Any = None) -> dict[str, Any]:
    return locals()


def max_pool_arguments(
    input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
    return_indices: bool = False,
) -> dict[str, Any]:  # fmt: skip
    kernel = _pairs(kernel_size)
    steps = kernel if stride is None or (not isinstance(stride, int) and not stride) else _pairs(stride)
    return {"input": input, "window": Window(kernel, steps, _pairs(padding), _pairs(dilation), ceil_mode)}


def dropout_arguments(input: Any, p: Any = 0.5, training: Any = True, inplace: Any = False) -> dict[str, Any]:
    return locals()
