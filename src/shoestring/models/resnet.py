"""ResNet-18 (He et al., 2016) with the stem for CIFAR's small images or for ImageNet's."""

import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ShoestringError
from .layers import HeConv2d


class BasicBlock(nn.Module):
    """Residual block: x -> relu(shortcut(x) + norm2(conv2(relu(norm1(conv1(x)))))).

    The shortcut is x itself, or a strided 1 x 1 convolution with batch norm where the shape changes.
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = HeConv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = HeConv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        same_shape = channels_in == channels_out and stride == 1
        self.shortcut = nn.Identity() if same_shape else projection(channels_in, channels_out, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


def projection(channels_in: int, channels_out: int, stride: int) -> nn.Sequential:
    """A shortcut that changes the shape: 1 x 1 convolution and batch norm."""
    conv = HeConv2d(channels_in, channels_out, 1, stride=stride, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(channels_out))


class ResNet18(nn.Module):
    """Images (N, 3, H, W) -> class scores (N, classes).

    The `cifar` stem is a 3 x 3 convolution; the `imagenet` one a 7 x 7 and a max pool, both of stride 2.
    """

    def __init__(self, classes: int = 10, stem: str = "cifar") -> None:
        super().__init__()
        if stem not in ("cifar", "imagenet"):
            raise ShoestringError(f"ResNet-18 has no stem {stem!r}: use cifar or imagenet")
        size, stride = (3, 1) if stem == "cifar" else (7, 2)
        self.conv = HeConv2d(3, 64, size, stride=stride, padding=size // 2, bias=False)
        self.norm = nn.BatchNorm2d(64)
        self.pool = nn.Identity() if stem == "cifar" else nn.MaxPool2d(3, stride=2, padding=1)
        shapes = ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2))
        self.blocks = nn.Sequential(
            *(block for shape in shapes for block in (BasicBlock(*shape), BasicBlock(shape[1], shape[1], 1)))
        )
        self.fc = nn.Linear(512, classes)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.blocks(self.pool(F.relu(self.norm(self.conv(images)))))
        return self.fc(maps.mean((2, 3)))
