"""Efficiencies of a known machine are found again from its times."""

from __future__ import annotations

import random
from dataclasses import replace
from math import log
from statistics import median

import pytest

from allocator_hook.calibrate.choose import TINY, standard_set
from allocator_hook.calibrate.fit import MEASURABLE, fit
from allocator_hook.calibrate.items import Item, Measured, Transfer, predicted_seconds
from analyzer.time.efficiencies import Efficiencies
from analyzer.time.work.kernels import Attention, Gemm
from tests.allocator_hook.calibrate.known_machine import KNOWN, SHIPPED, SPEED, TRUE

MIB = 2**20
TRANSFERS: list[Item] = [
    Transfer(kind, size, ranks, near)
    for ranks, near in ((2, 2), (8, 8), (16, 8), (2, 1))
    for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    for size in (MIB // 16, 4 * MIB, 64 * MIB, 512 * MIB)
]


def times(items: list[Item], *, noise: float = 0.0) -> list[Measured]:
    source = random.Random(1)
    return [Measured(item, predicted_seconds(item, SPEED, TRUE) * source.lognormvariate(0, noise)) for item in items]


def test_exact_times_give_the_exact_efficiencies() -> None:
    assert fit(times([*standard_set(), *TRANSFERS]), SPEED, SHIPPED) == pytest.approx(KNOWN, rel=0.05)
    assert set(MEASURABLE) == set(KNOWN)


@pytest.mark.slow
@pytest.mark.parametrize("outlier", [1.0, 3.0])
def test_noise_and_a_slow_kernel_change_them_little(outlier: float) -> None:
    measured = times([*standard_set(), *TRANSFERS], noise=0.02)
    place = next(place for place, each in enumerate(measured) if isinstance(each.item, Gemm) and each.item.k == 4096)
    measured[place] = measured[place]._replace(seconds=outlier * measured[place].seconds)
    found = fit(measured, SPEED, SHIPPED)
    small = {"gemm_half_depth", "gemm_half_rows", "gemm_traffic", "latency_rank"}  # a part of a kernel's time
    for name, value in found.items():
        assert value == pytest.approx(KNOWN[name], rel=0.35 if name in small else 0.05), name
    fitted = replace(SHIPPED, **found)
    assert deviation(measured, fitted) < 0.03 < deviation(measured, SHIPPED)


def deviation(measured: list[Measured], rates: Efficiencies) -> float:
    """Median of |ln(predicted / measured)|."""
    return median(abs(log(predicted_seconds(each.item, SPEED, rates) / each.seconds)) for each in measured)


def test_only_what_was_measured_is_derived() -> None:
    assert fit([], SPEED, SHIPPED) == {}
    assert set(fit(times([TINY]), SPEED, SHIPPED)) == {"kernel_gap"}
    equal = [Gemm("forward", size, size, 4096) for size in (1024, 2048, 4096)]
    assert set(fit(times([*equal]), SPEED, SHIPPED)) == {"gemm_16"}, "one depth does not tell how time depends on the depth"
    one = Attention("forward", 1, 16, 4096, 4096, 4096 * 4096 / 2, 128, 128)
    assert set(fit(times([one]), SPEED, SHIPPED)) == {"attention"}
    inside = [each for each in TRANSFERS if isinstance(each, Transfer) and each.near == 8 and each.ranks == 8]
    assert set(fit(times([*inside]), SPEED, SHIPPED)) == {"nvlink", "latency", "expert_nvlink"}
