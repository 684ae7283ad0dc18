"""The fields of DeepSeek-V4 in a container of Megatron-Bridge: compressed attention, hyper-connections and hashed routing.

Source: `DeepSeekV4Bridge.provider_bridge` (models/deepseek/deepseek_v4_bridge.py), August 2026, and `TransformerConfig` of the
branch dev of Megatron-LM that it needs.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from analyzer.errors import InputError, UnsupportedError
from analyzer.frameworks.bridge.model_fields import number, size
from analyzer.frameworks.containers import Tree
from analyzer.frameworks.options import is_true
from analyzer.launch.options.choose_release import LaterRelease
from analyzer.specs.attention import COMPRESSION, CompressedAttentionSpec, CompressedModel, HyperConnectionSpec
from analyzer.units import natural

VARIANT: Final = "dsv4_hybrid"
_RELEASE: Final = LaterRelease("0.19.0", "the branch dev of Megatron-LM, which has the layers of DeepSeek-V4, follows core 0.19")
_OF_RELEASE: Final = (
    "experimental_attention_variant", "o_groups", "o_lora_rank", "dsa_kernel_backend", "apply_dsa_kernel_fusion",
    "enable_hyper_connections", "num_residual_streams", "use_fused_mhc", "moe_n_hash_layers", "actual_vocab_size",
    "cp_partition_mode", "norm_topk_prob", "kv_lora_rank", "qk_head_dim", "csa_dense_mode", "hetereogenous_dist_checkpoint",
    "use_kernel_fusion_for_dsa", "moe_router_load_balancing_type", "moe_router_score_function",
)  # fmt: skip
"""Fields that are read here, or that no option of a release stands for."""
_PREFIXES: Final = ("csa_", "mhc_", "dsa_")
_SIGMOID: Final = "sigmoid"
_OTHER_SCORES: Final = "sqrtsoftplus"
"""Scores of each expert by itself, which have the tensors of a sigmoid."""


class Compressed(NamedTuple):
    """What the options do not say of the model, its other fields, and the release that they are those of."""

    parts: CompressedModel | None
    model: Tree
    release: LaterRelease | None = None


def read_compressed(model: Tree) -> Compressed:
    """DeepSeek-V4's fields apart. Raises InputError for those that Megatron-LM refuses."""
    if model.get("experimental_attention_variant") != VARIANT:
        return Compressed(None, model)
    if is_true(model.get("csa_dense_mode")):
        fault = "layers that read all keys of 4 tokens are not modelled"
        raise UnsupportedError("model.csa_dense_mode", fault, "write model.csa_dense_mode=false")
    fields = {name: value for name, value in model.items() if name not in _OF_RELEASE and not name.startswith(_PREFIXES)}
    if (natural(str(model.get("context_parallel_size"))) or 1) > 1 and model.get("cp_partition_mode") != "contiguous":
        fault = "Megatron-LM refuses context parallelism with the attention of DeepSeek-V4 and another partition than contiguous"
        raise InputError("model.cp_partition_mode", fault, "write model.cp_partition_mode=contiguous")
    modules = model.get("recompute_modules")
    named = [str(each) for each in (modules if isinstance(modules, list) else [modules] if modules else [])]
    if "mhc" in named and "mlp" in named:
        fault = "Megatron-LM does not recompute mhc and mlp together"
        raise InputError("model.recompute_modules", fault, "leave mlp out")
    fields["recompute_modules"] = [each for each in named if each != "mhc"] or None
    selective = model.get("recompute_granularity") == "selective"
    if selective and named and not fields["recompute_modules"]:
        fields["recompute_granularity"] = None
    head = size(model, "v_head_dim")
    fields |= {"qk_head_dim": head - size(model, "qk_pos_emb_head_dim"), "kv_lora_rank": head, "multi_latent_attention": True}
    balancing, scores = model.get("moe_router_load_balancing_type"), model.get("moe_router_score_function")
    fields["moe_router_load_balancing_type"] = "none" if balancing == "noaux_tc" else balancing
    fields["moe_router_score_function"] = _SIGMOID if scores == _OTHER_SCORES else scores
    connections = None
    if is_true(model.get("enable_hyper_connections")):
        connections = HyperConnectionSpec(
            streams=number(model, "num_residual_streams", 4),
            iterations=number(model, "mhc_sinkhorn_iterations", 20),
            fused=is_true(model.get("use_fused_mhc")),
            recomputed=selective and "mhc" in named,
        )
    parts = CompressedModel(
        attention=_attention(model, head),
        hyper_connections=connections,
        hash_layers=number(model, "moe_n_hash_layers", 0),
        layers=size(model, "num_layers"),
        not_compared=("mhc_recompute_layer_num",) if "mhc" in named and model.get("mhc_recompute_layer_num") else (),
    )
    return Compressed(parts, {name: value for name, value in fields.items() if value is not None}, _RELEASE)


def _attention(model: Tree, head: int) -> CompressedAttentionSpec:
    if model.get("dsa_kernel_backend") == "tilelang":
        fault = "Megatron-LM has no kernels of tilelang for the attention of DeepSeek-V4"
        raise InputError("model.dsa_kernel_backend", fault, "write cudnn or none")
    fused = model.get("apply_dsa_kernel_fusion")
    kernels = is_true(fused) if fused is not None else model.get("dsa_kernel_backend") == "cudnn"
    coefficient = model.get("dsa_indexer_loss_coeff") or 0
    if not isinstance(coefficient, int | float):
        raise InputError("model.dsa_indexer_loss_coeff", f"{coefficient!r} is not a number", "write 0 for no loss")
    return CompressedAttentionSpec(
        ratios=_ratios(model),
        head_dim=head,
        q_lora_rank=size(model, "q_lora_rank"),
        output_groups=size(model, "o_groups"),
        output_rank=size(model, "o_lora_rank"),
        window=size(model, "csa_window_size"),
        index_heads=size(model, "dsa_indexer_n_heads"),
        index_head_dim=size(model, "dsa_indexer_head_dim"),
        topk=size(model, "dsa_indexer_topk"),
        kernels=kernels,
        logged=coefficient > 0,
        sparse_loss=is_true(model.get("dsa_indexer_use_sparse_loss")),
    )


def _ratios(model: Tree) -> tuple[int, ...]:
    """Raises InputError for ratios that `TransformerConfig.__post_init__` refuses."""
    given = model.get("csa_compress_ratios")
    layers = size(model, "num_layers") + (natural(str(model.get("mtp_num_layers"))) or 0)
    ratios = tuple(each for each in given if isinstance(each, int)) if isinstance(given, list | tuple) else ()
    if not set(ratios) <= set(COMPRESSION.values()) or len(ratios) < layers:
        fault = f"is no list of {layers} ratios of 0, 4 and 128, one for each decoder and MTP layer"
        raise InputError("model.csa_compress_ratios", fault, "write that of the configuration of the model")
    return ratios[:layers]
