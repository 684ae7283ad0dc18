"""Predicts the memory of every GPU of a Megatron-LM launch, whether it fits, and what its ranks communicate."""

from analyzer.api import analyze

__all__ = ["__version__", "analyze"]

__version__ = "0.1.0"
