"""Where the memory of a training step goes, predicted by tracing the step on fake tensors."""

from .profile import Profile, profile

__all__ = ["Profile", "profile"]
