"""Advice on gradient buckets, at sizes of the data-parallel group where Megatron's default leaves one bucket.

Source of the default: max(40,000,000, 1,000,000 · data-parallel size) elements (core/distributed/distributed_data_parallel.py,
0.16.1).
"""

from __future__ import annotations

import re

from analyzer.results import TimeEstimate
from analyzer.time.estimate import time_estimate
from tests.time.test_properties import LLAMA, read


def llama(nodes: int, line: str = "") -> TimeEstimate:
    """An 8B model, whose 8.0 billion parameters are one bucket from 8,031 data-parallel ranks on."""
    words = f"{LLAMA} --nnodes {nodes} --global-batch-size {8 * nodes} {line}".split()
    return time_estimate(*read(words))


def advised(time: TimeEstimate) -> str:
    """The advised option; empty without one."""
    found = re.search(r"(--ddp-\S+ \d+)(?: in place of --ddp-bucket-size)? makes an iteration (\d+)% shorter\.$", time.bottleneck)
    return found.group(1) if found else ""


def test_one_bucket_hides_nothing_and_more_buckets_are_advised() -> None:
    before = llama(1024)
    option = advised(before)
    assert option.startswith("--ddp-num-buckets ")
    after = llama(1024, option)
    assert after.parts_seconds["exposed_dp"] < 0.5 * before.parts_seconds["exposed_dp"]
    share = 1 - after.iteration_seconds / before.iteration_seconds
    assert f"makes an iteration {share:.0%} shorter." in before.bottleneck
    assert advised(after) == ""


def test_a_given_bucket_size_is_replaced() -> None:
    """8.03 billion parameters in buckets of 9 billion are one bucket as well."""
    time = llama(1024, "--ddp-bucket-size 9000000000")
    assert " in place of --ddp-bucket-size makes an iteration " in time.bottleneck
    assert advised(time) == advised(llama(1024))


def test_older_releases_have_only_the_size() -> None:
    time = llama(1024, "--info-megatron 0.8.0")
    option, size = advised(time).split()
    assert option == "--ddp-bucket-size"
    count = int(advised(llama(1024)).split()[1])
    assert 8.0e9 < int(size) * count < 8.1e9


def test_no_more_buckets_than_needed_are_advised() -> None:
    """Of n buckets, one is exposed: eight hide 7/8 of what can be hidden, and more have the latency of more rings."""
    assert advised(llama(1024)) == "--ddp-num-buckets 8"


def test_smaller_groups_have_buckets_enough() -> None:
    """On 1,024 GPUs the default of 1.02 billion elements makes eight buckets."""
    assert advised(llama(128)) == ""


def test_without_overlap_the_options_for_it_are_advised() -> None:
    words = f"{LLAMA} --nnodes 1024 --global-batch-size 8192".replace(" --overlap-grad-reduce --overlap-param-gather", "").split()
    sentence = time_estimate(*read(words)).bottleneck
    assert sentence.endswith("--overlap-grad-reduce and --overlap-param-gather hide a part of it.")


def test_buckets_are_advised_beside_a_larger_part() -> None:
    """With two pipeline stages of 4 billion parameters and 4,096 data-parallel ranks, the first has one bucket as well."""
    before = llama(1024, "--pipeline-model-parallel-size 2")
    assert "The largest other part is the pipeline bubble" in before.bottleneck
    after = llama(1024, f"--pipeline-model-parallel-size 2 {advised(before)}")
    assert after.parts_seconds["exposed_dp"] < 0.5 * before.parts_seconds["exposed_dp"]
