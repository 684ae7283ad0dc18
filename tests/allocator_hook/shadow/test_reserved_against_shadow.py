"""Reserved memory of rare features: the replay of the formulas compared with requests of Megatron-LM's own code."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzer.memory.device_overhead import reserved_range
from tests.allocator_hook.shadow.needed_packages import NEEDS_SHADOW
from tests.allocator_hook.shadow.reserved_layouts import HELD_OUT, LAYOUTS, WITH_GRAPHS
from tools.score_reserved import Compared, compared

pytestmark = NEEDS_SHADOW


@pytest.mark.parametrize(("base", "line"), [*LAYOUTS, *WITH_GRAPHS])
def test_the_range_contains_what_the_real_code_reserves(base: str, line: str, tmp_path: Path) -> None:
    """One rank of each stage."""
    assert all(map(is_inside, compared(base, line, tmp_path)))


def is_inside(each: Compared) -> bool:
    """Return whether the range contains what the shadow engine reserves."""
    memory = each.memory
    least, most = reserved_range(
        peak=memory.peak_allocated_bytes, reserved=memory.peak_reserved_bytes, replayed=memory.replayed, rare=True
    )
    return least <= each.reserved <= most


def test_the_range_contains_nearly_all_held_out_ranks(tmp_path: Path) -> None:
    """27 ranks of layouts that took no part in the development. One with CUDA graphs and pipeline stages is outside."""
    inside = [is_inside(each) for base, line in HELD_OUT for each in compared(base, line, tmp_path)]
    assert len(inside) == 27
    assert sum(inside) >= 26
