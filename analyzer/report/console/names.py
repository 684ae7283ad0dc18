"""Names of ranks, stages and groups in the console report: '0–7', 'n0_g3', '[n0_g0 n0_g1]'."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from analyzer.layout.groups import RankRanges, node_name

MAX_MEMBERS: Final = 4096
"""GPUs of one group that are printed."""
GROUPS: Final = {
    "tp": "tensor",
    "pp": "pipeline",
    "dp": "data without context",
    "dp_cp": "data",
    "cp": "context",
    "ep": "expert",
    "etp": "expert tensor",
    "edp": "expert data",
    "tp_ep": "tensor and expert",
    "embd": "word embedding",
    "pos_embd": "position embedding",
    "mp": "model",
    "tp_ep_pp": "expert model",
}
"""Kinds of process groups in words. Other kinds are printed as their key."""

RANGES_SHOWN: Final = 3


def group(kind: str) -> str:
    """'tensor (tp)' for tp."""
    return f"{GROUPS[kind]} ({kind})" if kind in GROUPS else kind


def ranges(of: RankRanges, *, full: bool = False) -> str:
    """'0–7, 16–23'; shortened to the first ones and the last one unless `full`."""
    texts = [str(first) if first == last else f"{first}–{last}" for first, last in of]
    if not full and len(texts) > RANGES_SHOWN:
        texts = [*texts[: RANGES_SHOWN - 1], "…", texts[-1]]
    return ", ".join(texts)


def gpu_range(of: RankRanges, *, gpus_per_node: int) -> str:
    """The first and the last GPU of ranges of ranks: 'n0_g0 … n0_g7'."""
    first, last = (node_name(rank, gpus_per_node) for rank in (of[0][0], of[-1][1]))
    return first if first == last else f"{first} … {last}"


def numbers(of: Iterable[int], *, full: bool = False) -> str:
    """Ascending numbers as ranges: 0, 1, 2, 5 -> '0–2, 5'."""
    runs: list[tuple[int, int]] = []
    for number in of:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ranges(tuple(runs), full=full)


def stages(of: Sequence[int]) -> str:
    """'stage 0' or 'stages 1–14'."""
    return f"{'stage' if len(of) == 1 else 'stages'} {numbers(of)}"


def members(ranks: Sequence[int], *, gpus_per_node: int) -> str:
    """The GPUs of a group: '[n0_g0 n0_g1]'. Of a large group the first ones, and how many more there are."""
    shown = " ".join(node_name(rank, gpus_per_node) for rank in ranks[:MAX_MEMBERS])
    more = len(ranks) - MAX_MEMBERS
    return f"[{shown} … {more:,} more]" if more > 0 else f"[{shown}]"


def plural(n: int, noun: str, nouns: str = "") -> str:
    """'1 group', '2 groups'; `nouns` is the plural if it is not `noun` with an s."""
    return f"{n:,} {noun if n == 1 else nouns or f'{noun}s'}"
