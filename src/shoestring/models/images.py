"""The built-in tasks on random images: WideResNet, ResNet-18, ConvNeXt and the small vision transformer."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..task import SGD, Adam, Task
from .build import check_count, on_meta
from .convnext import ConvNeXt
from .resnet import ResNet18
from .vit import VisionTransformer
from .wrn import WideResNet

MOST_BATCH_BYTES = 10**9  # the random batch has memory, even if the model has none
CONVNET_SGD = SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
VIT_ADAM = Adam(lr=1e-3, weight_decay=0.05, decoupled=True)


def wide_resnet(depth: int, width: float) -> Callable[..., Task]:
    """Depth and width -> a function that makes the task of that WideResNet on images of CIFAR-10's shape."""

    def make(generator: torch.Generator, batch: int = 100, classes: int = 10, image: int = 32) -> Task:
        images = random_images(generator, batch, classes, image)
        return Task(
            on_meta(WideResNet, depth, width, classes), classification_loss, images, CONVNET_SGD, static_graph=True
        )

    return make


def resnet18(
    generator: torch.Generator,
    batch: int = 100,
    stem: str = "cifar",
    classes: int | None = None,
    image: int | None = None,
) -> Task:
    """ResNet-18 on 10 classes of 32 x 32 pixels or, with the ImageNet stem, on 1,000 of 224 x 224."""
    usual_classes, usual_image = (1000, 224) if stem == "imagenet" else (10, 32)
    classes = usual_classes if classes is None else classes
    images = random_images(generator, batch, classes, usual_image if image is None else image)
    return Task(on_meta(ResNet18, classes, stem), classification_loss, images, CONVNET_SGD, static_graph=True)


def resnet18_imagenet(
    generator: torch.Generator, batch: int = 32, classes: int | None = None, image: int | None = None
) -> Task:
    """ResNet-18 with the ImageNet stem."""
    return resnet18(generator, batch, "imagenet", classes, image)


def vit_tiny(generator: torch.Generator, batch: int = 100, classes: int = 10, image: int = 32) -> Task:
    """A vision transformer of 12 layers and width 192 on 4 x 4 patches."""
    images = random_images(generator, batch, classes, image)
    return Task(on_meta(VisionTransformer, classes, image), classification_loss, images, VIT_ADAM, static_graph=True)


def convnext_tiny(generator: torch.Generator, batch: int = 8, classes: int = 1000, image: int = 224) -> Task:
    """ConvNeXt-T."""
    images = random_images(generator, batch, classes, image)
    return Task(on_meta(ConvNeXt, classes), classification_loss, images, VIT_ADAM, static_graph=True)


def random_images(generator: torch.Generator, batch: int, classes: int, image: int) -> tuple[Tensor, Tensor]:
    """Random images (batch, 3, image, image) and their labels (batch,)."""
    check_count("image", image, 8192)
    check_count("classes", classes, 10**6)
    check_count("batch", batch, MOST_BATCH_BYTES // (4 * 3 * image**2), why="as many as 1 GB holds")
    images = torch.randn(batch, 3, image, image, generator=generator)
    return images, torch.randint(classes, (batch,), generator=generator)


def classification_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy over the images of a batch."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)
