"""Data sets, streamed: only one batch is ever in memory."""

from .augment import Augment, on_images
from .images import ImageBatches, Images, open_images
from .kept import keep_languages, kept_languages
from .pairs import Pairs, PairSplit, open_pairs
from .token_batches import TokenBatches, token_batches
from .vocabulary import Languages, Vocabulary

__all__ = [
    "Augment",
    "ImageBatches",
    "Images",
    "Languages",
    "PairSplit",
    "Pairs",
    "TokenBatches",
    "Vocabulary",
    "keep_languages",
    "kept_languages",
    "on_images",
    "open_images",
    "open_pairs",
    "token_batches",
]
