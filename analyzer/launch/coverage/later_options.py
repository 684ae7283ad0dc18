"""Options of code after the known releases of Megatron-LM, and of forks, that select layers which are not modelled: errors.

Sources: megatron/core/transformer/transformer_config.py of the branches main and dev of NVIDIA/Megatron-LM (August 2026). Up to
core 0.19 no release has these options. With hyper-connections the residual stream of every layer is several times as wide.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from analyzer.errors import UnsupportedError

_LATER: Final = (
    (
        r"(?:.*_)?mhc(?:_.*)?|.*hyper_connections?(?:_.*)?|.*residual_streams|hc_.*",
        "hyper-connections (several residual streams) are read from containers of Megatron-Bridge and with --info-model only",
    ),
    (r"csa_.*|dsv4_.*", "the attention of DeepSeek-V4 is read from containers of Megatron-Bridge and with --info-model only"),
    (r"kda_.*", "Kimi delta attention is not modelled; no known release of Megatron-LM has it"),
)
"""Patterns of dests, and the fault of the options."""
_OFF: Final = frozenset({"false", "no", "none", "disable"})


def refuse_later(flag: str, values: Sequence[object]) -> None:
    """Raises UnsupportedError for an option that selects such layers, unless its value switches it off."""
    if values and str(values[0]).lower() in _OFF:
        return
    dest = flag.lstrip("-").replace("-", "_")
    fault = next((fault for pattern, fault in _LATER if re.fullmatch(pattern, dest)), None)
    if fault is not None:
        raise UnsupportedError(flag, fault, "models with it cannot be analyzed; give the launch of a GPT without it")
