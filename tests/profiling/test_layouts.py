"""A trace lays tensors out as a run does: what is contiguous there and not here would be copied in one of them only."""

import pytest
import torch
import torch.nn.functional as F

from shoestring import SGD, Task
from shoestring.profiling.dry import dry_run
from views import VIEWS

CALLS = {
    "batch_norm": lambda x, w: F.batch_norm(x, None, None, w[:8], w[:8], training=True),
    "batch_norm of tokens": lambda x, w: F.batch_norm(x.flatten(2), None, None, w[:8], training=True),
    "batch_norm of transposed": lambda x, w: F.batch_norm(x.mean(3).transpose(1, 2), None, None, training=True),
    "group_norm": lambda x, w: F.group_norm(x, 4, w[:8]),
    "instance_norm": lambda x, w: F.instance_norm(x),
    "layer_norm": lambda x, w: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x, w: F.rms_norm(x, x.shape[-1:]),
    "conv2d": lambda x, w: F.conv2d(x, w[:512].view(8, 8, 8)[..., :4].reshape(8, 8, 2, 2)),
    "conv1d": lambda x, w: F.conv1d(x.flatten(2), w[:192].view(8, 8, 3)),
    "conv_transpose2d": lambda x, w: F.conv_transpose2d(x, w[:256].view(8, 8, 2, 2), stride=2),
    "linear": lambda x, w: F.linear(x, w[:48].view(8, 6)),
    "max_pool2d": lambda x, w: F.max_pool2d(x, 2),
    "avg_pool2d": lambda x, w: F.avg_pool2d(x, 2),
    "adaptive_avg_pool2d": lambda x, w: F.adaptive_avg_pool2d(x, 2),
    "interpolate": lambda x, w: F.interpolate(x, scale_factor=2.0),
    "bilinear": lambda x, w: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "pad": lambda x, w: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "gelu": lambda x, w: F.gelu(x),
    "softmax": lambda x, w: x.softmax(1),
    "prelu": lambda x, w: F.prelu(x, w[:1]),
    "cat": lambda x, w: torch.cat([x, x * w[0]], 1),
    "matmul": lambda x, w: x.transpose(1, 2) @ x.permute(0, 2, 3, 1),
    "attention": lambda x, w: F.scaled_dot_product_attention(x, x, x * w[0]),
}


def layouts(call, view, x, weight):
    """The strides of what a call makes of a view, and of its gradients."""
    given = VIEWS[view](x * weight[0])
    given.retain_grad()
    made = CALLS[call](given, weight)
    made.square().sum().backward()
    return made.stride(), given.grad.stride()


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("call", CALLS)
def test_what_an_operation_makes_lies_in_a_trace_as_in_a_run(call, view):
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.randn(512))
    x = torch.randn(3, 8, 6, 6)
    task = Task(model, lambda model, x: (model.weight * x.mean()).sum(), x, SGD())
    assert dry_run(task, x, lambda x: layouts(call, view, x, model.weight)) == layouts(call, view, x, model.weight)
