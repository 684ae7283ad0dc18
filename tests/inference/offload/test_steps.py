"""Times of the block schedule, worked out by hand from flexllmgen/flex_opt.py (`generation_loop_…`) for one slow resource each."""

from __future__ import annotations

import pytest

from analyzer.inference.offload.policy import Placement, Schedule, Shares
from analyzer.inference.offload.steps import block
from tests.inference.offload.small_case import DISK_ONLY, GPU_ONLY, HIDDEN, HOST_ONLY, LAYERS, small

ALL_ON_GPU = Placement(GPU_ONLY, GPU_ONLY, GPU_ONLY)
WEIGHTS_ON_HOST = ALL_ON_GPU._replace(weights=HOST_ONLY)
CACHE_ON_HOST = ALL_ON_GPU._replace(cache=HOST_ONLY)
TOKENS = 4 * HIDDEN
"""Bytes of a token of a request in the cache of one layer."""


def test_weights_are_loaded_once_for_all_batches_of_a_block() -> None:
    """Each of the four passes loads all weights; the head has its own embedding."""
    for batches in (1, 2, 5):
        found = small(Schedule(batch_size=2, batches=batches), pcie=1.0)
        size = found.layers.bytes(found.schedule)
        seconds = block(found).actual_seconds(WEIGHTS_ON_HOST)
        assert seconds.prefill == pytest.approx(size)
        assert seconds.decode == pytest.approx(3 * size)


def test_unpinned_weights_are_staged() -> None:
    found = small(Schedule(batch_size=2, pinned_weights=False), staged=1.0)
    assert block(found).actual_seconds(WEIGHTS_ON_HOST).prefill == pytest.approx(found.layers.bytes(found.schedule))


def test_weights_on_disk_pass_disk_and_link() -> None:
    found = small(Schedule(batch_size=2), pcie=1.0, disk_read=0.5)
    size = found.layers.bytes(found.schedule)
    assert block(found).actual_seconds(ALL_ON_GPU._replace(weights=DISK_ONLY)).prefill == pytest.approx(2 * size)
    serial = small(Schedule(batch_size=2, overlapped=False), pcie=1.0, disk_read=0.5)
    assert block(serial).actual_seconds(ALL_ON_GPU._replace(weights=DISK_ONLY)).prefill == pytest.approx(3 * size)


def test_the_load_of_weights_overlaps_with_the_first_batch_only() -> None:
    """Computation of 1 s a batch in every sub-layer; loading takes 3 s of attention and 6 s of MLP in a step (12 h², 1 : 2)."""
    base = small(Schedule(batch_size=2, batches=4))
    mlp = base.layers.mlp.bytes(base.schedule)
    found = block(small(base.schedule, pcie=mlp / 6, step=1.0))
    attention = base.layers.attention.bytes(base.schedule) / mlp * 6
    embedding, head = (each.bytes(base.schedule) / mlp * 6 for each in (base.layers.embedding, base.layers.head))
    first_batches = LAYERS * (6 + max(1, attention)) + max(1, head) + max(1, embedding)
    others = 3 * (2 * LAYERS + 2)
    assert found.seconds(WEIGHTS_ON_HOST).prefill == pytest.approx(first_batches + others)


def test_without_overlap_times_add_up() -> None:
    base = small(Schedule(batch_size=2, batches=4, overlapped=False))
    size = base.layers.bytes(base.schedule)
    found = block(small(base.schedule, pcie=size, hbm=base.layers.attention.bytes(base.schedule)))
    only_kernels = block(small(base.schedule, hbm=base.layers.attention.bytes(base.schedule)))
    assert found.seconds(WEIGHTS_ON_HOST).decode == pytest.approx(3 * 1.0 + only_kernels.seconds(ALL_ON_GPU).decode)


def test_the_cache_on_the_host_is_stored_and_loaded() -> None:
    """Prefill: 8 tokens are stored. Steps of the decode attend to 9, 10 and 11 tokens: 8 of the prompt and those generated."""
    schedule = Schedule(batch_size=2, batches=3)
    stored = block(small(schedule, unstaged=1.0)).seconds(CACHE_ON_HOST)
    assert stored.prefill == pytest.approx(LAYERS * 6 * 8 * TOKENS)
    assert stored.decode == pytest.approx(3 * LAYERS * 6 * TOKENS)
    staged = block(small(schedule, staged=1.0)).seconds(CACHE_ON_HOST)
    assert staged.prefill == pytest.approx(0)
    assert staged.decode == pytest.approx(LAYERS * 6 * (9 + 10 + 11) * TOKENS)


def test_attention_on_the_cpu_loads_no_cache() -> None:
    schedule = Schedule(batch_size=2, batches=3, attention_on_cpu=True)
    found = block(small(schedule, cpu_attention=1.0, pcie=1e3, staged=1e3)).seconds(CACHE_ON_HOST)
    assert found.decode == pytest.approx(LAYERS * 6 * (9 + 10 + 11) * TOKENS)
    divided = block(small(schedule, cpu_attention=1.0)).seconds(ALL_ON_GPU._replace(cache=Shares(0.5, 0.5, 0.0)))
    assert divided.decode == pytest.approx(found.decode / 2)


def test_a_compressed_cache_is_smaller_and_decompressed() -> None:
    schedule = Schedule(batch_size=2, batches=3, compressed_cache=True)
    staged = block(small(schedule, staged=1.0)).seconds(CACHE_ON_HOST)
    assert staged.decode == pytest.approx(0.28125 * LAYERS * 6 * (9 + 10 + 11) * TOKENS)
    decompressed = block(small(schedule, decompressed=1.0)).seconds(CACHE_ON_HOST)
    assert decompressed.decode == pytest.approx(LAYERS * 6 * (9 + 10 + 11) * TOKENS)


def test_compressed_weights_are_decompressed_for_every_batch() -> None:
    found = small(Schedule(batch_size=2, batches=3, compressed_weights=True), decompressed=1.0)
    matrices = sum(layer.count * layer.matrix_elements for layer in found.layers)
    assert block(found).seconds(ALL_ON_GPU).prefill == pytest.approx(3 * 2 * matrices)


def test_activations_on_the_host_cross_the_link_twice() -> None:
    found = small(Schedule(batch_size=2, batches=3), pcie=1.0)
    seconds = block(found).seconds(ALL_ON_GPU._replace(activations=HOST_ONLY))
    of_token = 2 * HIDDEN
    assert seconds.prefill == pytest.approx((2 * LAYERS + 2) * 6 * 8 * of_token * 2)
