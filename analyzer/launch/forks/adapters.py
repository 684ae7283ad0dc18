"""Options of launches that train adapters (LoRA and the like), and of which `tuning` does not read the adapters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from analyzer.launch.forks.launch_options import NOTHING, LaunchOptions, Reading

_OPTION: Final = re.compile(r"--(?:use[-_]|enable[-_]|train[-_])?(?:q?lora|dora|peft|adapters?)(?:[-_][a-z_-]+)?")
"""Options of any project that belong to adapters. Those of latent attention, such as --kv-lora-rank, begin otherwise."""
_OFF: Final = frozenset({"", "0", "none", "null", "false", "no", "off", "full", "disable"})
_WHY: Final = "trains adapters, whose options are not known"
_READ: Final = frozenset({"ms-swift", "slime"})
"""Forks whose adapters `tuning` reads."""


def is_adapter_option(flag: str) -> bool:
    """Whether an option that no known parser has belongs to adapters."""
    return _OPTION.fullmatch(flag) is not None


def reason(flag: str, values: Sequence[str]) -> str | None:
    """Why there is no verdict with an option of adapters; None if its value turns them off."""
    shown = " ".join([flag, *values[:1]])
    return None if values and values[0].lower() in _OFF else f"{shown} {_WHY}"


def tuner(launch: LaunchOptions, flag: str) -> Reading:
    """`--tuner_type` of ms-swift: training of all parameters, or of adapters only."""
    if _READ & set(launch.keys):
        return NOTHING
    why = reason(flag, (launch.word(flag) or "full",))
    return NOTHING if why is None else Reading(withheld=(why,))


def rank(launch: LaunchOptions, flag: str) -> Reading:
    """`--lora_rank`: in ms-swift it belongs to `--tuner_type`; elsewhere it turns adapters on."""
    if launch.has("--tuner_type") or launch.has("--train_type") or _READ & set(launch.keys):
        return NOTHING
    why = reason(flag, (launch.word(flag) or "",))
    return NOTHING if why is None else Reading(withheld=(why,))
