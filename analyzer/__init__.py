"""Predicts memory, time and communication of a Megatron-LM launch on every GPU, and finds faster layouts."""

from analyzer.api import analyze, analyze_config, analyze_inference, analyze_offload, search
from analyzer.errors import AnalyzerError, InputError, UnsupportedError
from analyzer.report import exports as _exports  # noqa: F401  the methods of results
from analyzer.version import __version__

__all__ = [
    "AnalyzerError",
    "InputError",
    "UnsupportedError",
    "__version__",
    "analyze",
    "analyze_config",
    "analyze_inference",
    "analyze_offload",
    "search",
]
