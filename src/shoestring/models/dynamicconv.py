"""The DynamicConv Transformer (Wu et al., 2019): convolutions whose kernels are made from their input.

`Settings()` holds the sizes of the IWSLT'14 German-English recipe, which give 38,685,184 parameters: source
embedding, target embedding and scores are three tables; the kernel projections and the scores have no bias.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ShoestringError
from ..kernels.dynamic_convolution import windowed
from ..tokens import PAD
from .layers import XavierLinear


@dataclass(frozen=True)
class Settings:
    """Sizes and dropout rates; one layer per kernel size."""

    source_vocabulary: int = 8_848
    target_vocabulary: int = 6_632
    width: int = 512
    hidden: int = 1024
    heads: int = 4
    encoder_kernels: tuple[int, ...] = (3, 7, 15, 31, 31, 31, 31)
    decoder_kernels: tuple[int, ...] = (3, 7, 15, 31, 31, 31)
    dropout: float = 0.3
    weight_dropout: float = 0.1
    attention_dropout: float = 0.1
    most_positions: int = 1024

    def __post_init__(self) -> None:
        if self.width % self.heads or self.width % 2:
            raise ShoestringError(f"width {self.width} must be even and a multiple of the {self.heads} heads")


class Memory(NamedTuple):
    """The encoder's output: states (N, S, width) and where the source is padding (N, S)."""

    states: Tensor
    padding: Tensor


class Past:
    """What a search keeps of the target ids before the last one, so that each step decodes the last one only: the
    latest inputs of each causal convolution, and each attention's keys and values of the memory."""

    def __init__(self) -> None:
        self.length = 0
        self.windows: dict[nn.Module, Tensor] = {}
        self.projected: dict[nn.Module, tuple[Tensor, ...]] = {}

    def window(self, module: nn.Module, values: Tensor, size: int) -> Tensor:
        """Values of the last position (N, 1, C) -> of the last `size` positions, zeros before the first."""
        before = self.windows.get(module)
        if before is None:
            before = values.new_zeros(len(values), size - 1, values.shape[2])
        found = torch.cat([before, values], 1)
        self.windows[module] = found[:, 1:]
        return found

    def take(self, rows: Tensor) -> None:
        """Goes on from these rows, each from a row of the same sentence."""
        self.windows = {module: window[rows] for module, window in self.windows.items()}


def dynamic_convolution(x: Tensor, kernels: Tensor, left: int) -> Tensor:
    """Values (N, T, C) and kernels (N, T, K) -> out[t] = sum over k of kernels[t, k] * x[t + k - left].

    x outside 0..T-1 counts as zero. The kernels become the rows of a band matrix, each moved to its position:
    T zeros are added to each, and the memory is read in rows one element shorter, which moves row t by t.
    """
    count, length, size = kernels.shape
    skewed = F.pad(kernels, (0, length)).flatten(1)[:, :-length]
    band = skewed.view(count, length, length + size - 1)[:, :, left : left + length]
    return band @ x


class DynamicConv(nn.Module):
    """Depthwise convolution (N, T, C) -> (N, T, C), each position and head with its own kernel, made from x.

    `causal` kernels end at their own position; others are centred on it.
    """

    def __init__(self, width: int, size: int, heads: int, causal: bool, dropout: float) -> None:
        super().__init__()
        self.size, self.heads, self.left = size, heads, size - 1 if causal else size // 2
        self.kernels = nn.Linear(width, heads * size, bias=False)
        self.dropout = nn.Dropout(dropout)

    def last(self, window: Tensor) -> Tensor:
        """The last `size` values (N, size, C) -> the output of a causal convolution at the last one, (N, 1, C)."""
        kernels = self.kernels(window[:, -1:]).unflatten(2, (self.heads, self.size)).softmax(3)
        products = kernels.float().transpose(1, 3) * window.unflatten(2, (self.heads, -1)).float()
        return products.sum(1, keepdim=True).flatten(2).to(window.dtype)

    def forward(self, x: Tensor) -> Tensor:
        kernels = self.kernels(x).unflatten(2, (self.heads, self.size))
        kernels, values = self.dropout(kernels.softmax(3)), x.unflatten(2, (self.heads, -1))
        if (
            x.dtype in (torch.float16, torch.bfloat16) and x.device.type == "cpu"
        ):  # PyTorch's 16-bit matrix products are slow there
            return windowed(values, kernels, self.left).flatten(2)
        out = dynamic_convolution(by_head(values), by_head(kernels), self.left)
        return out.unflatten(0, (-1, self.heads)).transpose(1, 2).flatten(2)


