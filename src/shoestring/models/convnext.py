"""ConvNeXt (Liu et al., 2022): stages of blocks with a depthwise convolution, layer norm, and two linear layers."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ShoestringError
from .layers import HeConv2d, XavierLinear

DEPTHS, WIDTHS = (3, 3, 9, 3), (96, 192, 384, 768)


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of maps (N, C, H, W)."""

    def forward(self, maps: Tensor) -> Tensor:
        return super().forward(maps.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Block(nn.Module):
    """x (N, C, H, W) -> x + scale * fc2(gelu(fc1(norm(depthwise(x)))))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = HeConv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.fc1 = XavierLinear(width, 4 * width)
        self.fc2 = XavierLinear(4 * width, width)
        self.scale = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.fc2(F.gelu(self.fc1(out)))).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """Images (N, 3, H, W), H and W multiples of 32 -> class scores (N, classes)."""

    def __init__(self, classes: int = 1000, depths: tuple[int, ...] = DEPTHS, widths: tuple[int, ...] = WIDTHS) -> None:
        super().__init__()
        if len(depths) != len(widths):
            raise ShoestringError(
                f"ConvNeXt has {len(depths)} depths and {len(widths)} widths: give one of each a stage"
            )
        stem = nn.Sequential(HeConv2d(3, widths[0], 4, stride=4), ChannelNorm(widths[0]))
        smaller = [nn.Sequential(ChannelNorm(a), HeConv2d(a, b, 2, stride=2)) for a, b in pairwise(widths)]
        self.downsamples = nn.ModuleList([stem, *smaller])
        self.stages = nn.ModuleList(
            nn.Sequential(*(Block(width) for _ in range(depth))) for depth, width in zip(depths, widths, strict=True)
        )
        self.norm = nn.LayerNorm(widths[-1])
        self.fc = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for downsample, stage in zip(self.downsamples, self.stages, strict=True):
            x = stage(downsample(x))
        return self.fc(self.norm(x.mean((2, 3))))
