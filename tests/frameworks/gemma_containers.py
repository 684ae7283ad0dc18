"""Containers of Megatron-Bridge with the providers of Gemma: the fields that `provider_bridge` sets for a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CONTAINER = """
model:
  _target_: megatron.bridge.models.gemma.{name}
  num_layers: {num_hidden_layers}
  hidden_size: {hidden_size}
  ffn_hidden_size: {intermediate_size}
  num_attention_heads: {num_attention_heads}
  num_query_groups: {num_key_value_heads}
  kv_channels: {head_dim}
  vocab_size: {vocab_size}
  should_pad_vocab: false
  seq_length: 4096
  normalization: RMSNorm
  layernorm_zero_centered_gamma: true
  layernorm_epsilon: 1.0e-06
  add_bias_linear: false
  gated_linear_unit: true
  activation_func: {{_target_: megatron.core.activations.fast_gelu, _call_: false}}
  attention_backend: {{_target_: megatron.core.transformer.enums.AttnBackend, _call_: true, _args_: [1], _name_: {backend}}}
  position_embedding_type: rope
  share_embeddings_and_output_weights: true
  hidden_dropout: 0.0
  attention_dropout: 0.0
  tensor_model_parallel_size: 1
  pipeline_model_parallel_size: 1
  context_parallel_size: 1
{own}
optimizer: {{optimizer: adam, use_distributed_optimizer: true}}
ddp: {{grad_reduce_in_fp32: true, use_distributed_optimizer: true}}
train: {{micro_batch_size: 1, global_batch_size: 8, train_iters: 10}}
dataset: {{seq_length: 4096}}
mixed_precision: bf16_mixed
"""
OWN = {
    "gemma": ("gemma_provider.GemmaModelProvider", ""),
    "exaone4": ("x.GPTModelProvider", "  qk_layernorm: true\n  transformer_layer_spec: exaone4_layer_spec"),
    "gemma2": (
        "gemma2_provider.Gemma2ModelProvider",
        "  window_size: [4095, 0]\n  query_pre_attn_scalar: 224\n  attn_logit_softcapping: 50.0\n  final_logit_softcapping: 30.0",
    ),
    "gemma3_text": (
        "gemma3_provider.Gemma3ModelProvider",
        "  qk_layernorm: true\n  window_size: 512\n  interleaved_attn_pattern: [5, 1]\n  rotary_base: [10000, 1000000]\n"
        "  softmax_scale: 0.0625\n  rope_scaling_factor: 1.0\n  is_vision_language: false\n  flash_decode: false",
    ),
    "gemma3": (
        "x.gemma3_vl_provider.Gemma3VLModelProvider",
        "  qk_layernorm: true\n  window_size: 1024\n  interleaved_attn_pattern: [5, 1]\n  rotary_base: [10000, 1000000]\n"
        "  softmax_scale: 0.0625\n  rope_scaling_factor: 8.0\n  is_vision_language: true\n  flash_decode: false\n"
        "  mm_tokens_per_image: 256\n  image_token_id: 262144\n"
        "  vision_projector_config: {input_size: 1152, hidden_size: 2560}\n"
        "  vision_config: {hidden_size: 1152, intermediate_size: 4304, num_hidden_layers: 27, num_attention_heads: 16, "
        "image_size: 896, patch_size: 14, vision_use_head: false}",
    ),
    "gemma4_text": (
        "gemma4_provider.Gemma4ModelProvider",
        "  qk_layernorm: true\n  window_size: 1024\n  interleaved_attn_pattern: [5, 1]\n  rotary_base: [10000, 1000000]\n"
        "  softmax_scale: 1.0\n  global_head_dim: 512\n  num_global_key_value_heads: 2\n  global_rotary_percent: 0.25\n"
        "  attention_k_eq_v: true\n  final_logit_softcapping: 30.0\n  num_moe_experts: 128\n  moe_router_topk: 8\n"
        "  moe_ffn_hidden_size: 704\n  moe_shared_expert_intermediate_size: 2112\n  moe_router_pre_softmax: true\n"
        "  moe_router_dtype: fp32\n  moe_grouped_gemm: true\n  moe_token_dispatcher_type: alltoall\n  moe_layer_freq: 1",
    ),
}
"""By model_type: the class of the provider, and the fields that others do not have."""


def gemma_container(config: Mapping[str, Any]) -> str:
    """The YAML of a container for the fields of a config.json."""
    fields = config.get("text_config", config)
    name, own = OWN[fields["model_type"]]
    backend = "auto" if fields["model_type"] == "gemma3" else "flash"
    return CONTAINER.format(name=name, own=own, backend=backend, **fields)
