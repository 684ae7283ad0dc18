"""DeepSeek sparse attention, compared with what megatron-core 0.18.2 allocates in the shadow engine.

The grid of `tests/allocator_hook/shadow/test_formulas_against_shadow.py` compares every tensor, with a checkout of that release.
"""

from __future__ import annotations

import pytest

from analyzer import analyze_inference
from analyzer.errors import UnsupportedError
from analyzer.modules.attention.latent_attention import latent_attention
from analyzer.modules.shapes import shapes_of
from analyzer.predict import predict
from analyzer.specs import TrainingJob
from tests.job_of import job_of

MIB = 2**20
OPTIONS = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 2 --global-batch-size 16 --vocab-size 9999 --use-distributed-optimizer --bf16 "
    "--position-embedding-type rope --no-rope-fusion --swiglu --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --qk-layernorm --multi-latent-attention "
    "--q-lora-rank 192 --kv-lora-rank 64 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64 "
    "--experimental-attention-variant dsa --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 64 --dsa-indexer-topk 256 "
    "--dsa-indexer-loss-coeff 0.01 "
)


def job(more: str = "") -> TrainingJob:
    return job_of(OPTIONS + more, release="0.18.2")


def test_saved_tensors() -> None:
    """Recorded in core_attention: softmax, its copy in bf16, fp32 queries and keys, indices, and the tensors of the indexer."""
    kernel = next(child for child in latent_attention(shapes_of(job())).children if child.name == "core_attention")
    sizes = sorted(tensor.bytes / MIB for part in kernel.children for tensor in part.saved if not tensor.made_in)
    small = [512 / MIB, 8 / 1024, 8 / 1024, 16 / 1024, *[64 / 1024] * 4, 0.25, 0.25]
    assert sizes == [*small, 1, 4, 6, 6, 32, 64]


@pytest.mark.parametrize(
    ("more", "recorded"),
    [
        ("", 1_065_785_344),
        ("--tensor-model-parallel-size 4 --sequence-parallel", 460_842_496),
        ("--pipeline-model-parallel-size 2 --vocab-size 500", 944_781_312),
        ("--dsa-indexer-n-heads 16 --vocab-size 500", 1_164_973_568),
    ],
)
def test_peaks(more: str, recorded: int) -> None:
    """Peaks of blocks of the allocator, which are larger than their tensors: up to 0.5 % in layouts as small as these."""
    peak = max(rank.memory.peak_allocated_bytes for rank in predict(job(more)).ranks)
    assert peak == pytest.approx(recorded, rel=0.005)


def test_the_indexer_adds_the_score_matrices_of_its_heads() -> None:
    """The gradients of the products of the index heads: three fp32 matrices and a mask for each head (b·H·s²).

    Weights and saved queries of more heads add less than a tenth.
    """
    few, many = (predict(job(f"--micro-batch-size 1 --dsa-indexer-n-heads {heads}")).ranks[0].memory for heads in (32, 64))
    matrices = 32 * 1024 * 1024 * (3 * 4 + 1)
    assert matrices <= many.peak_allocated_bytes - few.peak_allocated_bytes < 1.1 * matrices


@pytest.mark.parametrize("name", ["zai-org/GLM-5", "Qwen/Qwen3-Next-80B-A3B-Instruct"])
def test_inference_is_refused(name: str) -> None:
    line = [
        "--nproc-per-node",
        "8",
        "--info-model",
        name,
        "--info-megatron",
        "0.18.2",
        "--info-inference",
        "batch=1,prompt=9,generate=9",
    ]
    with pytest.raises(UnsupportedError, match="inference with sparse or linear attention"):
        analyze_inference(line, environ={}, folder="/nowhere")
