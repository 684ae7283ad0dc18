"""Multi-latent attention and multi-token prediction: derived values, and errors for what Megatron refuses.

Each case states a rule of `validate_args`, `MLATransformerConfig.__post_init__` or the layout of the pipeline in
Megatron-LM 0.16.1, or of the attention kernels of Transformer Engine 2.11.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.build import build
from analyzer.launch.derive.model.attention_backend import AttentionNeeds, choose_backend
from analyzer.launch.derive.model.mtp import mtp_layers_of
from analyzer.launch.parse import parse
from analyzer.specs import HardwareSpec, MlaSpec
from tests.data_files import truth_records
from tests.job_of import AMPERE, BASE, BLACKWELL, HOPPER, arguments_of, job_of

MLA = "--multi-latent-attention --position-embedding-type rope "
RTX = HardwareSpec(name="RTX PRO 6000", compute_capability=(12, 0))


@pytest.mark.parametrize(
    ("line", "option", "fault"),
    [
        (MLA + "--group-query-attention --num-query-groups 8", "--group-query-attention", "--multi-latent-attention"),
        (MLA + "--transformer-impl local", "--multi-latent-attention", "local"),
        (MLA + "--use-legacy-models --transformer-impl local", "--multi-latent-attention", "legacy"),
        (MLA + "--rope-type rope", "--rope-type", "fused kernel"),
        (MLA + "--rotary-interleaved", "--rotary-interleaved", "--multi-latent-attention"),
        (MLA + "--kv-lora-rank 0", "--kv-lora-rank", "not above 0"),
        (MLA + "--context-parallel-size 2 --cp-comm-type a2a", "--cp-comm-type", "a2a"),
        ("--rope-type yarn", "--rope-type", "multi-latent"),
        ("--recompute-granularity selective --recompute-modules mla_up_proj", "--recompute-modules", "mla_up_proj"),
    ],
)
def test_refused(line: str, option: str, fault: str) -> None:
    with pytest.raises(InputError) as error:
        job_of(line)
    assert not isinstance(error.value, UnsupportedError)
    assert error.value.option == option
    assert fault in error.value.fault


def test_grouped_queries_before_0_16() -> None:
    with pytest.raises(UnsupportedError, match=r"^--group-query-attention"):
        job_of(MLA + "--group-query-attention --num-query-groups 8", release="0.15.3")


def test_defaults() -> None:
    model = job_of(MLA).model
    assert model.mla == MlaSpec(q_lora_rank=None, kv_lora_rank=32, qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128)
    assert model.mla.query_head_dim == 192
    assert model.rope_fusion
    assert model.num_query_groups == model.num_attention_heads
    assert job_of("").model.mla is None


def test_rope() -> None:
    assert not job_of(MLA + "--rope-type rope --no-rope-fusion").model.rope_fusion
    learned = job_of("--multi-latent-attention --rope-type rope").model
    assert (learned.position_embedding, learned.rope_fusion) == ("learned_absolute", False)
    assert job_of("--rope-type rope --position-embedding-type rope").model.mla is None


def test_recomputation_of_the_up_projections() -> None:
    line = "--recompute-granularity selective --recompute-modules mla_up_proj core_attn"
    assert job_of(MLA + line).recompute.modules == ("core_attn", "mla_up_proj")


@pytest.mark.parametrize(
    ("gpu", "head_dim", "value_head_dim", "picked"),
    [
        (HOPPER, 192, 128, "fused"),
        (BLACKWELL, 192, 128, "fused"),
        (AMPERE, 192, 128, "unfused"),
        (RTX, 192, 128, "unfused"),
        (AMPERE, 24, 16, "fused"),
        (RTX, 96, 64, "fused"),
        (HOPPER, 192, 64, "fused"),
        (HOPPER, 256, 128, "unfused"),
        (BLACKWELL, 192, 64, "unfused"),
        (HOPPER, 192, 100, "unfused"),
        (AMPERE, 128, 128, "flash"),
    ],
)
def test_kernels_for_heads_of_two_sizes(gpu: HardwareSpec, head_dim: int, value_head_dim: int, picked: str) -> None:
    """FlashAttention 2 supports heads of one size only; the fused kernel up to 128, or 192 and 128, or 256 on Hopper."""
    needs = AttentionNeeds(half_precision=True, head_dim=head_dim, value_head_dim=value_head_dim)
    assert choose_backend("auto", needs=needs, gpu=gpu)[0] == picked


def test_a_kernel_that_another_release_may_have_is_analyzed_as_given() -> None:
    job = job_of(MLA + "--attention-backend flash", gpu=BLACKWELL)
    assert job.model.attention_backend == "flash"
    [stated] = [each for each in job.assumptions if "no flash attention for heads of 192 and 128, 16-bit" in each]
    assert "--attention-backend fused is in this one" in stated


def test_attention_parameters_of_deepseek_and_kimi() -> None:
    """The attention parameters that Megatron counted: h·rq + rq·a·dq + h·(rkv + dr) + rkv·a·(dn + dv) + a·dv·h.

    The norms of the latents are fused into the up-projections, and are counted as norms.
    """
    seen = set()
    for record in truth_records("parameters.json"):
        if "--multi-latent-attention" not in record["argv"]:
            continue
        words = ["--nproc-per-node", str(record["world_size"]), *record["argv"]]
        arguments, world, _ = parse(words, environ={}, folder=Path("/nowhere"))
        model = build(arguments, world, environ={}, gpu=HOPPER, folder=Path("/nowhere")).model
        mla = model.mla
        assert mla is not None
        h, a, rq, rkv = model.hidden_size, model.num_attention_heads, mla.q_lora_rank, mla.kv_lora_rank
        queries = h * a * mla.query_head_dim if rq is None else rq * (h + a * mla.query_head_dim)
        keys_and_values = h * (rkv + mla.qk_pos_emb_head_dim) + rkv * a * (mla.qk_head_dim + mla.v_head_dim)
        attention = queries + keys_and_values + a * mla.v_head_dim * h
        assert model.num_layers * attention == record["full_by_kind"]["attention"]
        assert model.attention_backend == "fused"
        seen.add(record["model"])
    assert {"deepseek-v2-lite", "kimi-k2"} <= seen


def test_multi_token_prediction_is_accepted() -> None:
    assert job_of("--mtp-num-layers 1 --position-embedding-type rope").model.mtp_num_layers == 1
    assert job_of("--mtp-num-layers 0").model.mtp_num_layers == 0
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"
    with pytest.raises(InputError, match=r"^--recompute-num-layers: with MTP layers"):
        job_of(f"--mtp-num-layers 1 --position-embedding-type rope {full}")


def test_layers_of_multi_token_prediction() -> None:
    rope, learned = job_of("--position-embedding-type rope").model, job_of("").model
    two = arguments_of(BASE + " --mtp-num-layers 2")
    assert mtp_layers_of(two, model=rope, context=1) == 2
    assert mtp_layers_of(two, model=rope, context=2) == 2
    assert mtp_layers_of(arguments_of(BASE), model=learned, context=1) == 0
    with pytest.raises(InputError, match=r"^--mtp-num-layers: is not supported with learned_absolute"):
        mtp_layers_of(two, model=learned, context=1)
    with pytest.raises(InputError, match=r"^--mtp-num-layers: -1"):
        mtp_layers_of(arguments_of(BASE + " --mtp-num-layers=-1"), model=rope, context=1)
    with pytest.raises(InputError, match=r"^--mtp-num-layers: .*context parallelism"):
        mtp_layers_of(arguments_of(BASE + " --mtp-num-layers 2", release="0.12.3"), model=rope, context=2)
