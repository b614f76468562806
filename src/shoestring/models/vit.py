"""A small vision transformer (Dosovitskiy et al., 2021): pre-norm blocks over patches of the image."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ShoestringError
from .layers import XavierLinear


class Block(nn.Module):
    """x (N, T, width) -> x + attention(norm1(x)), and of that y -> y + fc2(gelu(fc1(norm2(y))))."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = XavierLinear(width, 3 * width)
        self.output = XavierLinear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = XavierLinear(width, hidden)
        self.fc2 = XavierLinear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.output(self.attend(self.norm1(x)))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))

    def attend(self, x: Tensor) -> Tensor:
        """Every patch's mixture of all patches, head by head."""
        query, key, value = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


class VisionTransformer(nn.Module):
    """Images (N, 3, image, image) -> class scores (N, classes), read from a token before the patches."""

    def __init__(
        self,
        classes: int = 10,
        image: int = 32,
        patch: int = 4,
        width: int = 192,
        depth: int = 12,
        heads: int = 3,
    ) -> None:
        super().__init__()
        if image % patch:
            raise ShoestringError(f"image {image} must be a multiple of the {patch} pixels of a patch")
        if width % heads:
            raise ShoestringError(f"width {width} must be a multiple of the {heads} heads")
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.empty(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, (image // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(Block(width, heads, 4 * width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.class_token, std=0.02)
        nn.init.trunc_normal_(self.positions, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        first = self.class_token.expand(len(patches), -1, -1)
        x = torch.cat([first, patches], dim=1) + self.positions
        return self.fc(self.norm(self.blocks(x)[:, 0]))
