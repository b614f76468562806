"""Where the memory of a training step goes, predicted by tracing the step on fake tensors."""

from .profile import Profile, profile
from .updates import Updates

__all__ = ["Profile", "Updates", "profile"]
