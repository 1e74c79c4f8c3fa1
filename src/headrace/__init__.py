"""Headrace trains language models with reinforcement learning and keeps every GPU fed with tokens."""

__version__ = "0.1.0"
