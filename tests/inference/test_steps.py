"""Times of prefill and decode: what bounds them, computed by hand for a GPU with round speeds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from analyzer.inference.kernels import Machine, cached_attention_seconds, linear_seconds
from analyzer.inference.steps import decode_seconds, expected_experts, prefill_seconds
from analyzer.specs import InferenceJob, QuantizationSpec
from analyzer.time.work.kernels import Gemm
from tests.inference.job_of import launch_of, report_of
from tests.time.speeds import ROUND, ideal

IDEAL = Machine(ROUND, ideal())
"""4 TB/s, and 1,000 TFLOP/s in 16 bit; every share is 1."""
LLAMA = "--info-model meta-llama/Llama-3.1-8B --info-gpu H100-80GB"
LAYER_WEIGHTS = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336


def job_of(line: str) -> InferenceJob:
    return launch_of(line).job


def test_decode_reads_every_weight_once() -> None:
    """One request: GEMMs take the time of reading the weights of the layers and the output layer."""
    found = decode_seconds(job_of(f"{LLAMA} --info-inference batch=1,prompt=512,generate=32"), IDEAL)
    weights = 2 * (32 * LAYER_WEIGHTS + 128256 * 4096)
    assert found.gemm == pytest.approx(weights / 4e12, rel=0.002)
    assert found.communication == found.host == 0


def test_decode_reads_the_cache_of_its_length() -> None:
    """At the middle of the generation: prompt and half of the generated tokens."""
    found = decode_seconds(job_of(f"{LLAMA} --info-inference batch=8,prompt=1000,generate=400"), IDEAL)
    assert found.attention == pytest.approx(8 * 1200 * 131072 / 4e12, rel=1e-6)
    half = decode_seconds(job_of(f"{LLAMA} --info-inference batch=8,prompt=1000,generate=400 --info-quantize w16a16kv8"), IDEAL)
    assert half.attention == pytest.approx(found.attention * (128 + 4) / 256, rel=1e-6)


def test_the_static_engine_rotates_all_cached_keys() -> None:
    """Keys of 8 groups of 128 elements in 32 layers, read and written in 16 bit."""
    job = job_of(f"{LLAMA} --info-inference batch=8,prompt=1000,generate=400")
    static = replace(job, inference=replace(job.inference, cache="static"))
    added = decode_seconds(static, IDEAL).memory_bound - decode_seconds(job, IDEAL).memory_bound
    assert added == pytest.approx(32 * 2 * 8 * 1200 * 1024 * 2 / 4e12, rel=1e-6)


def test_a_window_bounds_what_decode_reads() -> None:
    """gpt-oss: half of the 24 layers attend to 128 tokens; 8 groups of 64 elements."""
    found = decode_seconds(job_of("--info-model openai/gpt-oss-20b --info-inference batch=2,prompt=3000,generate=100"), IDEAL)
    assert found.attention == pytest.approx(2 * 12 * (3050 + 128) * 2 * 8 * 64 * 2 / 4e12, rel=1e-6)


def test_prefill_computes_the_operations_of_the_model() -> None:
    """At full efficiency: two operations for each weight and token, logits of the last token alone, and half of all pairs."""
    found = prefill_seconds(job_of(f"{LLAMA} --info-inference batch=4,prompt=4096,generate=32"), IDEAL)
    tokens = 4 * 4096
    assert found.gemm == pytest.approx(2 * tokens * 32 * LAYER_WEIGHTS / 1e15, rel=0.25)
    assert found.gemm >= 2 * tokens * 32 * LAYER_WEIGHTS / 1e15
    pairs = 2 * 2 * 4 * 32 * 128 * 4096 * 4096 / 2 * 32
    assert found.attention >= pairs / 1e15


def test_pipeline_stages_follow_each_other() -> None:
    """A token passes all stages: their layers take as long as those of one stage, and a message goes between them."""
    one = decode_seconds(job_of(f"{LLAMA} --info-inference batch=1,prompt=512,generate=32"), IDEAL)
    line = f"{LLAMA} --info-inference batch=1,prompt=512,generate=32 --pipeline-model-parallel-size 2 --info-world-size 2"
    two = decode_seconds(job_of(line), IDEAL)
    assert two.gemm == pytest.approx(one.gemm, rel=1e-9)
    assert two.communication == pytest.approx(4096 * 2 / 400e9, rel=1e-9)


def test_tensor_parallel_ranks_share_the_weights() -> None:
    one = decode_seconds(job_of(f"{LLAMA} --info-inference batch=1,prompt=512,generate=32"), IDEAL)
    line = f"{LLAMA} --info-inference batch=1,prompt=512,generate=32 --tensor-model-parallel-size 4 --info-world-size 4"
    four = decode_seconds(job_of(line), IDEAL)
    assert four.gemm == pytest.approx(one.gemm / 4, rel=0.01)
    assert four.attention == pytest.approx(one.attention / 4, rel=1e-9)
    assert four.communication > 0


def test_few_rows_are_bound_by_reading_quantized_weights() -> None:
    gemm = Gemm("forward", 1, 8192, 8192)
    elements = 8192 * 8192
    written = 2 * 2 * 8192 / 4e12
    assert linear_seconds(gemm, IDEAL, None) == pytest.approx(2 * elements / 4e12 + written, rel=1e-9)
    four = linear_seconds(gemm, IDEAL, QuantizationSpec(weight_bits=4))
    assert four == pytest.approx((0.5 + 4 / 64) * elements / 4e12 + written, rel=1e-9)


def test_many_rows_need_dequantized_weights() -> None:
    """A kernel reads the quantized weight and writes it in 16 bit; the GEMM is that of 16 bit."""
    gemm = Gemm("forward", 4096, 8192, 8192)
    added = linear_seconds(gemm, IDEAL, QuantizationSpec(weight_bits=4)) - linear_seconds(gemm, IDEAL, None)
    assert added == pytest.approx((2 + 0.5 + 4 / 64) * 8192 * 8192 / 4e12, rel=1e-9)


def test_quantized_activations_use_faster_gemms_and_are_cast() -> None:
    gemm = Gemm("forward", 4096, 8192, 8192)
    eight = linear_seconds(gemm, IDEAL, QuantizationSpec(weight_bits=8, activation_bits=8))
    cast = 3 * 4096 * 8192 / 4e12
    assert eight - cast == pytest.approx(linear_seconds(gemm, IDEAL, None) / 2, rel=1e-9)
    integers = Machine(replace(ROUND, integer_ops={"8": 4e15}), ideal())
    assert linear_seconds(gemm, integers, QuantizationSpec(weight_bits=8, activation_bits=8)) < eight


def test_attention_to_latents_can_be_bound_by_its_operations() -> None:
    def seconds(operations: float) -> float:
        return cached_attention_seconds(IDEAL, cache_bytes=4e9, operations=operations, elements=2e9, cache_bits=16, dtype="bf16")

    assert seconds(1e12) == pytest.approx(1e-3)
    assert seconds(4e12) == pytest.approx(4e-3)


def test_a_few_tokens_do_not_choose_all_experts() -> None:
    """One token chooses 2 of 8 experts: of the 4 of a rank, 1 in the mean. 100 tokens choose all."""
    assert expected_experts(4, 8, 2, 1) == 1
    assert expected_experts(8, 8, 2, 1) == 2
    assert expected_experts(4, 8, 2, 100) == 4


def test_throughput_and_cost() -> None:
    report = report_of(f"{LLAMA} --info-inference batch=8,prompt=512,generate=128 --info-world-size 4 --info-price 2")
    assert report.time is not None
    given = report.time.given
    seconds = given.prefill.total + 127 * given.decode.total
    assert given.tokens_per_second == pytest.approx(4 * 8 * 128 / seconds)  # four replicas
    assert given.cost_per_million_tokens == pytest.approx(4 * 2 / 3600 / given.tokens_per_second * 1e6)
    sizes = [each.batch_size for each in report.time.others]
    assert sizes[:4] == [1, 2, 4, 8]
    rates = [each.tokens_per_second for each in report.time.others if each.batch_size <= 64]
    assert rates == sorted(rates)


def test_without_graphs_the_host_issues_every_operation() -> None:
    job = job_of(f"{LLAMA} --info-inference batch=1,prompt=512,generate=32")
    launch = launch_of(f"{LLAMA} --info-inference batch=1,prompt=512,generate=32")
    assert launch.time is not None
    machine = Machine(launch.time.speed, ideal(host_call=4e-5))
    eager = replace(job, inference=replace(job.inference, decode_graphs=False))
    assert decode_seconds(job, machine).host == 0
    found = decode_seconds(eager, machine)
    assert found.total == pytest.approx(32 * 13 * 4e-5, rel=0.1)  # 13 kernels of a layer, and those of embedding and logits
    assert found.host > 0.5 * found.total
