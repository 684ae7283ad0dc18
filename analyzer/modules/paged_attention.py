"""The part of flash-attn that divides the keys of a request among multiprocessors, in decode."""

from __future__ import annotations

from math import ceil
from typing import Final

MOST_SPLITS: Final = 128


def splits_of_keys(blocks: int, *, keys: int, width: int, multiprocessors: int) -> int:
    """Parts of the keys of a request, each of which a thread block processes, with an fp32 output of its own if there are several.

    `blocks`: thread blocks without a division; `keys`: those that a request has room for; `width`: elements of a head. Source:
    `set_params_splitkv` and `num_splits_heuristic` (flash-attn 2.8, csrc/flash_attn/flash_api.cpp), which counts an SM twice.
    """
    places = 2 * multiprocessors
    if blocks >= 0.8 * places:
        return 1
    of_keys = ceil(keys / (256 if width <= 64 else 128 if width <= 128 else 64))
    efficiency: dict[int, float] = {}
    for splits in range(1, min(MOST_SPLITS, places, of_keys) + 1):
        if splits == 1 or ceil(of_keys / splits) != ceil(of_keys / (splits - 1)):
            waves = blocks * splits / places
            efficiency[splits] = waves / ceil(waves)
    most = max(efficiency.values(), default=0.0)
    return next((splits for splits, each in efficiency.items() if each >= 0.85 * most), 1)
