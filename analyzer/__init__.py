"""Predicts memory, time and communication of a Megatron-LM launch on every GPU, and finds faster layouts."""

from analyzer.api import analyze, analyze_config, analyze_inference, analyze_offload, search
from analyzer.report.exports import as_dict, ranks_as_frame
from analyzer.version import __version__

__all__ = [
    "__version__",
    "analyze",
    "analyze_config",
    "analyze_inference",
    "analyze_offload",
    "as_dict",
    "ranks_as_frame",
    "search",
]
