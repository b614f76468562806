"""The paper's counting rules as a calculator."""

from .profile import PaperProfile, paper_profile

__all__ = ["PaperProfile", "paper_profile"]
