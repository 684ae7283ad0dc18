"""Ranks, stages and groups as people write them: '0–7', 'n0_g3', '[n0_g0 n0_g1]'."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from analyzer.layout.groups import RankRanges, node_name

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
    "tp_ep_pp": "model, of experts",
}
"""Kinds of process groups in words; a kind that is not here goes by its key."""

MEMBERS_SHOWN: Final = 8
"""GPUs of one group in a shortened list."""
GROUPS_SHOWN: Final = 4
"""Groups of one kind in a shortened list."""
RANGES_SHOWN: Final = 3


def group(kind: str) -> str:
    """'tensor (tp)' for tp."""
    return f"{GROUPS[kind]} ({kind})" if kind in GROUPS else kind


def ranges(of: RankRanges, *, whole: bool = False) -> str:
    """'0–7, 16–23', shortened to the first few and the last unless `whole`."""
    texts = [str(first) if first == last else f"{first}–{last}" for first, last in of]
    if not whole and len(texts) > RANGES_SHOWN:
        texts = [*texts[: RANGES_SHOWN - 1], "…", texts[-1]]
    return ", ".join(texts)


def gpu_range(of: RankRanges, *, gpus_per_node: int) -> str:
    """The first and the last GPU of ranges of ranks: 'n0_g0 … n0_g7'."""
    first, last = (node_name(rank, gpus_per_node) for rank in (of[0][0], of[-1][1]))
    return first if first == last else f"{first} … {last}"


def numbers(of: Iterable[int], *, whole: bool = False) -> str:
    """Ascending numbers as ranges: 0, 1, 2, 5 -> '0–2, 5'."""
    runs: list[tuple[int, int]] = []
    for number in of:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ranges(tuple(runs), whole=whole)


def count(of: RankRanges) -> int:
    """How many ranks the ranges hold."""
    return sum(last - first + 1 for first, last in of)


def stages(of: Sequence[int]) -> str:
    """'stage 0' or 'stages 1–14'."""
    return f"{'stage' if len(of) == 1 else 'stages'} {numbers(of)}"


def members(ranks: Sequence[int], *, gpus_per_node: int, whole: bool) -> str:
    """A group as '[n0_g0 n0_g1]'; a long one shortened to its first GPUs, the last, and how many it has."""
    named = [node_name(rank, gpus_per_node) for rank in ranks]
    if whole or len(named) <= MEMBERS_SHOWN:
        return f"[{' '.join(named)}]"
    return f"[{' '.join(named[:3])} … {named[-1]}] ({len(named)} GPUs)"


def plural(n: int, what: str) -> str:
    """'1 group', '2 groups'."""
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"
