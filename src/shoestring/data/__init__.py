"""Data sets, streamed: a batch is the only part of them that is ever in memory."""

from .augment import Augment, on_images
from .images import ImageBatches, Images, open_images

__all__ = ["Augment", "ImageBatches", "Images", "on_images", "open_images"]
