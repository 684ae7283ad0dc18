"""Recomputation and quantization are work: a second forward, and casts."""

from __future__ import annotations

import pytest

from analyzer.passes.stages import stage_models
from analyzer.time.pass_work import chunk_work
from analyzer.time.work.kernels import Gemm
from tests.time.work.executed import HIDDEN, LAYERS, SAMPLES, SEQUENCE, TOKENS, VOCABULARY, executed, job, kernels

LAYER = 12 * HIDDEN**2
LOGITS = HIDDEN * VOCABULARY
ATTENTION = SAMPLES * 2 * SEQUENCE**2 * HIDDEN
"""The forward of a layer."""


@pytest.mark.parametrize(
    ("line", "layers"),
    [
        ("--recompute-method uniform --recompute-num-layers 1", 4),
        ("--recompute-method uniform --recompute-num-layers 2", 4),
        ("--recompute-method block --recompute-num-layers 1", 1),
        ("--recompute-method block --recompute-num-layers 1 --pipeline-model-parallel-size 2", 2),  # one of each stage
        ("--recompute-method uniform --recompute-num-layers 1 --tensor-model-parallel-size 4 --sequence-parallel", 4),
    ],
)
def test_full_recomputation_adds_a_forward(line: str, layers: int) -> None:
    found = executed(f"--recompute-granularity full {line}")
    assert found.gemm == TOKENS * (6 * (LAYERS * LAYER + LOGITS) + 2 * layers * LAYER)
    assert found.attention == (3.5 * LAYERS + layers) * ATTENTION


def test_recomputed_attention_adds_its_forward() -> None:
    found = executed("--recompute-granularity selective --recompute-modules core_attn")
    assert found.gemm == executed().gemm
    assert found.attention == 4.5 * LAYERS * ATTENTION


def test_a_recomputed_mlp_adds_its_two_layers() -> None:
    found = executed("--disable-bias-linear --recompute-granularity selective --recompute-modules mlp")
    assert found.gemm == TOKENS * (6 * (LAYERS * LAYER + LOGITS) + 2 * LAYERS * 8 * HIDDEN**2)
    assert found.attention == 3.5 * LAYERS * ATTENTION


def test_recomputed_experts_add_their_forward() -> None:
    moe = "--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --disable-bias-linear --moe-ffn-hidden-size 512"
    line = f"{moe} --recompute-granularity selective --recompute-modules moe"
    again = LAYERS * (8 * HIDDEN + 2 * 2 * HIDDEN * 512)  # the router, and two of eight experts
    assert executed(line).gemm - executed(moe).gemm == 2 * TOKENS * again


@pytest.mark.parametrize(("recipe", "bytes_of_element"), [("tensorwise", 6), ("blockwise", 5)])
def test_quantization_casts_inputs_and_gradients(recipe: str, bytes_of_element: int) -> None:
    """Inputs of the four linear layers have 7·h elements for each token, gradients of their outputs 9·h.

    Each element is read (twice with the current scale of the tensor, whose maximum is needed first) and written in two layouts.
    """
    found = executed(f"--fp8-format hybrid --fp8-recipe {recipe}")
    assert found.cast_bytes == bytes_of_element * 16 * HIDDEN * LAYERS * TOKENS
    assert executed().cast_bytes == 0
    assert found.gemm == executed().gemm


def test_the_norm_writes_its_output_quantized_if_the_scale_is_known() -> None:
    """With delayed scaling, the 16-bit output of both norms of a layer is neither written nor read: 4 of 4 bytes are saved."""
    assert executed("--fp8-format hybrid --fp8-recipe delayed").cast_bytes == 4 * (16 - 2) * HIDDEN * LAYERS * TOKENS


def test_sequence_parallelism_quantizes_gathered_tensors_on_each_rank() -> None:
    """On two ranks, inputs of the column-parallel layers and output gradients of the row-parallel layers exist twice."""
    line = "--fp8-format hybrid --fp8-recipe delayed --tensor-model-parallel-size 2 --sequence-parallel"
    assert executed(line).cast_bytes == 4 * (16 + 4) * HIDDEN * LAYERS * TOKENS


def test_quantized_layers_and_logits_in_16_bit() -> None:
    found = job("--fp8-format hybrid")
    gemms = [kernel for _, kernel, _ in kernels(found) if isinstance(kernel, Gemm)]
    assert {kernel.precision for kernel in gemms if VOCABULARY in (kernel.m, kernel.n, kernel.k)} == {"16"}
    assert {kernel.precision for kernel in gemms if VOCABULARY not in (kernel.m, kernel.n, kernel.k)} == {"8"}


def test_weights_are_quantized_once_in_an_iteration() -> None:
    found = job("--fp8-format hybrid --fp8-recipe tensorwise")
    [stage] = stage_models(found)
    assert sum(chunk_work(found, tree).cast_bytes for tree in stage.trees) == 6 * LAYERS * LAYER
