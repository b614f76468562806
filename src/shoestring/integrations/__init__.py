"""Shoestring inside other people's training loops: Hugging Face's Trainer, Lightning.

Each is a module of its own that needs its library: `shoestring.integrations.huggingface`, `.lightning`. What they have
in common is `guest.py`.
"""
