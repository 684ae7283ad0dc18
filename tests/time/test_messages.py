"""Seconds of collectives from ring formulas, the links that groups span, and the share of tokens that leaves a domain.

Sources: NCCL tests, PERFORMANCE.md (bus bandwidth of each collective); Megatron-LM, core/parallel_state.py (order of ranks);
NVIDIA DGX H100 (8 GPUs, one network adapter each) and GB200 NVL72 (nodes of 4 GPUs, 18 in an NVLink domain).
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations
from math import comb

import pytest

from analyzer.layout.job_groups import domain_size
from analyzer.time.links import Span, span_of
from analyzer.time.message_seconds import NO_CHOICES, Choices, Exchange, message_seconds
from tests.job_of import job_of
from tests.time.speeds import ROUND, ideal, known

SIZE = 8e9


def transfer(kind: str, span: Span, *, exchange: Exchange = "", choices: Choices = NO_CHOICES) -> float:
    return message_seconds(kind, SIZE, span, ROUND, ideal(), exchange=exchange, choices=choices).transfer


@pytest.mark.parametrize(
    ("kind", "factor"),
    [
        ("all_reduce", 2 * 7 / 8),
        ("all_gather", 7 / 8),
        ("reduce_scatter", 7 / 8),
        ("all_to_all", 7 / 8),
        ("send", 1),
        ("broadcast", 1),
    ],
)
def test_a_collective_in_a_node(kind: str, factor: float) -> None:
    assert transfer(kind, Span(8, 8)) == pytest.approx(factor * SIZE / 400e9)


@pytest.mark.parametrize(
    ("near", "bandwidth"), [(1, 50e9), (2, 100e9), (4, 200e9), (8, 400e9)], ids=["one rank in a node", "two", "four", "eight"]
)
@pytest.mark.parametrize(("kind", "factor"), [("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1)])
def test_a_ring_over_nodes_uses_the_adapters_of_its_ranks(kind: str, factor: int, near: int, bandwidth: float) -> None:
    ranks = 4 * near
    assert transfer(kind, Span(ranks, near)) == pytest.approx(factor * (ranks - 1) / ranks * SIZE / bandwidth)


def test_nvlink_limits_a_ring_over_nodes() -> None:
    """Eight adapters of 100 GB/s are faster than NVLink of 400 GB/s."""
    speed = replace(ROUND, network_bytes=100e9)
    found = message_seconds("all_gather", SIZE, Span(16, 8), speed, ideal())
    assert found.transfer == pytest.approx(15 / 16 * SIZE / 400e9)


PODS = replace(ROUND, pod=32, spine_bytes=10e9)
"""Four nodes of eight GPUs in a pod, with a spine that has a fifth of the bandwidth of the adapters (50 GB/s)."""


@pytest.mark.parametrize(
    ("span", "bandwidth"),
    [
        (Span(16, 8, 16), 400e9),  # in a pod
        (Span(64, 8, 32), 320e9),  # 32 GPUs of a pod share 10 GB/s each
        (Span(8, 1, 4), 40e9),  # four of them
        (Span(2, 1, 1), 10e9),
    ],
)
def test_rings_over_pods_use_the_shares_of_their_ranks(span: Span, bandwidth: float) -> None:
    found = message_seconds("all_gather", SIZE, span, PODS, ideal())
    assert found.transfer == pytest.approx((span.ranks - 1) / span.ranks * SIZE / bandwidth)


def test_an_all_to_all_over_pods_is_limited_by_the_spine() -> None:
    """Of 64 ranks 32 are in other pods, and 56 in other nodes: 32/64 at 10 GB/s takes longer than 56/64 at 50 GB/s."""
    found = message_seconds("all_to_all", SIZE, Span(64, 8, 32), PODS, ideal(), exchange="plain")
    assert found.transfer == pytest.approx(32 / 64 * SIZE / 10e9)


def test_the_pods_that_a_group_spans() -> None:
    job = job_of("--tensor-model-parallel-size 8 --global-batch-size 64", gpus=64)
    assert span_of(job, "dp", PODS) == Span(8, 1, 4)
    assert span_of(job, "tp", PODS) == Span(8, 8, 8)
    assert span_of(job, "dp", ROUND) == Span(8, 1, 0)


def test_a_message_between_nodes_uses_one_adapter() -> None:
    assert transfer("send", Span(4, 1)) == pytest.approx(SIZE / 50e9)


def test_an_all_to_all_over_nodes_sends_most_over_the_network() -> None:
    """Of 16 equal parts, one stays, 7 go through NVLink, and 8 through the adapter at the same time."""
    assert transfer("all_to_all", Span(16, 8)) == pytest.approx(8 / 16 * SIZE / 50e9)


def test_a_group_of_one_rank_sends_nothing() -> None:
    assert message_seconds("all_reduce", SIZE, Span(1, 1), ROUND, ideal(latency=1)).total == 0


def test_the_latency_grows_with_the_logarithm_of_the_ranks() -> None:
    found = message_seconds("all_reduce", 1, Span(64, 8), ROUND, ideal(latency=10e-6, latency_rank=2e-6))
    assert found.latency == pytest.approx(10e-6 + 6 * 2e-6)


@pytest.mark.parametrize(
    ("gpus", "line", "group", "span"),
    [
        (16, "--tensor-model-parallel-size 8", "tp", (8, 8)),
        (16, "--tensor-model-parallel-size 4", "tp", (4, 4)),
        (16, "--tensor-model-parallel-size 8", "dp", (2, 1)),
        (16, "--tensor-model-parallel-size 4", "dp", (4, 2)),
        (32, "", "dp", (32, 8)),
        (32, "--tensor-model-parallel-size 2 --context-parallel-size 2", "cp", (2, 2)),
        (32, "--tensor-model-parallel-size 8 --context-parallel-size 2", "cp", (2, 1)),
        (32, "--tensor-model-parallel-size 8 --context-parallel-size 2", "dp_cp", (4, 1)),
        (8, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", "pp", (2, 2)),
        (16, "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 2", "pp", (2, 1)),
        (16, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", "pp", (2, 1)),
        (64, "--num-experts 64 --expert-model-parallel-size 8 --disable-bias-linear", "ep", (8, 8)),
        (64, "--num-experts 64 --expert-model-parallel-size 32 --disable-bias-linear", "ep", (32, 8)),
        (64, "--num-experts 64 --expert-model-parallel-size 32 --disable-bias-linear", "edp", (2, 1)),
    ],
)
def test_the_ranks_of_a_group_in_a_node(gpus: int, line: str, group: str, span: tuple[int, int]) -> None:
    """Ranks are placed in the order tp, cp, dp, pp, eight in each node."""
    assert span_of(job_of(f"{line} --global-batch-size 64", gpus=gpus), group, known("H100-80GB")) == Span(*span)


@pytest.mark.parametrize(
    ("gpu", "gpus", "domain"),
    [
        ("GB200-186GB", 8, 8),
        ("GB200-186GB", 64, 64),
        ("GB200-186GB", 72, 72),
        ("GB300-288GB", 256, 64),  # 16 of 18 nodes of a rack
        ("GB200-186GB", 144, 72),
        ("H100-80GB", 64, 4),
        ("H100-NVL-94GB", 64, 2),
        ("GH200-96GB", 64, 1),
    ],
)
def test_the_gpus_of_an_nvlink_domain(gpu: str, gpus: int, domain: int) -> None:
    found = job_of("--global-batch-size 144", gpus=8)
    parallel = replace(found.parallel, world_size=gpus, nodes=gpus // 4, gpus_per_node=4)
    assert domain_size(parallel, known(gpu).nvlink_domain) == domain


def test_a_rack_has_large_expert_groups() -> None:
    found = job_of("--num-experts 64 --expert-model-parallel-size 64 --disable-bias-linear --global-batch-size 128", gpus=128)
    found = replace(found, parallel=replace(found.parallel, nodes=32, gpus_per_node=4))
    assert span_of(found, "ep", known("GB200-186GB")) == Span(64, 64)
    assert span_of(found, "edp", known("GB200-186GB")) == Span(2, 1)


def sent(span: Span, choices: Choices) -> tuple[float, float]:
    """Copies of a token of rank 0: to ranks, and to other domains, on average over all choices of experts."""
    here, far = 0, 0
    local = choices.experts * choices.sharing // span.ranks
    for chosen in combinations(range(choices.experts), choices.topk):
        ranks = {expert // local * choices.sharing + each for expert in chosen for each in range(choices.sharing)}
        here += len(ranks)
        far += len({rank // span.near for rank in ranks} - {0})
    total = comb(choices.experts, choices.topk)
    return here / total, far / total


@pytest.mark.parametrize(
    ("span", "choices"),
    [
        (Span(4, 2), Choices(8, 2)),
        (Span(8, 4), Choices(16, 4)),
        (Span(8, 2), Choices(16, 3)),
        (Span(8, 1), Choices(8, 2)),
        (Span(16, 8), Choices(16, 1)),
        (Span(8, 4), Choices(8, 2, sharing=2)),  # expert-tensor parallelism in a domain
        (Span(8, 1), Choices(8, 2, sharing=2)),  # and between domains
        (Span(16, 4), Choices(16, 3, sharing=2)),
    ],
)
def test_the_flex_dispatcher_sends_a_token_once_to_each_domain(span: Span, choices: Choices) -> None:
    """The payload has one copy for each rank that has experts of the token."""
    copies, far = sent(span, choices)
    network = far / copies * SIZE / 50e9
    assert transfer("all_to_all", span, exchange="flex", choices=choices) == pytest.approx(network)


def test_many_experts_by_drawing_choices() -> None:
    """256 experts, 8 chosen, on 64 ranks in 8 nodes, as in DeepSeek-V3 without limited groups."""
    span, choices = Span(64, 8), Choices(256, 8)
    draws = random.Random(1)
    copies = far = 0
    for _ in range(20_000):
        ranks = {expert // 4 for expert in draws.sample(range(256), 8)}
        copies += len(ranks)
        far += len({rank // 8 for rank in ranks} - {0})
    network = far / copies * SIZE / 50e9
    assert transfer("all_to_all", span, exchange="flex", choices=choices) == pytest.approx(network, rel=0.01)


def test_other_dispatchers_send_a_token_for_each_expert() -> None:
    """A plain all-to-all sends 56 of 64 parts to other nodes."""
    found = transfer("all_to_all", Span(64, 8), exchange="plain", choices=Choices(256, 8))
    assert found == pytest.approx(56 / 64 * SIZE / 50e9)


def test_a_ring_has_the_links_of_the_node_with_the_fewest_ranks() -> None:
    """The first of three stages has every third rank: three in each of two nodes (0, 3, 6 and 9, 12, 15), two in the third."""
    line = "--num-layers 9 --pipeline-model-parallel-size 3 --use-tp-pp-dp-mapping --global-batch-size 64"
    assert span_of(job_of(line, gpus=24), "dp", known("H100-80GB")) == Span(8, 2)
