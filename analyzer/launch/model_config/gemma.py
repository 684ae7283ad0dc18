"""Gemma 2, 3 (text) and 4 (with experts): from a Hugging Face configuration to options of Megatron-LM.

Their norms after attention and FFN, the scaling of the embedding, and the rotary positions of layers with a window are what
Megatron-Bridge adds to Megatron-LM (`ModelParts.variant`). Source of the fields and modules: src/transformers/models/gemma2,
gemma3 and gemma4 of transformers 5.24.0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from analyzer.launch.model_config.common import (
    NO_BIASES,
    QK_NORMS,
    MegatronModel,
    Option,
    llama_model,
    rms_norm,
    window,
)
from analyzer.launch.model_config.configuration import GELU, Configuration
from analyzer.launch.model_config.dense import with_head_size
from analyzer.launch.model_config.experts import Experts
from analyzer.specs.attention import GlobalHeads
from analyzer.specs.vision_part import ModelParts, Variant


def gemma2(config: Configuration) -> MegatronModel:
    """Gemma 2: windows in every second layer, from the first one on."""
    return _gemma(config, "Gemma 2", _windowed(config, every=2), normed=[], heads=config.integer("num_key_value_heads", 4))


def gemma3(config: Configuration) -> MegatronModel:
    """Gemma 3: norms of q and k in each head, and windows in five of six layers."""
    if config.flag("use_bidirectional_attention", False):
        raise config.not_expressible("bidirectional attention")
    for field in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(field):
            raise config.not_expressible(f"a soft cap ({field})")
    every = config.integer("sliding_window_pattern", 6)
    return _gemma(
        config, "Gemma 3", _windowed(config, every=every), normed=[QK_NORMS], heads=config.integer("num_key_value_heads", 4)
    )


def with_images(model: MegatronModel) -> MegatronModel:
    """Gemma 3 with images: its attention biases contain the windows, so that the kernel reads all pairs of tokens."""
    options = tuple(option for option in model.options if not option[0].startswith("--window-"))
    return replace(model, options=options, parts=replace(model.parts, variant="Gemma 3 with images"))


def gemma4(config: Configuration) -> MegatronModel:
    """Gemma 4 with experts: layers without a window have heads of their own, and the dense FFN of a layer is a shared expert."""
    if not config.flag("enable_moe_block", False):
        raise config.not_expressible("embeddings in each layer, and keys and values of other layers")
    experts = Experts(
        count=config.integer("num_experts"),
        topk=config.integer("top_k_experts"),
        ffn=config.integer("moe_intermediate_size"),
        layers=(True,) * config.integer("num_hidden_layers"),
        shared=config.integer("intermediate_size"),
    )
    values = {"rope_theta": 10000, "sliding_window": 512, **config.values, "rope_parameters": {}}
    if Configuration(values, config.name).integer("sliding_window") >= config.integer("max_position_embeddings", 131072):
        raise config.not_expressible("a window as long as its longest sequence")
    windowed = (*_windowed(config, every=6)[:-1], False)  # the last layer has no window
    model = _gemma(
        Configuration(values, config.name),
        "Gemma 4",
        windowed,
        normed=[QK_NORMS, *experts.options(), ("--moe-router-pre-softmax",), ("--moe-router-dtype", "fp32")],
        heads=config.integer("num_key_value_heads", 4),
        centered=False,
    )
    groups = config.integer("num_global_key_value_heads", config.integer("num_key_value_heads", 4))
    heads = GlobalHeads(head_dim=config.integer("global_head_dim", 512), groups=groups)
    return replace(model, parts=replace(model.parts, global_heads=heads))


def _windowed(config: Configuration, *, every: int) -> tuple[bool, ...]:
    """The layers with a window: those that layer_types names, or all but each one whose number is a multiple of `every`."""
    count = config.integer("num_hidden_layers")
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == count:
        return tuple(kind == "sliding_attention" for kind in kinds)
    return tuple(layer % every != 0 for layer in range(1, count + 1))


def _gemma(
    config: Configuration,
    variant: Variant,
    windowed: tuple[bool, ...],
    *,
    normed: Iterable[Option],
    heads: int,
    centered: bool = True,
) -> MegatronModel:
    activation = config.activation("hidden_activation", default="gelu_pytorch_tanh")
    gate = "GELU" if activation in GELU else activation
    note = f"{config.name}: --quick-geglu stands for its gate with {gate}; the tensors are equal."
    values = {**config.values, "num_key_value_heads": heads}
    model = llama_model(
        with_head_size(Configuration(values, config.name), 256),
        window(config, windowed, size=config.optional("sliding_window") or 4096),
        activation=([("--quick-geglu",)], (note,)),
        normed=[*normed, *rms_norm(config), *([("--apply-layernorm-1p",)] if centered else [])],
        linear=NO_BIASES,
        tied=True,
    )
    return replace(model, parts=ModelParts(variant=variant))
