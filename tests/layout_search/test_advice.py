"""Advice for launches that do not fit."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from analyzer.api import analyze, read_launch, with_advice
from analyzer.memory.ranks import highest_rank
from analyzer.predict import predict
from analyzer.results import Advice, Report
from tests.command import report as report_of

MODEL = (
    "--num-layers 16 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --seq-length 4096 "
    "--max-position-embeddings 4096 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --bf16 --micro-batch-size 4 --global-batch-size 64 --tokenizer-type NullTokenizer "
    "--vocab-size 32000"
)
LAUNCH = f"--nproc-per-node 8 pretrain_gpt.py {MODEL}"
MOE = f"{LAUNCH} --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall"


@cache
def analyzed(line: str) -> Report:
    """The report of a launch, which several tests read."""
    return analyze(line, gpu="H100-80GB")


def advice(line: str) -> tuple[Advice, ...]:
    return analyzed(line).advice


def changed(line: str, each: Advice) -> Report:
    """The report of the launch with the change appended to it."""
    assert "(without" not in each.change
    return analyzed(f"{line} {each.change}")


def highest(report: Report) -> int:
    return max(rank.memory.device_bytes for rank in report.ranks)


def test_there_is_no_advice_if_the_launch_fits_or_the_capacity_is_not_known() -> None:
    line = f"{LAUNCH} --tensor-model-parallel-size 8 --sequence-parallel --use-distributed-optimizer"
    assert analyzed(line).verdict.fits
    assert advice(line) == ()
    assert analyze(LAUNCH).advice == ()


@pytest.mark.parametrize("line", [LAUNCH, MOE])
def test_every_change_fits_and_has_the_stated_memory_and_time(line: str) -> None:
    """The command line with the change gives the same figures."""
    before = analyzed(line)
    found = advice(line)
    assert before.verdict.fits is False
    assert found
    for each in found:
        after = changed(line, each)
        assert after.verdict.fits
        assert each.fits
        assert each.device_bytes == highest(after)
        assert each.saves_bytes == highest(before) - each.device_bytes
        assert after.time is not None
        assert each.iteration_seconds == pytest.approx(after.time.iteration_seconds)


def test_changes_are_ordered_by_the_time_of_an_iteration() -> None:
    times = [each.iteration_seconds for each in advice(LAUNCH)]
    assert len(times) > 1
    assert times == sorted(times, key=lambda seconds: seconds or 0.0)


def test_sharding_the_optimizer_is_advised_where_it_is_enough() -> None:
    """On 8 ranks the fp32 weights and moments of 5.1 billion parameters shrink from 61 GB to 8 GB; the activations are small."""
    line = LAUNCH.replace("--micro-batch-size 4", "--micro-batch-size 1").replace("--num-layers 16", "--num-layers 24")
    assert "--use-distributed-optimizer" in [each.change for each in advice(line)]


def test_a_switch_of_sequence_parallelism_is_a_change_of_its_own() -> None:
    line = f"{LAUNCH} --tensor-model-parallel-size 2 --num-layers 34 --seq-length 16384 --max-position-embeddings 16384"
    assert "--sequence-parallel" in [each.change for each in advice(f"{line} --micro-batch-size 1 --use-distributed-optimizer")]


def test_two_dimensions_are_changed_only_if_one_is_not_enough() -> None:
    line = LAUNCH.replace("4096 --max-position-embeddings 4096", "32768 --max-position-embeddings 32768")
    line = line.replace("--num-layers 16", "--num-layers 32")
    found = advice(line)
    assert found
    for each in found:
        after = changed(line, each)
        assert after.verdict.fits
        flags = {word for word in each.change.split() if word.startswith("--")}
        assert len(flags - {"--sequence-parallel", "--recompute-method", "--recompute-num-layers", "--recompute-modules"}) == 2


def test_if_two_changes_are_not_enough_those_that_save_most_are_listed() -> None:
    line = MODEL.replace("--num-layers 16", "--num-layers 200").replace("4096 --ffn", "12288 --ffn")
    line = f"--nproc-per-node 8 pretrain_gpt.py {line} --num-attention-heads 96"
    found = advice(line)
    assert 0 < len(found) <= 3
    assert not any(each.fits or each.iteration_seconds is not None for each in found)
    assert [each.device_bytes for each in found] == sorted(each.device_bytes for each in found)
    assert all(each.saves_bytes > 0 for each in found)


def test_a_gpu_of_unknown_speed_gets_advice_without_times() -> None:
    found = analyze(f"{LAUNCH} --info-gpu-memory 60GiB").advice
    assert found
    assert all(each.fits and each.iteration_seconds is None for each in found)
    assert max(each.device_bytes for each in found) <= 60 * 2**30


def test_releases_get_only_options_that_they_have() -> None:
    """`--recompute-modules` exists from core 0.12 on, and a layer of the 2023 code has no MoE recomputation."""
    for release in ("0.8", "2023"):
        assert not any("--recompute-modules" in each.change for each in advice(f"{LAUNCH} --info-megatron {release}"))


def test_the_json_report_has_the_time_of_each_change() -> None:
    document = report_of(*LAUNCH.split(), "--info-gpu", "H100-80GB")
    assert document["advice"]
    for each in document["advice"]:
        assert set(each) == {"change", "device_bytes", "saves_bytes", "fits", "iteration_seconds"}
        assert each["iteration_seconds"] > 0
    assert json.dumps(document["advice"])


def test_the_memory_before_is_that_of_the_highest_rank() -> None:
    launch = read_launch([*LAUNCH.split(), "--info-gpu", "H100-80GB"], environ={}, folder=Path())
    before = highest_rank(launch.job).memory.device_bytes
    assert {each.device_bytes + each.saves_bytes for each in advice(LAUNCH)} == {before}


def test_kept_options_are_not_changed() -> None:
    kept = "tensor-model-parallel-size,use-distributed-optimizer"
    launch = read_launch(
        [*LAUNCH.split(), "--info-gpu", "H100-80GB", "--info-search", "--info-keep", kept], environ={}, folder=Path()
    )
    found = with_advice(predict(launch.job), launch).advice
    assert found
    assert not any("--tensor-model-parallel-size" in each.change or "--use-distributed" in each.change for each in found)
