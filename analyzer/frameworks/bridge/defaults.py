"""What a container of Megatron-Bridge does not say: fields that it leaves out, and the release of megatron-core that wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from analyzer.frameworks.containers import TARGET, Tree
from analyzer.launch.options.choose_release import LaterRelease

_OF_GPT: Final[Tree] = {
    "apply_rope_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "cross_entropy_loss_fusion": True,
}
_OF_HYBRID: Final[Tree] = {"bias_activation_fusion": False, "cross_entropy_loss_fusion": True}
_DEFAULTS: Final[Mapping[str, Tree]] = {
    "GPTModelProvider": _OF_GPT,
    "GPTModelConfig": _OF_GPT,
    "BridgeGPTModelConfig": _OF_GPT,
    "MambaModelProvider": _OF_HYBRID,
    "HybridModelProvider": _OF_HYBRID,
    **dict.fromkeys(("NemotronVLModelProvider", "NemotronOmniModelProvider", "NemotronOmniLlavaModelProvider"), _OF_HYBRID),
}
"""By class: fields whose default differs from that of Megatron-LM's option and changes memory or time (models/gpt_provider.py,
models/hybrid/hybrid_provider.py, and `TransformerConfig` of megatron-core). Other classes set further fields."""
_SINCE: Final[Mapping[str, tuple[str, ...]]] = {
    "0.19.0": ("flash_attention_version", "mtp_detach_heads", "use_grouped_gemm_for_shared_expert", "activation_offload_fraction"),
    "0.18.2": ("fp8_output_proj", "mlp_chunks_for_training", "moe_paged_stash", "use_grouped_gemm_for_dense_mlp"),
    "0.17.1": ("use_mup", "fused_residual_rmsnorm", "mup_width_mult"),
}
"""By release, the newest first: fields that `TransformerConfig` has since it."""


def with_defaults(model: Tree) -> Tree:
    """The fields of a model with the defaults of those that its container leaves out."""
    return {**_DEFAULTS.get(str(model.get(TARGET, "")).rpartition(".")[2], {}), **model}


def release_of_fields(model: Tree) -> LaterRelease | None:
    """The release of megatron-core that has the fields of a model; None if earlier ones than 0.17 have them, too."""
    for release, names in _SINCE.items():
        name = next((each for each in names if each in model), None)
        if name is not None:
            return LaterRelease(release, f"model.{name} exists since core {release.rpartition('.')[0]}")
    return None