def by_head(x: Tensor) -> Tensor:
    """(N, T, heads, C) -> (N * heads, T, C)."""
    return x.transpose(1, 2).flatten(0, 1)


class ConvBlock(nn.Module):
    """Residual unit: x -> norm(x + output(conv(input(x)))); the convolution takes padding as zero."""

    def __init__(self, settings: Settings, size: int, causal: bool) -> None:
        super().__init__()
        width = settings.width
        self.input = XavierLinear(width, width)
        self.conv = DynamicConv(width, size, settings.heads, causal, settings.weight_dropout)
        self.output = XavierLinear(width, width)
        self.dropout = nn.Dropout(settings.dropout)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, padding: Tensor | None = None, past: Past | None = None) -> Tensor:
        values = self.input(x)
        if padding is not None:
            values = values.masked_fill(padding.unsqueeze(2), 0)
        out = self.conv(values) if past is None else self.conv.last(past.window(self, values, self.conv.size))
        return self.norm(x + self.dropout(self.output(out)))


class Attention(nn.Module):
    """Residual unit: (x, memory) -> norm(x + output(attention of x to the memory's states))."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width, self.heads, self.rate = settings.width, settings.heads, settings.attention_dropout
        self.query = XavierLinear(width, width, gain=2**-0.5)
        self.key = XavierLinear(width, width, gain=2**-0.5)
        self.value = XavierLinear(width, width, gain=2**-0.5)
        self.output = XavierLinear(width, width)
        self.dropout = nn.Dropout(settings.dropout)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, memory: Memory, past: Past | None = None) -> Tensor:
        query = self.by_head(self.query(x))
        known = past.projected.get(self) if past else None
        key, value = known or (self.by_head(project(memory.states)) for project in (self.key, self.value))
        if past:
            past.projected[self] = key, value
        seen = ~memory.padding[:, None, None, :]
        out = F.scaled_dot_product_attention(query, key, value, seen, self.rate if self.training else 0.0)
        return self.norm(x + self.dropout(self.output(out.transpose(1, 2).flatten(2))))

    def by_head(self, x: Tensor) -> Tensor:
        """(N, T, width) -> (N, heads, T, C)."""
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)


class FeedForward(nn.Module):
    """Residual unit: x -> norm(x + fc2(relu(fc1(x))))."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.fc1 = XavierLinear(settings.width, settings.hidden)
        self.fc2 = XavierLinear(settings.hidden, settings.width)
        self.dropout = nn.Dropout(settings.dropout)
        self.norm = nn.LayerNorm(settings.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.dropout(self.fc2(F.relu(self.fc1(x)))))


class EncoderLayer(nn.Module):
    def __init__(self, settings: Settings, size: int) -> None:
        super().__init__()
        self.conv = ConvBlock(settings, size, causal=False)
        self.feed_forward = FeedForward(settings)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.feed_forward(self.conv(x, padding))


class DecoderLayer(nn.Module):
    def __init__(self, settings: Settings, size: int) -> None:
        super().__init__()
        self.conv = ConvBlock(settings, size, causal=True)
        self.attention = Attention(settings)
        self.feed_forward = FeedForward(settings)

    def forward(self, x: Tensor, memory: Memory, past: Past | None = None) -> Tensor:
        return self.feed_forward(self.attention(self.conv(x, past=past), memory, past))


