"""FLOPs of all GEMMs of an iteration: six for each token and each weight that multiplies it (Kaplan et al. 2020, section 2.1)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from analyzer.time.work.kernels import Gemm
from tests.time.work.executed import HEADS, HIDDEN, LAYERS, TOKENS, VOCABULARY, executed, job, kernels

LOGITS = HIDDEN * VOCABULARY
DENSE = LAYERS * 12 * HIDDEN**2 + LOGITS  # 4·h² of attention and 8·h² of the FFN
GQA = "--swiglu --ffn-hidden-size 2816 --group-query-attention --num-query-groups 4 --disable-bias-linear --normalization RMSNorm"
GQA_WEIGHTS = LAYERS * (2 * HIDDEN**2 + 2 * HIDDEN * HIDDEN // 4 + 3 * HIDDEN * 2816) + LOGITS
MLA = (
    "--multi-latent-attention --q-lora-rank 384 --kv-lora-rank 128 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 48 "
    "--swiglu --ffn-hidden-size 2816 --disable-bias-linear --normalization RMSNorm --attention-backend fused"
)
# DeepSeek-V2 (arXiv 2405.04434), section 2.1: down- and up-projections of queries, and of keys and values with the rotated key
MLA_ATTENTION = HIDDEN * 384 + 384 * HEADS * (64 + 32) + HIDDEN * (128 + 32) + 128 * HEADS * (64 + 48) + HEADS * 48 * HIDDEN
MLA_WEIGHTS = LAYERS * (MLA_ATTENTION + 3 * HIDDEN * 2816) + LOGITS
MOE = (
    "--num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 512 --moe-grouped-gemm --swiglu --disable-bias-linear "
    "--moe-shared-expert-intermediate-size 768 --moe-layer-freq [0]*1+[1]*3 --ffn-hidden-size 2816 --normalization RMSNorm "
    "--moe-token-dispatcher-type alltoall"
)
# one dense layer; three with router, four of sixteen experts, and a shared expert
MOE_WEIGHTS = LAYERS * 4 * HIDDEN**2 + 3 * HIDDEN * 2816 + 3 * (16 * HIDDEN + 4 * 3 * HIDDEN * 512 + 3 * HIDDEN * 768) + LOGITS
MTP_WEIGHTS = DENSE + (12 * HIDDEN**2 + 2 * HIDDEN**2) + LOGITS  # a layer, the projection of two hidden states, and its logits


@pytest.mark.parametrize(
    ("model", "weights"),
    [("", DENSE), (GQA, GQA_WEIGHTS), (MLA, MLA_WEIGHTS), (MOE, MOE_WEIGHTS), ("--mtp-num-layers 1", MTP_WEIGHTS)],
    ids=["dense", "GQA", "MLA", "MoE", "MTP"],
)
def test_six_operations_for_each_token_and_weight(model: str, weights: int) -> None:
    assert executed(model).gemm == 6 * TOKENS * weights


LAYOUTS = (
    "--tensor-model-parallel-size 4 --sequence-parallel",
    "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2",
    "--context-parallel-size 4",
    "--pipeline-model-parallel-size 4",
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
)


@pytest.mark.parametrize("layout", [*LAYOUTS, "--tensor-model-parallel-size 4"])
@pytest.mark.parametrize(("model", "weights"), [("", DENSE), (GQA, GQA_WEIGHTS)], ids=["dense", "GQA"])
def test_the_layout_does_not_change_the_operations_of_all_ranks(layout: str, model: str, weights: int) -> None:
    assert executed(f"{model} {layout}").gemm == 6 * TOKENS * weights


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_does_not_change_those_of_latent_attention(layout: str) -> None:
    assert executed(f"{MLA} {layout}").gemm == 6 * TOKENS * MLA_WEIGHTS


@pytest.mark.parametrize(
    "layout",
    [
        *LAYOUTS,
        "--expert-model-parallel-size 8",
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 4 --expert-tensor-parallel-size 1",
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2",
        "--pipeline-model-parallel-size 2 --expert-model-parallel-size 4 --moe-token-dispatcher-type allgather",
        "--expert-model-parallel-size 8 --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep",
    ],
)
def test_the_layout_does_not_change_those_of_experts(layout: str) -> None:
    assert executed(f"{MOE} {layout}").gemm == 6 * TOKENS * MOE_WEIGHTS


def test_without_sequence_parallelism_each_rank_repeats_the_down_projections() -> None:
    """Down-projections of latent attention are not split over tensor-parallel ranks, which then all have every token."""
    repeated = LAYERS * (HIDDEN * 384 + HIDDEN * (128 + 32))
    assert executed(f"{MLA} --tensor-model-parallel-size 4").gemm == 6 * TOKENS * (MLA_WEIGHTS + 3 * repeated)


def test_tied_embeddings_multiply_once() -> None:
    """A word embedding is looked up, so that the weight only multiplies in the output layer, tied or not."""
    untied = executed("--untie-embeddings-and-output-weights --pipeline-model-parallel-size 2")
    assert untied.gemm == executed("--pipeline-model-parallel-size 2").gemm == 6 * TOKENS * DENSE


def test_experts_of_a_rank_are_one_grouped_gemm() -> None:
    """With 16 experts on 8 ranks, each rank has 2, and each expert a quarter of the 4,096 tokens from each of 8 ranks."""
    found = job(f"{MOE} --expert-model-parallel-size 8")
    grouped = {kernel for _, kernel, _ in kernels(found) if isinstance(kernel, Gemm) and kernel.grouped}
    assert {kernel.batch for kernel in grouped} == {2}
    rows = 2 * 2048 * 8 * 4 // 16
    shapes = {(kernel.m, kernel.n, kernel.k) for kernel in grouped}
    forward = {(rows, 1024, HIDDEN), (rows, HIDDEN, 512)}
    data = {(rows, HIDDEN, 1024), (rows, 512, HIDDEN)}
    weight = {(1024, HIDDEN, rows), (HIDDEN, 512, rows)}
    assert shapes == forward | data | weight


def test_imbalance_gives_the_experts_more_rows() -> None:
    balanced = job(MOE)
    moe = balanced.model.moe
    assert moe is not None
    uneven = replace(balanced, model=replace(balanced.model, moe=replace(moe, imbalance=1.5)))
    rows = [
        {kernel.m for _, kernel, _ in kernels(each) if isinstance(kernel, Gemm) and kernel.grouped and kernel.name == "forward"}
        for each in (balanced, uneven)
    ]
    assert rows == [{1024}, {1536}]  # 4,096 tokens, each with 4 of 16 experts
