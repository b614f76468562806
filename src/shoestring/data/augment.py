"""uint8 images -> the float images that enter the network: cropped, flipped, normalised."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ..task import Loss
from .draws import mix


@dataclass(frozen=True)
class Augment:
    """The paper's augmentations (section 4.1.2), determined by random numbers drawn per image.

    Three small numbers are drawn per image (down, right, flip); zeros leave the image as it is. They depend only
    on the image's key, so the size of a microbatch changes nothing.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    pad: int = 4
    flip: bool = True
    shrink: int = 1  # squares of shrink x shrink pixels are averaged into one, after the rest

    def draw(self, keys: np.ndarray) -> Tensor:
        """Keys (n) -> int8 (n, 3): the crop's offset down and right of the centre, and whether it is flipped."""
        span = 2 * self.pad + 1
        down, right = ((mix(keys, use) % np.uint64(span)).astype(np.int64) - self.pad for use in (0, 1))
        flip = (mix(keys, 2) % np.uint64(2)).astype(np.int64) * self.flip
        return torch.from_numpy(np.stack([down, right, flip], axis=1).astype(np.int8))

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """uint8 images (n, c, h, w) and their draws (n, 3) -> float32 images of the same shape, or shrunk."""
        images = self.normalise(self.crop(images, draws))
        return functional.avg_pool2d(images, self.shrink) if self.shrink > 1 else images

    def crop(self, images: Tensor, draws: Tensor) -> Tensor:
        """Images and draws -> each image padded with black, cropped where drawn, and flipped if drawn."""
        height, width = images.shape[2:]
        down, right, flip = (column.long()[:, None] for column in draws.unbind(1))
        rows = torch.arange(height, device=images.device) + down + self.pad
        columns = torch.arange(width, device=images.device)
        columns = torch.where(flip == 1, width - 1 - columns, columns) + right + self.pad
        padded = functional.pad(images, (self.pad,) * 4)
        image = torch.arange(len(images), device=images.device)[:, None, None, None]
        channel = torch.arange(images.shape[1], device=images.device)[:, None, None]
        return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]

    def normalise(self, images: Tensor) -> Tensor:
        """uint8 images -> float32 images of mean 0 and standard deviation 1 per channel."""
        floats = images.float()
        # By numbers, not tensors of them: a pass that makes a tensor without an operator cannot be taped.
        means, stds = (255 * np.array(values, np.float32) for values in (self.mean, self.std))
        for channel in range(images.shape[1]):
            floats[:, channel].sub_(float(means[channel])).div_(float(stds[channel]))
        return floats


def on_images(loss: Loss, augment: Augment) -> Loss:
    """A loss on (float images, labels) -> the same loss on (uint8 images, labels, draws).

    Inside a step it runs once per microbatch, so at most one microbatch is ever held as floats.
    """

    def loss_of_bytes(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        images, labels, draws = batch
        return loss(model, (augment(images, draws), labels))

    return loss_of_bytes
