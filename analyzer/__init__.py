"""Predicts memory, time and communication of a Megatron-LM launch on every GPU, and finds faster layouts."""

from analyzer.api import analyze, analyze_config, analyze_inference, analyze_offload, search

__all__ = ["__version__", "analyze", "analyze_config", "analyze_inference", "analyze_offload", "search"]

__version__ = "0.2.0"
