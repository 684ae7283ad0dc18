"""Latent attention: the rotation, and norms of the input of projections."""

from __future__ import annotations

from dataclasses import replace

import pytest

from analyzer.memory.ranks import rank_classes_of_tensors
from tests.command import report
from tests.job_of import BASE, job_of

LAUNCH = (
    f"--nproc-per-node 2 pretrain_gpt.py {BASE} --global-batch-size 2 --tensor-model-parallel-size 2 --sequence-parallel --swiglu "
    "--disable-bias-linear --normalization RMSNorm --position-embedding-type rope --multi-latent-attention --q-lora-rank 96 "
    "--kv-lora-rank 64 --qk-head-dim 32 --qk-pos-emb-head-dim 16 --v-head-dim 32 --qk-layernorm"
)


@pytest.mark.parametrize("fusion", ["", "--no-rope-fusion"])
def test_the_rotary_part_of_the_key_is_gathered(fusion: str) -> None:
    """It has `--qk-pos-emb-head-dim` elements for each token, and is not split (`multi_latent_attention.py` of core 0.16.1)."""
    found = report(*LAUNCH.split(), *fusion.split())
    tokens, width, layers = 2048, 16, 8
    calls = [row["calls_per_microbatch"] for row in found["communication"] if row["message_bytes"] == 2 * tokens * width]
    assert calls == [layers, layers]  # gathered in forward, and its gradient scattered in backward


UNCOMPRESSED = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 2 --global-batch-size 16 --tokenizer-type NullTokenizer --vocab-size 120 --bf16 --normalization RMSNorm "
    "--swiglu --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope --no-rope-fusion "
    "--attention-dropout 0 --hidden-dropout 0 --qk-layernorm --multi-latent-attention --kv-lora-rank 64 --qk-head-dim 64 "
    "--qk-pos-emb-head-dim 32 --v-head-dim 64 --use-distributed-optimizer "
)


@pytest.mark.parametrize(
    ("line", "parameters", "peak"),
    [
        ("", 22951424, 345.02),
        ("--tensor-model-parallel-size 2 --sequence-parallel", None, 234.02),
        ("--recompute-granularity selective --recompute-modules mla_up_proj", None, 303.45),
        ("--recompute-granularity selective --recompute-modules layernorm mla_up_proj", None, 295.42),
        ("--fp8-format hybrid --fp8-recipe tensorwise", None, 354.46),
    ],
)
def test_queries_that_are_not_compressed_have_a_norm_in_core_0_19(line: str, parameters: int | None, peak: float) -> None:
    """Bytes of parameters and MiB of the peak of rank 0: the shadow engine ran megatron-core 0.19.0 for one H100.

    The layer specs ask for no norm of the queries' input, and `QKNormConfigResolver` adds one with `--qk-layernorm`.
    """
    job = job_of(UNCOMPRESSED + line, base="", release="0.19.0")
    memory = rank_classes_of_tensors(replace(job, software=replace(job.software, te="2.11")))[0].memory
    assert parameters is None or memory.parameters_bytes == parameters
    assert memory.peak_allocated_bytes / 2**20 == pytest.approx(peak, rel=5e-4)
