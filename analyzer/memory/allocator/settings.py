"""The settings of PyTorch's caching allocator: PYTORCH_CUDA_ALLOC_CONF, or PYTORCH_ALLOC_CONF from 2.9 on.

Source: c10/core/AllocatorConfig.cpp (PyTorch 2.13), before 2.9 c10/cuda/CUDAAllocatorConfig.cpp. The settings that change sizes are
read. `garbage_collection_threshold` applies only after `torch.cuda.set_per_process_memory_fraction` (`malloc` in
CUDACachingAllocator.cpp), which Megatron-LM does not call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from analyzer.errors import InputError, UnsupportedError
from analyzer.units import MIB, natural

UNLIMITED: Final = 1 << 62
INTERVALS: Final = 16
"""Sizes below 2 MiB, from 2 to 4 MiB, and so on up to 64 GiB (`kRoundUpPowerOfTwoIntervals`)."""
SPLIT_ROUNDING: Final = 20 * MIB
_SETTING: Final = re.compile(r"([^,:]+):(\[[^\]]*\]|[^,]*)")


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """The settings that affect sizes."""

    expandable_segments: bool = False
    max_split_bytes: int = UNLIMITED
    non_split_rounding_bytes: int = SPLIT_ROUNDING
    """A request of at least `max_split_bytes` uses a free block only if it is less than this much larger."""
    divisions: tuple[int, ...] = ()
    """For each interval, the number of sizes from one power of two to the next, to which requests are rounded up.

    0 and 1: multiples of 512 bytes. Empty: the same for all intervals.
    """

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> AllocatorSettings:
        """Reads the settings from environment variables.

        Raises UnsupportedError for another backend, which is not simulated, and InputError for values that PyTorch refuses.
        """
        option = "PYTORCH_ALLOC_CONF" if "PYTORCH_ALLOC_CONF" in environ else "PYTORCH_CUDA_ALLOC_CONF"
        pairs = dict(_SETTING.findall(environ.get(option, "").replace(" ", "")))
        if pairs.get("backend", "native") != "native":
            raise UnsupportedError(option, f"backend:{pairs['backend']} is not simulated", "use the default backend, native")
        megabytes, rounding = pairs.get("max_split_size_mb"), pairs.get("max_non_split_rounding_mb")
        return cls(
            expandable_segments=pairs.get("expandable_segments", "False").lower() == "true",
            max_split_bytes=int(megabytes) * MIB if megabytes else UNLIMITED,
            non_split_rounding_bytes=_number(option, "max_non_split_rounding_mb", rounding) * MIB if rounding else SPLIT_ROUNDING,
            divisions=_divisions(option, pairs.get("roundup_power2_divisions", "")),
        )


def _number(option: str, name: str, text: str) -> int:
    number = natural(text)
    if number is None:
        raise InputError(option, f"{name}:{text} is not a number", f"write a number such as {name}:64")
    return number


def _divisions(option: str, text: str) -> tuple[int, ...]:
    """The divisions of all intervals, from one number or from a list such as [256:1,512:2,>:4], whose sizes are in MiB.

    The first number of a list also applies to all smaller sizes, and that of `>` to all sizes above the last one. Each other number
    applies from its size up to the next power of two only; intervals that are not listed are not rounded.
    """
    name = "roundup_power2_divisions"
    if not text.startswith("["):
        found = (_power(option, _number(option, name, text)),) * INTERVALS if text else ()
        return found if max(found, default=0) > 1 else ()
    divisions = [0] * INTERVALS
    last = -1
    for part in filter(None, text.strip("[]").split(",")):
        size, _, value = part.partition(":")
        number = _number(option, name, value)
        number = _power(option, number) if number else 0
        if size == ">":
            divisions[last + 1 :] = [number] * (INTERVALS - last - 1)
            continue
        index = min(_power(option, _number(option, name, size)).bit_length() - 1, INTERVALS - 1)
        if last < 0:
            divisions[:index] = [number] * index
        divisions[index] = number
        last = index
    return tuple(divisions) if max(divisions) > 1 else ()


def _power(option: str, number: int) -> int:
    if number <= 0 or number & (number - 1):
        fault = f"roundup_power2_divisions: {number} is not a power of two"
        raise InputError(option, fault, "write powers of two, as PyTorch requires")
    return number


def rounded(size: int, divisions: tuple[int, ...]) -> int:
    """A request of `size` bytes, a multiple of 512, rounded up to the next of the sizes between two powers of two.

    Source: `round_size` and `roundup_power2_next_division` in CUDACachingAllocator.cpp.
    """
    parts = divisions[min(max(0, size.bit_length() - MIB.bit_length()), INTERVALS - 1)]
    if parts <= 1 or size <= 512 * parts or not size & (size - 1):
        return size
    step = (1 << size.bit_length() - 1) // parts
    return -(-size // step) * step
