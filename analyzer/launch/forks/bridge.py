"""Models that Megatron-Bridge builds from the configuration of a Hugging Face checkpoint, in slime and miles.

With `--megatron-to-hf-mode bridge` the provider of the bridge has the sizes of the model, and the options for the model have no
effect (`get_model_provider_func` in slime/backends/megatron_utils/model_provider.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from analyzer.launch.forks.launch_options import LaunchOptions
from analyzer.launch.model_config.published import published_model

_MODE: Final = "--megatron-to-hf-mode"
MODEL_OPTIONS: Final = frozenset({
    "--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--group-query-attention", "--num-query-groups",
    "--kv-channels", "--swiglu", "--quick-geglu", "--squared-relu", "--activation-func-clamp-value", "--glu-linear-offset",
    "--normalization", "--norm-epsilon", "--position-embedding-type", "--use-rotary-position-embeddings", "--rotary-base",
    "--rotary-percent", "--use-rope-scaling", "--rope-scaling-factor", "--disable-bias-linear", "--add-qkv-bias", "--qk-layernorm",
    "--untie-embeddings-and-output-weights", "--softmax-type", "--window-size", "--window-attn-skip-freq", "--num-experts",
    "--moe-router-topk", "--moe-layer-freq", "--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size",
    "--moe-shared-expert-gate", "--moe-router-score-function", "--moe-router-pre-softmax", "--multi-latent-attention",
    "--q-lora-rank", "--kv-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim", "--mtp-num-layers", "--vocab-size",
    "--max-position-embeddings",
})  # fmt: skip
"""Options that give the shape of the model."""


def bridge_model(given: Mapping[str, Sequence[str]], others: Mapping[str, Sequence[str]]) -> str | None:
    """The published model of `--hf-checkpoint`; None if the options of the launch give the model.

    `given` are the options that Megatron-LM lacks, `others` those that it has, both by flag with their values.
    """
    launch = LaunchOptions(given, others)
    if launch.word(_MODE) != "bridge":
        return None
    return published_model(launch.word("--hf-checkpoint") or "")


def note(model: str, others: Mapping[str, Sequence[str]]) -> str:
    """The sentence about options that the bridge replaces."""
    count = len(MODEL_OPTIONS & others.keys())
    return f"{_MODE} bridge: the model is {model}, and the {count} options for its sizes have no effect."
