"""The counting rules of Sohoni et al. (arXiv 1904.10631) as a calculator."""

from .profile import PaperProfile, paper_profile

__all__ = ["PaperProfile", "paper_profile"]
