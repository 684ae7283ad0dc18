"""Properties of the time of random launches."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, event, given, reject, settings
from hypothesis import strategies as st

from analyzer.api import read_launch
from analyzer.errors import AnalyzerError
from analyzer.predict import predict
from analyzer.results import Report, TimeEstimate
from analyzer.time.efficiencies import Efficiencies, efficiencies_of
from analyzer.time.estimate import TimeInputs, time_estimate
from analyzer.time.iteration import PARTS
from tests.examples import examples
from tests.fuzz.strategies import Launch, launches

FEW = settings(
    max_examples=examples(20),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
SPEEDS = ("hbm_bytes", "nvlink_bytes", "network_bytes", "peak_flops")
COSTS = frozenset(
    {
        *("gemm_half_depth", "gemm_half_rows", "gemm_traffic", "accumulation", "kernel_gap"),
        *("attention_half_sequence", "attention_half_width", "attention_waves"),
        *("latency", "latency_rank", "nvlink_few", "tp_backward_exposed", "ep_overlap_exposed", "slowdown", "p2p_exposed"),
        *("host_call", "host_operation", "host_read", "host_sync", "graph_call", "iteration"),
    }
)
"""Constants that are costs: a smaller value is faster. The others are shares of a speed, of which a larger one is faster."""
NEITHER = frozenset({"gemm_shapes"})
"""Constants that are neither: residuals have both signs."""


def read(words: list[str]) -> tuple[Report, TimeInputs]:
    """The report of a launch, and the inputs of its time. Raises AnalyzerError."""
    launch = read_launch(words, environ={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, folder=Path("/nowhere"))
    assert launch.time is not None
    return predict(launch.job, note=launch.note), launch.time


def accepted(launch: Launch) -> tuple[Report, TimeInputs]:
    """The same of a random launch, unless it is refused."""
    try:
        return read(launch.words)
    except AnalyzerError:
        event("refused")
        reject()


@FEW
@given(launches(features=1))
def test_the_parts_add_up(launch: Launch) -> None:
    report, inputs = accepted(launch)
    found = time_estimate(report, inputs)
    assert tuple(found.parts_seconds) == PARTS
    assert all(math.isfinite(seconds) and seconds >= -1e-9 for seconds in found.parts_seconds.values()), found.parts_seconds
    assert sum(found.parts_seconds.values()) == pytest.approx(found.iteration_seconds)
    assert found.range_seconds is not None
    lower, upper = found.range_seconds
    assert 0 < lower < found.iteration_seconds < upper < 3 * found.iteration_seconds
    assert 0 < found.model_flops_utilization < 1
    assert 0 < found.hardware_flops_utilization < 1
    batch, world = report.job.batch, report.job.parallel.world_size
    tokens = batch.global_batch_size * batch.seq_length
    assert found.tokens_per_second_per_gpu == pytest.approx(tokens / found.iteration_seconds / world)


def rates_of(inputs: TimeInputs, host: bool) -> Efficiencies:
    """The shipped efficiencies. Without `host`, its work takes no time: random models are small, so that most wait for it."""
    rates = efficiencies_of(inputs.speed)
    return rates if host else replace(rates, host_call=0.0, host_operation=0.0, host_read=0.0, host_sync=0.0, iteration=0.0)


@FEW
@given(launches(features=1), st.sampled_from((1.1, 2.0, 10.0)), st.booleans())
def test_faster_hardware_is_never_slower(launch: Launch, factor: float, host: bool) -> None:
    report, inputs = accepted(launch)
    speed = inputs.speed
    inputs = replace(inputs, rates=rates_of(inputs, host))
    before = time_estimate(report, inputs).iteration_seconds
    for name in SPEEDS:
        value = getattr(speed, name)
        more = {bits: factor * each for bits, each in value.items()} if name == "peak_flops" else factor * value
        faster = replace(speed, **{name: more}, name=f"{speed.name} with {name}·{factor}")  # type: ignore[arg-type]
        after = time_estimate(report, replace(inputs, speed=faster)).iteration_seconds
        assert after <= before * (1 + 1e-9), name


@FEW
@given(launches(features=1), st.sampled_from((1.05, 1.5)), st.booleans())
def test_higher_efficiencies_are_never_slower(launch: Launch, factor: float, host: bool) -> None:
    report, inputs = accepted(launch)
    rates = rates_of(inputs, host)
    before = time_estimate(report, replace(inputs, rates=rates)).iteration_seconds
    for each in fields(Efficiencies):
        if each.name in NEITHER:
            continue
        value = getattr(rates, each.name)
        better = replace(rates, **{each.name: value / factor if each.name in COSTS else value * factor})
        after = time_estimate(report, replace(inputs, rates=better)).iteration_seconds
        assert after <= before * (1 + 1e-9), each.name


@cache
def moe_seconds(imbalance: float, layout: str) -> float:
    line = (
        "--nnodes 2 --nproc-per-node 8 pretrain_gpt.py --num-layers 8 --hidden-size 2048 --num-attention-heads 16 "
        "--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64 "
        "--bf16 --tokenizer-type NullTokenizer "
        "--vocab-size 32000 --num-experts 16 --moe-router-topk 2 --moe-grouped-gemm --disable-bias-linear --swiglu "
        f"--sequence-parallel --info-gpu H100-80GB {layout} --info-moe-imbalance {imbalance}"
    )
    found = time_estimate(*read(line.split()))
    return found.iteration_seconds


@pytest.mark.parametrize(
    "layout",
    [
        "--expert-model-parallel-size 8",
        "--expert-model-parallel-size 16",
        "--expert-model-parallel-size 4 --tensor-model-parallel-size 2",
        "--expert-model-parallel-size 8 --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep",
        "--expert-model-parallel-size 4 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1",
    ],
)
def test_an_imbalance_of_the_experts_is_slower(layout: str) -> None:
    seconds = [moe_seconds(imbalance, layout) for imbalance in (1.0, 1.1, 1.5, 3.0)]
    assert seconds == sorted(set(seconds))


LLAMA = (
    "--nnodes 8 --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 "
    "--num-attention-heads 32 --group-query-attention --num-query-groups 8 --seq-length 8192 "
    "--max-position-embeddings 8192 --micro-batch-size 1 "
    "--swiglu --global-batch-size 512 --bf16 --tokenizer-type NullTokenizer --vocab-size 128000 --position-embedding-type rope "
    "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --use-distributed-optimizer "
    "--overlap-grad-reduce --overlap-param-gather --info-gpu H100-80GB"
)


def llama(line: str = "") -> TimeEstimate:
    return time_estimate(*read(f"{LLAMA} {line}".split()))


@pytest.mark.parametrize(
    "line",
    [
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--recompute-granularity selective --recompute-modules core_attn",
        "--tensor-model-parallel-size 8",
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--pipeline-model-parallel-size 8",
        "--no-rope-fusion",
        "--global-batch-size 1024",
        "--attention-backend unfused",
    ],
)
def test_what_makes_an_iteration_slower(line: str) -> None:
    assert llama(line).iteration_seconds > llama().iteration_seconds


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        (
            "--tensor-model-parallel-size 8 --sequence-parallel",
            "--tensor-model-parallel-size 8 --sequence-parallel --tp-comm-overlap",
        ),
        ("--pipeline-model-parallel-size 8", "--pipeline-model-parallel-size 8 --num-layers-per-virtual-pipeline-stage 1"),
        ("", "--fp8-format hybrid"),
        ("--info-gpu A100-80GB", ""),
    ],
)
def test_what_makes_an_iteration_faster(slower: str, faster: str) -> None:
    assert llama(faster).iteration_seconds < llama(slower).iteration_seconds


def test_recomputation_counts_as_hardware_flops_only() -> None:
    """Without attention, HFU is 8/6 of MFU for the layers."""
    plain, again = llama(), llama("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    assert again.model_flops_per_iteration == plain.model_flops_per_iteration
    seconds = again.iteration_seconds * again.hardware_flops_utilization
    layers = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    tokens = 512 * 8192
    forward = 2 * layers * tokens + 32 * 512 * 2 * 8192**2 * 4096
    difference = (seconds - plain.iteration_seconds * plain.hardware_flops_utilization) * plain.peak_flops * 64
    assert difference == pytest.approx(forward, rel=1e-9)
