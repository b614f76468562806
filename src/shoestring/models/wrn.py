"""WideResNet (Zagoruyko and Komodakis, 2016) with identity shortcuts: 28-2 has 1,456,858 parameters."""

import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ShoestringError
from .layers import HeConv2d

STEM_CHANNELS = 16
MOST_DEPTH, MOST_WIDTH = 1_000, 10_000  # the deepest is itself 6n + 4


class Block(nn.Module):
    """Pre-activation residual block: x -> shortcut(x) + conv2(relu(norm2(conv1(relu(norm1(x))))))."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.channels_out, self.stride = channels_out, stride
        self.norm1 = nn.BatchNorm2d(channels_in)
        self.conv1 = HeConv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.conv2 = HeConv2d(channels_out, channels_out, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(F.relu(self.norm1(x)))
        out = self.conv2(F.relu(self.norm2(out)))
        return out + identity_shortcut(x, self.channels_out, self.stride)


def identity_shortcut(x: Tensor, channels: int, stride: int) -> Tensor:
    """Feature maps (N, C, H, W) -> every `stride`-th pixel, padded with zero maps up to `channels`.

    If a narrow network has fewer channels than its stem, the surplus ones are dropped.
    """
    x = x[:, :, ::stride, ::stride]
    extra = channels - x.shape[1]
    return F.pad(x, (0, 0, 0, 0, 0, extra)) if extra else x


class WideResNet(nn.Module):
    """Images (N, 3, H, W) -> class scores (N, classes); `depth` is 6n + 4 for n blocks in each of 3 groups.

    The groups have 16, 32 and 64 times `width` channels, rounded if the width is a fraction.
    """

    def __init__(self, depth: int, width: float, classes: int = 10) -> None:
        super().__init__()
        check(depth, width)
        blocks, channels_in = [], STEM_CHANNELS
        for group, base in enumerate((16, 32, 64)):
            channels = max(1, round(base * width))
            for index in range((depth - 4) // 6):
                stride = 2 if group > 0 and index == 0 else 1
                blocks.append(Block(channels_in, channels, stride))
                channels_in = channels
        self.conv = HeConv2d(3, STEM_CHANNELS, 3, padding=1, bias=False)
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.BatchNorm2d(channels_in)
        self.fc = nn.Linear(channels_in, classes)

    def forward(self, images: Tensor) -> Tensor:
        maps = F.relu(self.norm(self.blocks(self.conv(images))))
        return self.fc(maps.mean((2, 3)))


def check(depth: int, width: float) -> None:
    """Raises unless a WideResNet of this depth and width exists."""
    if depth % 6 != 4 or not 10 <= depth <= MOST_DEPTH:
        nearest = min(max(10, 6 * round((depth - 4) / 6) + 4), MOST_DEPTH - (MOST_DEPTH - 4) % 6)
        raise ShoestringError(
            f"a WideResNet of depth {depth} does not exist: depth must be 6n+4, from 10 to {MOST_DEPTH:,}; "
            f"try {nearest}"
        )
    if not 0 < width <= MOST_WIDTH:
        raise ShoestringError(
            f"a WideResNet of width {width} cannot be built: width must be above 0 and at most {MOST_WIDTH:,}"
        )
