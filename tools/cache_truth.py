"""Writes tests/data/truth/kv_cache.json: bytes that Hugging Face transformers and megatron-core allocate for caches and parameters.

    python tools/cache_truth.py > tests/data/truth/kv_cache.json

Both allocate on PyTorch's meta device, so no memory is needed. Hugging Face: the parameters of the model class, and `StaticCache`
as the attention of the model fills it, for a model with few layers; each kind of layer is counted as often as the model has it. It
needs torch, transformers and megatron-core.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch

from analyzer.launch.model_config.published import read_configuration

sys.modules["transformer_engine"] = None  # type: ignore[assignment]
REQUESTS, TOKENS = 8, 2304
MODELS = (
    "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B", "Qwen/Qwen2.5-7B", "Qwen/Qwen3-30B-A3B", "mistralai/Mixtral-8x7B-v0.1",
    "deepseek-ai/DeepSeek-V3", "openai/gpt-oss-20b", "facebook/opt-6.7b", "facebook/opt-30b",
)  # fmt: skip
FEW = 4
"""Layers of the model whose attention is run."""
LENGTHS = {"facebook/opt-6.7b": 2048, "facebook/opt-30b": 2048}
"""Tokens of models with fewer learned positions."""
CONTEXTS: tuple[dict[str, Any], ...] = (
    {"num_layers": 32, "kv_channels": 128, "num_attention_heads": 8, "buffer_size_gb": 10.0, "block_size_tokens": 256, "tp": 2},
    {"num_layers": 80, "kv_channels": 128, "num_attention_heads": 8, "buffer_size_gb": 40.0, "block_size_tokens": 256, "tp": 8},
    {"num_layers": 32, "kv_channels": 128, "num_attention_heads": 32, "buffer_size_gb": 7.5, "block_size_tokens": 128, "tp": 1},
    {
        "num_layers": 61,
        "kv_channels": 128,
        "num_attention_heads": 128,
        "buffer_size_gb": 20.0,
        "block_size_tokens": 64,
        "tp": 8,
        "cache_mla_latent": True,
        "kv_lora_rank": 512,
        "qk_pos_emb_head_dim": 64,
    },
)


def hugging_face(name: str) -> dict[str, Any]:
    """Parameters of a model, and bytes of its cache for REQUESTS requests, in 16 bit."""
    transformers: Any = import_module("transformers")
    values = dict(read_configuration(name, folder=Path()).values)
    kind, tokens = values.pop("model_type"), LENGTHS.get(name, TOKENS)
    config = transformers.AutoConfig.for_model(kind, **values)
    with torch.device("meta"):
        whole = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    few = transformers.AutoConfig.for_model(kind, **{**values, "num_hidden_layers": FEW, "num_experts": 4, "num_local_experts": 4})
    few._attn_implementation = "eager"
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(few, dtype=torch.bfloat16)
        cache = transformers.StaticCache(few, max_cache_len=tokens)
        for layer in model.base_model.layers if hasattr(model.base_model, "layers") else model.base_model.decoder.layers:
            _fill(layer.self_attn, cache, few)
    found: dict[str, int] = {}
    for layer in cache.layers:
        found[type(layer).__name__] = layer.keys.nbytes + layer.values.nbytes
    whole_cache = transformers.StaticCache(config, max_cache_len=tokens)
    kinds = [type(layer).__name__ for layer in whole_cache.layers]
    return {
        "model": name,
        "requests": REQUESTS,
        "tokens": tokens,
        "parameters": sum(each.numel() for each in whole.parameters()),
        "cache_bytes": sum(found[kind] for kind in kinds),
        "layers": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
    }


def _fill(attention: torch.nn.Module, cache: Any, config: Any) -> None:
    """Runs the attention of a layer on one token of REQUESTS requests, so that the cache allocates its tensors."""
    hidden = torch.empty(REQUESTS, 1, config.hidden_size, dtype=torch.bfloat16)
    width = getattr(config, "qk_rope_head_dim", None) or getattr(config, "head_dim", None)
    width = width or config.hidden_size // config.num_attention_heads
    angles = (torch.empty(REQUESTS, 1, width // (2 if config.model_type == "gpt_oss" else 1), dtype=torch.bfloat16),) * 2
    attention(hidden_states=hidden, position_embeddings=angles, attention_mask=None, past_key_values=cache)


def megatron(settings: dict[str, Any]) -> dict[str, Any]:
    """Bytes of the buffer of a `DynamicInferenceContext`."""
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext

    torch.cuda.current_device = lambda: torch.device("meta")  # type: ignore[assignment,return-value]
    tensor = settings["tp"]
    context = DynamicInferenceContext(
        params_dtype=torch.bfloat16,
        max_sequence_length=2560,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=1,
        **{name: value for name, value in settings.items() if name != "tp"},
    )
    return {**settings, "cache_bytes": context.memory_buffer.nbytes, "blocks": context.block_allocator.total_count}


def main() -> None:
    """Prints the document."""
    versions = {name: metadata.version(name) for name in ("transformers", "megatron-core", "torch")}
    document = {
        "source": "tools/cache_truth.py: model classes and StaticCache of Hugging Face transformers, DynamicInferenceContext of "
        "megatron-core, both on PyTorch's meta device",
        "versions": versions,
        "hugging_face": [hugging_face(name) for name in MODELS],
        "megatron_dynamic": [megatron(settings) for settings in CONTEXTS],
    }
    json.dump(document, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
