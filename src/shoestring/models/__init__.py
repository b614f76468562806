"""The built-in models and their tasks."""

from .build import materialise
from .tasks import NAMES, builtin

__all__ = ["NAMES", "builtin", "materialise"]
