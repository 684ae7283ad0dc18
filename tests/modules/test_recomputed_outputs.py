"""Outputs that are freed in the forward and recomputed in the backward (`--recompute-modules`), by release.

Before core 0.17 `CheckpointWithoutOutput._recompute` copies the recomputed output to the storage that the forward freed. From 0.17
on that storage refers to the memory of the recomputed output (`share_storage`, core/tensor_parallel/random.py, 0.16.1 to 0.19.0).
So each such output takes its size once, where it took it twice.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from analyzer.errors import InputError
from analyzer.memory.ranks import rank_classes_of_tensors
from analyzer.modules.tree import total_bytes
from analyzer.passes.stages import stage_models
from tests.job_of import job_of

TOKENS, WIDTH, HEADS = 2048, 1024, 16
LATENT = (
    "--multi-latent-attention --position-embedding-type rope --disable-bias-linear --normalization RMSNorm --swiglu "
    "--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-ffn-hidden-size 256 --moe-token-dispatcher-type alltoall "
    "--recompute-granularity selective --recompute-modules {}"
)
QUERIES_KEYS_VALUES = 2 * TOKENS * HEADS * (192 + 192 + 128)
"""bf16, with the default sizes of latent attention: heads of 128 elements, and 64 for positions in queries and keys."""
ACTIVATIONS = 2 * 2 * TOKENS * 256
"""bf16, two experts for each token."""
NORM = 2 * TOKENS * WIDTH


def backward_bytes(modules: str, path: str, release: str) -> int:
    """Temporary bytes in the backward of a module of the first layer."""
    job = job_of(LATENT.format(modules), release=release)
    layer = next(module for name, module in stage_models(job)[0].trees[0].walk() if name == "gpt_model.decoder.layers")
    return total_bytes(next(module for name, module in layer.walk() if name.endswith(path)).backward_workspace)


@pytest.mark.parametrize("release", ["0.17.1", "0.18.2", "0.19.0"])
@pytest.mark.parametrize(
    ("modules", "path", "output"),
    [
        ("mla_up_proj", "self_attention.core_attention", QUERIES_KEYS_VALUES),
        ("moe_act", "experts.linear_fc2", ACTIVATIONS),
        ("layernorm", "layers.self_attention", NORM),
        ("layernorm", "layers.mlp", NORM),
    ],
)
def test_a_recomputed_output_exists_once_from_0_17_on(modules: str, path: str, output: int, release: str) -> None:
    assert backward_bytes(modules, path, "0.16.1") - backward_bytes(modules, path, release) == output


@pytest.mark.parametrize(("modules", "path"), [("mla_up_proj", "linear_kv_up_proj"), ("moe_act", "experts.activation_func")])
def test_the_checkpoint_references_its_output_in_its_own_backward(modules: str, path: str) -> None:
    """`CheckpointWithoutOutputFunction.backward` reads `ctx.outputs` in every release."""
    assert backward_bytes(modules, path, "0.17.1") == backward_bytes(modules, path, "0.16.1")


RECORDED = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 2 --global-batch-size 16 --tokenizer-type NullTokenizer --vocab-size 120 --bf16 "
    "--multi-latent-attention --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 --disable-bias-linear "
    "--use-distributed-optimizer --swiglu --normalization RMSNorm --recompute-granularity selective --recompute-modules "
)
EXPERTS = (
    "--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-ffn-hidden-size 512 --moe-token-dispatcher-type alltoall "
    "--expert-model-parallel-size 2"
)


@pytest.mark.parametrize(
    ("line", "recorded"),
    [
        ("mla_up_proj --pipeline-model-parallel-size 2", 245.42),
        (
            "mla_up_proj --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel --q-lora-rank 192 "
            "--no-rope-fusion",
            151.16,
        ),
        ("layernorm", 389.25),
        (
            "mla_up_proj --num-layers 2 --num-attention-heads 64 --seq-length 4096 --max-position-embeddings 4096 "
            "--vocab-size 500 --q-lora-rank 256 --kv-lora-rank 128 --qk-head-dim 64 --qk-pos-emb-head-dim 32 "
            "--v-head-dim 64 --context-parallel-size 2 --no-rope-fusion",
            1259.41,
        ),
        (f"moe_act --pipeline-model-parallel-size 2 {EXPERTS}", 443.98),
        (f"layernorm moe_act mla_up_proj {EXPERTS}", 500.57),
    ],
)
def test_peaks_agree_with_runs_of_core_0_17(line: str, recorded: float) -> None:
    """MiB of rank 0: the shadow engine ran megatron-core 0.17.1 with Transformer Engine 2.11 for one H100.

    A Python function replaced `share_storage`: the storage of the output references that of the recomputed output.
    """
    job = job_of(RECORDED + line, base="", release="0.17.1")
    job = replace(job, software=replace(job.software, te="2.11"))
    peak = rank_classes_of_tensors(job)[0].memory.peak_allocated_bytes
    assert peak / 2**20 == pytest.approx(recorded, rel=5e-4)


DELTA_NET = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 2 --global-batch-size 16 --tokenizer-type NullTokenizer --vocab-size 500 --bf16 "
    "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear --group-query-attention "
    "--num-query-groups 4 --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    "--experimental-attention-variant gated_delta_net --linear-attention-freq [1,1,1,1] --linear-num-key-heads 4 "
    "--linear-num-value-heads 16 --linear-key-head-dim 64 --linear-value-head-dim 128 --ffn-hidden-size 512 "
    "--use-distributed-optimizer --recompute-granularity selective --recompute-modules gdn_norm_out "
)
WIDE = "--num-layers 1 --linear-attention-freq [1] --ffn-hidden-size 128 --linear-num-value-heads 32 "
"""The peak is in linear attention."""


@pytest.mark.parametrize(
    ("line", "recorded"),
    [
        ("", 571.22),
        ("--context-parallel-size 2", 399.98),
        (f"{WIDE} --micro-batch-size 1", 287.90),
        (f"{WIDE} --fp8-format hybrid --fp8-recipe tensorwise", 425.63),
        (f"{WIDE} --linear-num-value-heads 64 --tensor-model-parallel-size 2 --sequence-parallel", 416.22),
    ],
)
def test_peaks_of_a_recomputed_norm_of_delta_nets_agree_with_core_0_19(line: str, recorded: float) -> None:
    """MiB of rank 0: the shadow engine ran megatron-core 0.19.0 with Transformer Engine 2.16 for one H100."""
    job = job_of(DELTA_NET + line, base="", release="0.19.0")
    job = replace(job, software=replace(job.software, te="2.16"))
    peak = rank_classes_of_tensors(job)[0].memory.peak_allocated_bytes
    assert peak / 2**20 == pytest.approx(recorded, rel=5e-4)


def test_a_recomputed_norm_of_delta_nets_exchanges_tokens_once_more() -> None:
    """`_gated_norm_and_a2a` is in the checkpoint (core/ssm/gated_delta_net/gdn.py, 0.19.0)."""
    job = job_of(f"{DELTA_NET} --context-parallel-size 2", base="", release="0.19.0")
    norm = next(module for name, module in stage_models(job)[0].trees[0].walk() if name.endswith("out_norm"))
    assert [(call.kind, call.phase) for call in norm.collectives] == [
        ("all_to_all", "forward"), ("all_to_all", "backward"), ("all_to_all", "recompute"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "release", "fault"),
    [
        (DELTA_NET, "0.18.2", "exists since core 0.19"),
        ("--recompute-granularity selective --recompute-modules gdn_norm_out", "0.19.0", "needs --experimental-attention-variant"),
    ],
)
def test_a_norm_that_is_not_there_is_not_recomputed(line: str, release: str, fault: str) -> None:
    """Assert and ValueError of `TransformerConfig.__post_init__`, 0.18.2 and 0.19.0."""
    with pytest.raises(InputError, match=f"recompute-modules: gdn_norm_out {fault}"):
        job_of(line, release=release)
