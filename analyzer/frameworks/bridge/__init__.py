"""Containers of Megatron-Bridge: one file for each part of a `ConfigContainer` that needs more than its names."""

from analyzer.frameworks.bridge.container import given_gpus, own_words, read

__all__ = ["given_gpus", "own_words", "read"]
