"""Memory of the ranks of an inference launch, and what fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from analyzer.inference.memory import device_bytes, limits_of, stage_memories, with_batch, with_length
from analyzer.inference.weights import bytes_per_element
from analyzer.specs import QuantizationSpec
from tests.inference.job_of import BATCH, launch_of, report_of

LLAMA = "--info-model meta-llama/Llama-3.1-8B --info-gpu H100-80GB"
DENSE = (
    "--nproc-per-node 4 --num-layers 8 --hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 16 --bf16 "
    "--swiglu --seq-length 2048 --max-position-embeddings 4096 "
    "--position-embedding-type rope --normalization RMSNorm --disable-bias-linear "
    "--tokenizer-type NullTokenizer --vocab-size 31999 --make-vocab-size-divisible-by 1 --untie-embeddings-and-output-weights"
)
QUANTIZABLE = 8 * (4 * 1024**2 + 3 * 1024 * 4096)
"""Elements of the linear layers of DENSE: four projections of attention, and three matrices of the MLP."""
OTHERS = 2 * 32000 * 1024 + (2 * 8 + 1) * 1024
"""Embedding and output layer, and the norms."""


def test_parts_add_up_to_the_peak() -> None:
    for line in (f"{LLAMA} {BATCH}", f"{DENSE} {BATCH} --pipeline-model-parallel-size 2 --info-quantize w4a16kv4"):
        for stage in stage_memories(launch_of(line).job):
            temporary = max(stage.prefill_bytes, 0 if stage.graph_pool_bytes else stage.decode_bytes)
            parts = stage.weights_bytes + stage.kv_cache_bytes + sum(part.bytes for part in stage.workspaces)
            assert 0 <= stage.peak_bytes - parts - temporary - stage.graph_pool_bytes < 512 * 6
            assert stage.device_bytes > stage.peak_bytes


def test_weights_are_those_of_the_layers_of_each_rank() -> None:
    two_by_two = f"{DENSE} {BATCH} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    first, last = stage_memories(launch_of(two_by_two).job)
    layers = 4 * (4 * 1024**2 + 3 * 1024 * 4096) // 2 + 2 * 4 * 1024
    assert first.weights_by_type == {"bf16": 2 * (layers + 32000 * 1024 // 2)}
    assert last.weights_by_type == {"bf16": 2 * (layers + 32000 * 1024 // 2 + 1024)}
    assert (first.layers, last.layers) == ((1, 2, 3, 4), (5, 6, 7, 8))
    assert first.ranks == ((0, 1),)


@pytest.mark.parametrize(("bits", "each"), [(4, 0.5 + 4 / 64), (8, 1.0)])
def test_quantized_weights_have_scales(bits: int, each: float) -> None:
    """4 bit: a scale and a minimum of 16 bits for 64 elements. 8 bit: an fp32 scale for each row of a weight."""
    (stage,) = stage_memories(launch_of(f"{DENSE} {BATCH} --nproc-per-node 1 --info-quantize w{bits}a16").job)
    rows = 8 * (3 * 1024 + 1024 + 2 * 4096 + 1024)
    scales = 4 * rows if bits == 8 else 0
    assert stage.weights_by_type == {"bf16": 2 * OTHERS, f"int{bits}": QUANTIZABLE * each + scales}
    assert bytes_per_element(QuantizationSpec(weight_bits=bits), depth=4096) == pytest.approx(each, rel=0.001)


def test_prefill_needs_the_tensors_of_the_mlp() -> None:
    """The input of the layer, the residual stream, both halves of the activation, and its output."""
    (stage,) = report_of(f"{LLAMA} {BATCH}").stages
    assert stage.prefill_bytes == pytest.approx(8 * 2048 * 2 * (2 * 4096 + 3 * 14336), rel=0.001)
    assert stage.decode_bytes == stage.graph_pool_bytes < stage.prefill_bytes / 100


def test_the_static_engine_rotates_all_keys_in_decode() -> None:
    """Keys of 8 groups of 128 elements, of all tokens of a request (`Attention.forward` of megatron-core)."""
    job = launch_of(f"{LLAMA} {BATCH}").job
    static = replace(job, inference=replace(job.inference, cache="static"))
    (before,), (after,) = stage_memories(job), stage_memories(static)
    assert after.decode_bytes - before.decode_bytes == pytest.approx(8 * 2304 * 8 * 128 * 2, rel=0.2)


def test_the_logits_are_those_of_the_last_token() -> None:
    """In decode of a large vocabulary: 16-bit logits of one token of each request, and their fp32 copy."""
    (stage,) = stage_memories(launch_of(f"{LLAMA} --info-inference batch=64,prompt=2048,generate=256").job)
    assert stage.decode_bytes == pytest.approx(64 * 128256 * (2 + 4), rel=0.02)


def test_limits_are_exact() -> None:
    job = launch_of(f"{LLAMA} {BATCH}").job
    capacity, limits = job.hardware.capacity_bytes, limits_of(job)
    assert limits is not None
    assert capacity is not None
    assert device_bytes(with_batch(job, limits.batch_size)) <= capacity < device_bytes(with_batch(job, limits.batch_size + 1))
    longest = limits.sequence_length
    assert device_bytes(with_length(job, longest)) <= capacity < device_bytes(with_length(job, longest + 1))


def test_nothing_fits() -> None:
    report = report_of(f"--info-model meta-llama/Llama-3.1-70B --info-gpu H100-80GB {BATCH}")
    assert report.verdict.fits is False
    assert report.limits is not None
    assert (report.limits.batch_size, report.limits.sequence_length) == (0, 0)


def test_learned_positions_bound_the_sequence() -> None:
    report = report_of("--info-model facebook/opt-6.7b --info-gpu H100-80GB --info-inference batch=1,prompt=512,generate=32")
    assert report.limits is not None
    assert report.limits.sequence_length == report.job.model.max_position_embeddings


def test_the_margin_of_the_gpu() -> None:
    assert report_of(f"{LLAMA} {BATCH}").verdict.state == "fits"
    assert report_of(f"{LLAMA} {BATCH} --info-margin 90%").verdict.state == "tight"
    unknown = launch_of(f"{LLAMA} {BATCH}").job
    assert limits_of(replace(unknown, hardware=replace(unknown.hardware, capacity_bytes=None))) is None


def test_a_dequantized_copy_of_the_largest_weight_is_temporary() -> None:
    plain = report_of(f"{LLAMA} {BATCH} --info-quantize w4a4").stages[0].prefill_bytes
    with_copy = report_of(f"{LLAMA} {BATCH} --info-quantize w4a16").stages[0].prefill_bytes
    assert with_copy - plain == 2 * 28672 * 4096
