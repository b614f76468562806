"""Layers in all the ways in which people write and call them: name -> a function of the width that makes one.

Each keeps the shape of what it is called with: maps (batch, width, 8, 8), or tokens (batch, 10, width).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


class Call(nn.Module):
    """Layers and a function of them and the input: a line of a model's forward, with the parameters that it needs."""

    def __init__(self, function: Callable[..., Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.layers)


def call(function: Callable[..., Tensor], *makers: Callable[[int], nn.Module]) -> Callable[[int], nn.Module]:
    return lambda width: Call(function, *(make(width) for make in makers))


def conv(**settings) -> Callable[[int], nn.Module]:
    return lambda width: nn.Conv2d(width, width, **({"kernel_size": 3, "padding": 1} | settings))


def linear(width: int) -> nn.Linear:
    return nn.Linear(width, width)


def norm(width: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(width)


# -- batch norm and its relatives ---------------------------------------------------------------------------------
def changed_in_place(x, layer):
    y = layer(x)
    y[:, 0] *= 0.5
    y += 0.1
    return y


def in_training(x, n):
    return F.batch_norm(x, n.running_mean, n.running_var, n.weight, n.bias, n.training, n.momentum, n.eps)


def by_keywords(x, n):
    return F.batch_norm(
        input=x, running_mean=n.running_mean, running_var=n.running_var, weight=n.weight, bias=n.bias, training=True
    )


def frozen(width: int) -> nn.Module:
    layer = nn.BatchNorm2d(width).eval()
    layer.train = lambda mode=True: layer  # type: ignore[method-assign]
    return layer


NORMS = {
    "BatchNorm2d": norm,
    "BatchNorm2d without affine": lambda width: nn.BatchNorm2d(width, affine=False),
    "BatchNorm2d without statistics": lambda width: nn.BatchNorm2d(width, track_running_stats=False),
    "BatchNorm2d with cumulative statistics": lambda width: nn.BatchNorm2d(width, momentum=None),
    "BatchNorm2d, frozen": frozen,
    "F.batch_norm": call(in_training, norm),
    "F.batch_norm by keywords": call(by_keywords, norm),
    "F.batch_norm of the batch alone": call(lambda x: F.batch_norm(x, None, None, training=True)),
    "BatchNorm2d changed in place": call(changed_in_place, norm),
    "BatchNorm2d twice": call(lambda x, n: n(n(x)), norm),
    "GroupNorm": lambda width: nn.GroupNorm(2, width),
    "InstanceNorm2d": lambda width: nn.InstanceNorm2d(width, affine=True),
    "LayerNorm over channels": call(
        lambda x, n: n(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), lambda width: nn.LayerNorm(width)
    ),
    "no norm": call(lambda x: x * 0.5),
}


# -- activations --------------------------------------------------------------------------------------------------
def logged(x):
    y = F.relu(x)
    y.detach().mean()
    return y


def without_recording(x):
    y = F.relu(x)
    with torch.no_grad():
        size = y.abs().mean()
    return y / (1 + size)


ACTIVATIONS = {
    "ReLU": lambda width: nn.ReLU(),
    "ReLU in place": lambda width: nn.ReLU(inplace=True),
    "F.relu": call(F.relu),
    "F.relu by keyword": call(lambda x: F.relu(input=x)),
    "F.relu in place": call(lambda x: F.relu(x.clone(), True)),
    "torch.relu": call(torch.relu),
    "torch.relu by keyword": call(lambda x: torch.relu(input=x)),
    "x.relu()": call(lambda x: x.relu()),
    "x.relu_()": call(lambda x: x.clone().relu_()),
    "clamp": call(lambda x: x.clamp(min=0)),
    "ReLU, logged": call(logged),
    "ReLU, scaled by its size": call(without_recording),
    "ReLU twice": call(lambda x: F.relu(F.relu(x))),
    "ReLU of both signs": call(lambda x: F.relu(x) - 0.1 * F.relu(-x)),
    "GELU": lambda width: nn.GELU(),
    "SiLU in place": lambda width: nn.SiLU(inplace=True),
    "LeakyReLU in place": lambda width: nn.LeakyReLU(0.1, inplace=True),
    "tanh": call(torch.tanh),
    "dropout": lambda width: nn.Sequential(nn.ReLU(), nn.Dropout(0.2)),
    "F.dropout by keywords": call(lambda x, d: F.dropout(input=x, p=0.2, training=d.training), lambda w: nn.Dropout(0)),
    "dropout in place": lambda width: nn.Dropout(0.2, inplace=True),
    "nothing": lambda width: nn.Identity(),
}


# -- convolutions -------------------------------------------------------------------------------------------------
def standardised(x, c):
    weight = c.weight - c.weight.mean((1, 2, 3), keepdim=True)
    return F.conv2d(x, weight, c.bias, padding=1)


def standardised_by_batch_norm(x, c):
    rows = F.batch_norm(c.weight.flatten(1)[None], None, None, training=True, momentum=0.0)
    return F.conv2d(x, rows.view_as(c.weight), c.bias, padding=1)


def in_autocast(x, c):
    with torch.autocast("cpu", torch.bfloat16):
        return c(x).to(x.dtype)


def beside_no_grad(x, c):
    with torch.no_grad():
        aside = c(x).mean()
    return c(x) - aside


def by_unfolding(x, c):
    columns = F.unfold(x, 3, padding=1)
    return (c.weight.flatten(1) @ columns).view_as(x)


def checkpointed(x, c):
    return checkpoint(c, x, use_reentrant=False)


def tied(width: int) -> nn.Module:
    first, second = conv()(width), conv()(width)
    second.weight = first.weight
    return nn.Sequential(first, nn.ReLU(), second)


CONVOLUTIONS = {
    "Conv2d": conv(),
    "Conv2d without bias": conv(bias=False),
    "Conv2d 1x1": conv(kernel_size=1, padding=0),
    "Conv2d same": conv(padding="same"),
    "Conv2d valid": call(lambda x, c: c(F.pad(x, (1, 1, 1, 1))), conv(padding="valid")),
    "Conv2d with pairs": conv(kernel_size=(3, 1), padding=(1, 0), stride=(1, 1)),
    "Conv2d same, dilated": conv(kernel_size=(3, 5), padding="same", dilation=(2, 1)),
    "Conv2d dilated": conv(padding=2, dilation=2),
    "Conv2d reflect": conv(padding_mode="reflect"),
    "Conv2d circular": conv(padding_mode="circular", padding=(2, 1), kernel_size=(5, 3)),
    "Conv2d replicate same": conv(padding_mode="replicate", padding="same"),
    "Conv2d in groups": conv(groups=2),
    "Conv2d depthwise": conv(groups=8),
    "Conv2d down and up": call(lambda x, c: F.interpolate(c(x), scale_factor=2), conv(stride=2)),
    "ConvTranspose2d": lambda width: nn.ConvTranspose2d(width, width, 3, padding=1),
    "F.conv2d": call(lambda x, c: F.conv2d(x, c.weight, c.bias, 1, 1), conv()),
    "F.conv2d by keywords": call(lambda x, c: F.conv2d(input=x, weight=c.weight, padding=1), conv(bias=False)),
    "F.conv2d same by keywords": call(
        lambda x, c: F.conv2d(input=x, weight=c.weight, bias=c.bias, padding="same"), conv()
    ),
    "torch.conv2d": call(lambda x, c: torch.conv2d(x, c.weight, c.bias, padding=(1, 1)), conv()),
    "torch.convolution": call(
        lambda x, c: torch.convolution(x, c.weight, c.bias, (1, 1), (1, 1), (1, 1), False, (0, 0), 1), conv()
    ),
    "Conv2d by keyword": call(lambda x, c: c(input=x), conv()),
    "Conv2d standardised": call(standardised, conv()),
    "Conv2d standardised by F.batch_norm": call(standardised_by_batch_norm, conv()),
    "Conv2d with weight_norm": lambda width: parametrizations.weight_norm(conv()(width)),
    "Conv2d in a local autocast": call(in_autocast, conv()),
    "Conv2d in no_grad beside": call(beside_no_grad, conv()),
    "Conv2d twice": call(lambda x, c: c(F.relu(c(x))), conv()),
    "Conv2d tied": tied,
    "Conv2d changed in place": call(changed_in_place, conv()),
    "Conv2d of channels_last": call(lambda x, c: c(x.contiguous(memory_format=torch.channels_last)), conv()),
    "Conv2d of two halves": call(
        lambda x, c: torch.cat([c(half) for half in x.chunk(2, 1)], 1), lambda width: conv()(width // 2)
    ),
    "Conv2d checkpointed": call(checkpointed, conv()),
    "unfold and matmul": call(by_unfolding, conv(bias=False)),
    "max pool": call(lambda x: F.max_pool2d(x, 3, 1, 1)),
}


# -- tokens -------------------------------------------------------------------------------------------------------
def heads(x, layer):
    """Queries, keys and values of two heads."""
    return (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in layer(x).chunk(3, -1))


def together(x):
    return x.transpose(1, 2).flatten(2)


def attention(x, layer, out):
    q, k, v = heads(x, layer)
    return out(together(F.scaled_dot_product_attention(q, k, v)))


def attention_by_keywords(x, layer, out):
    q, k, v = heads(x, layer)
    return out(together(F.scaled_dot_product_attention(query=q, key=k, value=v, is_causal=True)))


def attention_with_a_mask(x, layer, out):
    q, k, v = heads(x, layer)
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
    return out(together(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))


def attention_by_hand(x, layer, out):
    q, k, v = heads(x, layer)
    scores = torch.matmul(input=q, other=k.transpose(-2, -1)) / q.shape[-1] ** 0.5
    return out(together(F.softmax(scores.masked_fill(scores > 3, -1.0), -1) @ v))


def by_einsum(x, layer):
    return torch.einsum("btc,dc->btd", x, layer.weight) + layer.bias


def by_bmm(x, layer):
    weight = layer.weight.t().expand(len(x), -1, -1)
    return torch.baddbmm(layer.bias.expand(len(x), 1, -1), x, weight) + 0.1 * torch.bmm(input=x, mat2=weight)


def self_attention(x, layer):
    return layer(x, x, x, need_weights=False)[0]


def attention_with_weights(x, layer):
    y, weights = layer(query=x, key=x, value=x)
    return y * (1 + weights.mean())


def multihead(width: int) -> nn.Module:
    return nn.MultiheadAttention(width, 2, batch_first=True)


def qkv(width: int) -> nn.Linear:
    return nn.Linear(width, 3 * width)


def encoder_layer(width: int) -> nn.Module:
    return nn.TransformerEncoderLayer(width, 2, 2 * width, 0.1, batch_first=True, norm_first=True)


def padded(x, layer):
    mask = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2]) >= 7
    return layer(x, src_key_padding_mask=mask)


def widened(x, up, down):
    return down(F.gelu(up(x)))


TOKENS = {
    "Linear": linear,
    "Linear by keyword": call(lambda x, layer: layer(input=x), linear),
    "Linear changed in place": call(changed_in_place, linear),
    "Linear twice": call(lambda x, layer: layer(torch.tanh(layer(x))), linear),
    "Linear with weight_norm": lambda width: parametrizations.weight_norm(linear(width)),
    "F.linear": call(lambda x, layer: F.linear(x, layer.weight, layer.bias), linear),
    "F.linear by keywords": call(lambda x, layer: F.linear(input=x, weight=layer.weight), linear),
    "F.linear and its transpose": call(
        lambda x, layer: F.linear(F.relu(F.linear(x, layer.weight)), layer.weight.t()), linear
    ),
    "@": call(lambda x, layer: x @ layer.weight.t(), linear),
    "x.matmul(other=)": call(lambda x, layer: x.matmul(other=layer.weight.t()), linear),
    "torch.matmul by keywords": call(lambda x, layer: torch.matmul(input=x, other=layer.weight), linear),
    "torch.addmm": call(lambda x, layer: torch.addmm(layer.bias, x.flatten(0, 1), layer.weight).view_as(x), linear),
    "einsum": call(by_einsum, linear),
    "bmm": call(by_bmm, linear),
    "widened": call(widened, lambda width: nn.Linear(width, 3 * width), lambda width: nn.Linear(3 * width, width)),
    "gated": call(lambda x, a, b: F.silu(a(x)) * b(x), linear, linear),
    "Conv1d": call(
        lambda x, c: c(x.transpose(1, 2)).transpose(1, 2), lambda width: nn.Conv1d(width, width, 3, padding="same")
    ),
    "BatchNorm1d": call(lambda x, n: n(x.transpose(1, 2)).transpose(1, 2), lambda width: nn.BatchNorm1d(width)),
    "LayerNorm": lambda width: nn.LayerNorm(width),
    "LayerNorm changed in place": call(changed_in_place, nn.LayerNorm),
    "dropout changed in place": call(changed_in_place, lambda width: nn.Dropout(0.1)),
    "RMSNorm": lambda width: nn.RMSNorm(width),
    "F.layer_norm by keywords": call(lambda x: F.layer_norm(input=x, normalized_shape=x.shape[-1:])),
    "GRU": call(lambda x, r: r(x)[0], lambda width: nn.GRU(width, width, batch_first=True)),
    "attention": call(attention, qkv, linear),
    "attention by keywords": call(attention_by_keywords, qkv, linear),
    "attention with a mask": call(attention_with_a_mask, qkv, linear),
    "attention by hand": call(attention_by_hand, qkv, linear),
    "MultiheadAttention": call(self_attention, multihead),
    "MultiheadAttention with weights": call(attention_with_weights, multihead),
    "TransformerEncoderLayer": encoder_layer,
    "TransformerEncoderLayer, padded": call(padded, encoder_layer),
    **{name: ACTIVATIONS[name] for name in ("ReLU", "GELU", "ReLU in place", "dropout", "dropout in place")},
}
TOKEN_NORMS = ("LayerNorm", "RMSNorm", "F.layer_norm by keywords", "BatchNorm1d")
PIECES = NORMS | ACTIVATIONS | CONVOLUTIONS | TOKENS
