"""Bytes on each tier, against the allocations of FlexLLMGen."""

from __future__ import annotations

import pytest

from analyzer.inference.offload.memory import COPY_BUFFERS, actual, limits, tiers
from analyzer.inference.offload.policy import Placement, Schedule, Shares
from tests.inference.offload.small_case import GPU_ONLY, HIDDEN, HOST_ONLY, LAYERS, fits, small

PLACEMENT = Placement(GPU_ONLY, GPU_ONLY, GPU_ONLY)


def test_a_cache_has_room_for_all_tokens_but_the_last() -> None:
    """(prompt + generated - 1) x requests x heads x channels for keys and for values (`init_cache_one_gpu_batch`), in 16 bits."""
    found = tiers(small(Schedule(batch_size=3, batches=2)))
    empty = found.host.at(PLACEMENT)
    assert found.host.at(PLACEMENT._replace(cache=HOST_ONLY)) - empty == 2 * 2 * LAYERS * 6 * (8 + 4 - 1) * HIDDEN


def test_a_compressed_cache_has_4_bits_and_two_scales_for_64_elements() -> None:
    plain, compressed = (tiers(small(Schedule(batch_size=3, compressed_cache=flag))).host for flag in (False, True))
    on_host = PLACEMENT._replace(cache=HOST_ONLY)
    sizes = [each.at(on_host) - each.at(PLACEMENT) for each in (plain, compressed)]
    assert sizes[1] / sizes[0] == pytest.approx((64 / 2 + 2 * 2) / (64 * 2))


def test_the_copy_threads_have_8_gib_of_pinned_memory() -> None:
    """`copy_worker_func`: four threads, each with 2^30 elements of 16 bits."""
    assert tiers(small(Schedule(batch_size=3))).host.at(PLACEMENT) == COPY_BUFFERS == 8 * 2**30


def test_attention_on_the_cpu_has_a_workspace_in_32_bits() -> None:
    """`init_attention_compute_workspace`: keys and values of one batch and layer."""
    found = tiers(small(Schedule(batch_size=3, batches=2, attention_on_cpu=True)))
    assert found.host.constant - COPY_BUFFERS >= 2 * 4 * 3 * 11 * HIDDEN


def test_weights_on_the_host_need_room_for_two_sub_layers_on_the_gpu() -> None:
    case = small(Schedule(batch_size=3))
    layers, gpu = case.layers, tiers(case).gpu
    assert gpu.weights[0] == layers.bytes(case.schedule)
    assert gpu.weights[1] >= layers.attention.bytes(case.schedule) + layers.mlp.bytes(case.schedule)


def test_what_does_not_fit() -> None:
    case = small(Schedule(batch_size=3), host_memory=float(COPY_BUFFERS))
    assert fits(case, PLACEMENT)
    assert not fits(case, PLACEMENT._replace(cache=HOST_ONLY))
    assert limits(case.machine)[1] == COPY_BUFFERS


def test_actual_shares_are_those_of_whole_tensors_and_requests() -> None:
    case = small(Schedule(batch_size=4))
    found = actual(case, PLACEMENT._replace(cache=Shares(0.3, 0.7, 0.0), weights=Shares(0.01, 0.99, 0.0)))
    assert found.cache == (0.25, 0.75, 0.0)
    assert found.weights.gpu < 0.06  # the table of positions, whose middle is near the end of the small embedding, and vectors
