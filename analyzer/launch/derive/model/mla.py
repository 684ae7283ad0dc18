"""Multi-latent attention: its sizes, and the options that it excludes.

Megatron: `validate_args`, `core_transformer_config_from_args`, `MLATransformerConfig.__post_init__`, 0.16.1; the local
attention cannot be built with heads of two sizes. Context parallelism: `attn_forward_func_with_cp` of Transformer Engine
2.11 (transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.derive.reading import option, positive, since, switched_on, text
from analyzer.specs import MlaSpec, ParallelSpec
from analyzer.specs.release_changes import core_behavior

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments


def mla_spec(arguments: Arguments, *, parallel: ParallelSpec) -> MlaSpec | None:
    """Sizes of multi-latent attention; None without it. Raises InputError for options that it excludes."""
    rope_type = text(arguments, "rope_type", "yarn")
    if not switched_on(arguments, "multi_latent_attention"):
        if arguments.get("rope_type") not in (None, "rope"):
            raise InputError(
                option(arguments, "rope_type"), f"{rope_type} is for multi-latent attention", "add --multi-latent-attention"
            )
        return None
    _check_implementation(arguments)
    _check_queries(arguments)
    _check_positions(arguments, rope_type=rope_type)
    sparse = arguments.get("experimental_attention_variant") == "dsa"  # which has rules of its own
    if parallel.context > 1 and "p2p" not in parallel.cp_comm_type and not sparse:
        raise InputError(
            option(arguments, "cp_comm_type"),
            f"{parallel.cp_comm_type} is not supported with multi-latent attention",
            "use --cp-comm-type p2p",
        )
    return MlaSpec(
        q_lora_rank=positive(arguments, "q_lora_rank"),
        kv_lora_rank=positive(arguments, "kv_lora_rank") or 32,
        qk_head_dim=positive(arguments, "qk_head_dim") or 128,
        qk_pos_emb_head_dim=positive(arguments, "qk_pos_emb_head_dim") or 64,
        v_head_dim=positive(arguments, "v_head_dim") or 128,
        yarn=rope_type == "yarn",
        first_angles_stay=rope_type == "yarn" and core_behavior(arguments.release).first_angles_stay,
    )


def _check_implementation(arguments: Arguments) -> None:
    if switched_on(arguments, "use_legacy_models"):
        raise InputError("--multi-latent-attention", "legacy models do not have it", "leave out --use-legacy-models")
    if text(arguments, "transformer_impl", "transformer_engine") == "local":
        raise InputError(
            "--multi-latent-attention", "cannot be built with --transformer-impl local", "use --transformer-impl transformer_engine"
        )


def _check_queries(arguments: Arguments) -> None:
    """Each head has separate keys and values, so grouped queries are refused."""
    if not switched_on(arguments, "group_query_attention"):
        return
    if not since(arguments, "0.16"):
        raise UnsupportedError(
            "--group-query-attention", "groups of queries with multi-latent attention are not modelled", "leave it out"
        )
    raise InputError("--group-query-attention", "contradicts --multi-latent-attention", "keep one of the two")


def _check_positions(arguments: Arguments, *, rope_type: str) -> None:
    """A separate kernel rotates a part of each head. It supports YaRN only."""
    if switched_on(arguments, "rotary_interleaved"):
        raise InputError(option(arguments, "rotary_interleaved"), "contradicts --multi-latent-attention", "keep one of the two")
    rope = switched_on(arguments, "use_rotary_position_embeddings") or arguments.get("position_embedding_type") == "rope"
    fused = rope and arguments.get("apply_rope_fusion") is not False
    if rope_type == "rope" and fused:
        raise InputError(
            option(arguments, "rope_type"),
            "rope has no fused kernel with multi-latent attention",
            "add --no-rope-fusion, or use --rope-type yarn",
        )
