"""The linear program against all placements of a grid, and the search around it."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analyzer.inference.offload.memory import COPY_BUFFERS, actual
from analyzer.inference.offload.policy import Lengths, Placement, Schedule, Shares
from analyzer.inference.offload.program import Allowed, optimum
from analyzer.inference.offload.search import Problem, block_sizes, front, search
from analyzer.inference.offload.steps import Block, block
from analyzer.inference.offload.tensors import sub_layers
from analyzer.inference.offload.work import Case
from tests.examples import QUICK, examples
from tests.inference.offload.small_case import MODEL, fits, small

PARTS = 3
GRID = [
    Shares(gpu / PARTS, host / PARTS, (PARTS - gpu - host) / PARTS) for gpu in range(PARTS + 1) for host in range(PARTS + 1 - gpu)
]
RATES = st.floats(min_value=1e3, max_value=1e9)
BYTES = st.floats(min_value=2e4, max_value=2e6)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    schedule = Schedule(
        batch_size=draw(st.integers(1, 6)),
        batches=draw(st.integers(1, 4)),
        compressed_weights=draw(st.booleans()),
        compressed_cache=draw(st.booleans()),
        attention_on_cpu=draw(st.booleans()),
        overlapped=draw(st.booleans()),
        pinned_weights=draw(st.booleans()),
    )
    speeds = ("pcie", "staged", "unstaged", "cpu_attention", "disk_read", "disk_write", "hbm", "cache_read", "decompressed")
    return small(
        schedule,
        prompt=draw(st.integers(1, 40)),
        generated=draw(st.integers(2, 20)),
        gpu_memory=draw(BYTES),
        host_memory=COPY_BUFFERS + draw(BYTES),
        disk_size=draw(BYTES),
        **{name: draw(RATES) for name in speeds},
    )


def placements() -> list[Placement]:
    return [Placement(*shares) for shares in product(GRID, GRID, GRID)]


@settings(max_examples=examples(12))
@given(cases())
def test_no_placement_of_a_grid_is_better_than_the_program(case: Case) -> None:
    found = optimum(case, Allowed())
    steps = block(case)
    times = [steps.seconds(each).total for each in placements() if fits(case, each)]
    if found is None:
        assert not times
        return
    placement, seconds = found
    assert fits_nearly(case, placement)
    assert steps.seconds(placement).total == pytest.approx(seconds, rel=1e-4, abs=1e-5)
    assert all(time >= seconds * (1 - 1e-6) - 1e-5 for time in times)


@settings(max_examples=examples(12))
@given(cases())
def test_a_fine_grid_finds_the_same_time(case: Case) -> None:
    """Weights and cache between GPU and host, of which the latter has room for all."""
    case = small(case.schedule, prompt=20, generated=8, gpu_memory=3e5, pcie=case.machine.pcie, staged=case.machine.staged, hbm=1e6)
    two = (True, True, False)
    found = optimum(case, Allowed(weights=two, cache=two, activations=(True, False, False)))
    steps, parts = block(case), 20 if QUICK else 40
    shares = [Shares(part / parts, 1 - part / parts, 0.0) for part in range(parts + 1)]
    grid = [Placement(weights, cache, Shares(1.0, 0.0, 0.0)) for weights, cache in product(shares, shares)]
    times = [steps.seconds(each).total for each in grid if fits(case, each)]
    assert (found is None) == (not times)
    if found is not None:
        assert min(times) >= found[1] * (1 - 1e-6) - 1e-5
        assert min(times) <= found[1] + steepest(steps) / parts + 1e-5


def steepest(steps: Block) -> float:
    """The most seconds that a block can gain if weights and cache move from the host to the GPU."""
    passes = ((steps.prefill, 1), (steps.decode, steps.case.lengths.generated - 1))
    return sum(
        count
        * step.count
        * max(abs(each.weights[1] - each.weights[0]) + abs(each.cache[1] - each.cache[0]) for each in step.activities)
        for found, count in passes
        for step in found
    )


def fits_nearly(case: Case, placement: Placement) -> bool:
    """Whether a solution of the program fits, but for the tolerance of its solver."""
    roomy = {name: 1.0001 * getattr(case.machine, name) for name in ("gpu_memory", "host_memory", "disk_size")}
    more = small(case.schedule, prompt=case.lengths.prompt, generated=case.lengths.generated, **roomy)
    return fits(more, placement)


def problem(**more: bool) -> Problem:
    case = small(
        Schedule(batch_size=1), gpu_memory=2e5, host_memory=COPY_BUFFERS + 1e6, pcie=1e6, staged=1e6, cpu_attention=1e6, hbm=1e7
    )
    return Problem(model=MODEL, layers=sub_layers(MODEL), lengths=Lengths(prompt=16, generated=8), machine=case.machine, **more)


def test_the_search_finds_policies_that_fit_and_can_be_run() -> None:
    found = search(problem(compress_cache=True), block_sizes(4 if QUICK else 24))
    assert found
    assert [each.throughput for each in found] == sorted((each.throughput for each in found), reverse=True)
    for each in found:
        placement, schedule = each.policy.placement, each.policy.schedule
        assert fits(problem().case(schedule), actual(problem().case(schedule), placement))
        assert 1.0 in placement.activations
        assert not schedule.compressed_cache or 1.0 in placement.cache
        tokens = 8 * schedule.block_size
        assert each.throughput == pytest.approx(tokens / each.seconds.total)


def test_the_front_has_no_policy_that_another_beats() -> None:
    found = search(problem(), block_sizes(8 if QUICK else 24))
    kept = front(found)
    assert kept[-1] == found[0]
    for each in found:
        assert any(other.seconds.total <= each.seconds.total and other.throughput >= each.throughput for other in kept)
    latencies = [each.seconds.total for each in kept]
    assert latencies == sorted(latencies)


def test_the_search_is_at_least_as_good_as_all_placements_of_a_grid() -> None:
    """Of whole tensors and requests, with the sizes of a block of four."""
    best = search(problem(), [4])[0]
    shares = [Shares(gpu / 8, 1 - gpu / 8, 0.0) for gpu in range(9)]
    for batch, on_cpu in product((1, 2, 4), (False, True)):
        case = problem().case(Schedule(batch_size=batch, batches=4 // batch, attention_on_cpu=on_cpu))
        steps = block(case)
        for weights, cache, activations in product(shares, shares, (shares[0], shares[-1])):
            placement = Placement(weights, cache, activations)
            if fits(case, actual(case, placement)):
                assert steps.actual_seconds(placement).total >= 0.97 * best.seconds.total


def test_a_cache_on_the_gpu_is_left_to_the_gpu() -> None:
    for each in search(problem(), block_sizes(6)):
        assert not (each.policy.schedule.attention_on_cpu and each.policy.placement.cache.gpu == 1)


@pytest.mark.slow
def test_a_huge_block_ends_the_search_at_the_memory() -> None:
    sizes = [each.policy.schedule.block_size for each in search(problem(), block_sizes(10**8))]
    assert 8 < max(sizes) < 10**4


def test_sizes_of_blocks() -> None:
    assert block_sizes(1) == (1,)
    assert block_sizes(24) == (1, 2, 3, 4, 6, 8, 12, 16, 24)
    assert block_sizes(100) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 100)
