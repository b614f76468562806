"""Data sets, streamed: only one batch is ever in memory."""

from .augment import Augment, on_images
from .images import ImageBatches, Images, open_images
from .pairs import Pairs, PairSplit, open_pairs
from .token_batches import TokenBatches, token_batches
from .vocabulary import Vocabulary

__all__ = [
    "Augment",
    "ImageBatches",
    "Images",
    "PairSplit",
    "Pairs",
    "TokenBatches",
    "Vocabulary",
    "on_images",
    "open_images",
    "open_pairs",
    "token_batches",
]