class TokenEmbedding(nn.Embedding):
    """An embedding with variance 1 / width; the padding's vector is zero and has no gradient."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__(vocabulary, width, padding_idx=PAD)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.embedding_dim**-0.5)
        nn.init.zeros_(self.weight[PAD])


class Positions(nn.Module):
    """Length T -> a fixed table (T, width): sines, then cosines, of wavelengths from 2 pi to 20,000 pi."""

    table: Tensor

    def __init__(self, most: int, width: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(most, width), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        most, width = self.table.shape
        steps = torch.arange(width // 2, device=self.table.device) / max(1, width // 2 - 1)
        angles = torch.arange(most, device=self.table.device)[:, None] * torch.exp(-math.log(10_000) * steps)
        self.table.copy_(torch.cat([angles.sin(), angles.cos()], dim=1))

    def forward(self, length: int) -> Tensor:
        if length > len(self.table):
            raise ShoestringError(
                f"a sentence of {length:,} tokens does not fit the model's {len(self.table):,} positions: "
                "shorten it, or build the model with a larger `most_positions`"
            )
        return self.table[:length]


class Embed(nn.Module):
    """Token ids (N, T), the first at position `begin` -> dropout(sqrt(width) * embedding + position), (N, T, width)."""

    def __init__(self, vocabulary: int, settings: Settings, positions: Positions) -> None:
        super().__init__()
        self.scale = settings.width**0.5
        self.tokens = TokenEmbedding(vocabulary, settings.width)
        self.positions = positions
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, ids: Tensor, begin: int = 0) -> Tensor:
        return self.dropout(self.scale * self.tokens(ids) + self.positions(begin + ids.shape[1])[begin:])


class ScoreLinear(nn.Linear):
    """States -> a score per word; initialised like an embedding, without a bias."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__(width, vocabulary, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.in_features**-0.5)


class Encoder(nn.Module):
    """Source ids (N, S) -> `Memory`."""

    def __init__(self, settings: Settings, positions: Positions) -> None:
        super().__init__()
        self.embed = Embed(settings.source_vocabulary, settings, positions)
        self.layers = nn.ModuleList(EncoderLayer(settings, size) for size in settings.encoder_kernels)

    def forward(self, source: Tensor) -> Memory:
        x, padding = self.embed(source), source == PAD
        for layer in self.layers:
            x = layer(x, padding)
        return Memory(x, padding)


class Decoder(nn.Module):
    """Target ids (N, T), shifted right, and the memory -> scores (N, T, vocabulary). With a past, of the last ids."""

    def __init__(self, settings: Settings, positions: Positions) -> None:
        super().__init__()
        self.embed = Embed(settings.target_vocabulary, settings, positions)
        self.layers = nn.ModuleList(DecoderLayer(settings, size) for size in settings.decoder_kernels)
        self.scores = ScoreLinear(settings.width, settings.target_vocabulary)

    def forward(self, target_in: Tensor, memory: Memory, past: Past | None = None) -> Tensor:
        x = self.embed(target_in, past.length if past else 0)
        for layer in self.layers:
            x = layer(x, memory, past)
        if past:
            past.length += 1
        return self.scores(x)


class DynamicConvTransformer(nn.Module):
    """Source ids (N, S), target ids shifted right (N, T) -> scores (N, T, target vocabulary).

    Padding (id `PAD`) follows the words of a sentence. A score depends on no later target id, so a search calls
    `encode` once and `decode` with ever longer targets or, with a past, with the last id alone.
    """

    sparse_layers = ("XavierLinear", "ScoreLinear", "TokenEmbedding")  # all but the projections that make kernels

    def __init__(self, settings: Settings = Settings()) -> None:
        super().__init__()
        positions = Positions(settings.most_positions, settings.width)
        self.encoder = Encoder(settings, positions)
        self.decoder = Decoder(settings, positions)

    def encode(self, source: Tensor) -> Memory:
        return self.encoder(source)

    def past(self) -> Past:
        return Past()

    def decode(self, target_in: Tensor, memory: Memory, past: Past | None = None) -> Tensor:
        return self.decoder(target_in, memory, past)

    def forward(self, source: Tensor, target_in: Tensor) -> Tensor:
        return self.decode(target_in, self.encode(source))
