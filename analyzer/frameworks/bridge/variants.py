"""Models with modules of Megatron-Bridge in a ConfigContainer: which one it is, and its fields as those of other models.

Sources: models/gemma/gemma_provider.py, gemma2_provider.py, gemma3_provider.py and gemma4_provider.py,
models/gemma_vl/gemma3_vl_provider.py and gemma4_vl_provider.py, and models/exaone/exaone4/exaone4_provider.py of Megatron-Bridge,
August 2026.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from analyzer.errors import InputError
from analyzer.frameworks.bridge.model_fields import number
from analyzer.frameworks.containers import TARGET, Tree
from analyzer.launch.derive.model.variants import BRIDGE, check_context_parallelism
from analyzer.specs.attention import GlobalHeads
from analyzer.specs.vision_part import ModelParts, Variant
from analyzer.units import natural

VARIANTS: Final[Mapping[str, Variant]] = {
    "GemmaModelProvider": "Gemma",
    "Gemma2ModelProvider": "Gemma 2",
    "Gemma3ModelProvider": "Gemma 3",
    "Gemma3VLModelProvider": "Gemma 3 with images",
    "Gemma4ModelProvider": "Gemma 4",
    "Gemma4VLModelProvider": "Gemma 4",
}
"""By the class of the provider."""
_BY_LAYERS: Final[Mapping[str, Variant]] = {"exaone4_layer_spec": "EXAONE 4"}
"""By the function in transformer_layer_spec, of models that have no provider of their own."""
_LAYERS: Final = "transformer_layer_spec"
_OF_MEGATRON: Final = frozenset({
    "default_layer_spec", "transformer_engine_layer_spec", "transformer_engine_full_layer_spec", "get_gpt_decoder_block_spec",
    "get_gpt_layer_with_transformer_engine_spec", "get_transformer_block_with_experimental_attention_variant_spec",
    "gemma_layer_spec", "gemma2_layer_spec", "gemma3_layer_spec", "gemma4_block_spec", "ministral_layer_spec", "olmoe_layer_spec",
    "get_llama4_layer_spec", "minimax_m2_layer_spec", "_ernie45_decoder_block_spec",
})  # fmt: skip
"""Other functions whose layers are those of Megatron-LM, or that the provider stands for."""
_READ: Final = (
    "interleaved_attn_pattern", "attn_logit_softcapping", "final_logit_softcapping", "global_head_dim", "attention_k_eq_v",
    "num_global_key_value_heads", "global_rotary_percent",
)  # fmt: skip
"""Fields that are read here, or that the variant counts."""


class Read(NamedTuple):
    """What options do not say of the model, and its fields."""

    parts: ModelParts
    model: Tree
    unknown: tuple[str, ...] = ()
    """Settings whose effect on memory is not known."""


def read_variant(model: Tree) -> Read:
    """The fields with the windows as Megatron-LM has them. Raises InputError for windows of another form."""
    layers = model.get(_LAYERS)
    variant = VARIANTS.get(str(model.get(TARGET, "")).rpartition(".")[2]) or _BY_LAYERS.get(str(layers))
    if variant is None:
        other = isinstance(layers, str) and layers not in _OF_MEGATRON
        return Read(ModelParts(builder=BRIDGE), model, (f"model.{_LAYERS}={layers}",) if other else ())
    fields = {name: value for name, value in model.items() if name not in _READ}
    context = natural(str(model.get("context_parallel_size"))) or 1
    check_context_parallelism(variant, context, option="model.context_parallel_size")
    if variant == "Gemma 2":
        # every second layer, from the first one on (`Gemma2DotProductAttention`)
        fields |= {"window_attn_skip_freq": 2}
    if variant in {"Gemma 3", "Gemma 4"}:
        size = natural(str(model.get("window_size")))
        if not size:
            fault = f"{model.get('window_size')!r} is not the number of tokens of a window"
            raise InputError("model.window_size", fault, "write model.window_size=512, for example")
        fields |= {"window_size": [size - 1, 0], "window_attn_skip_freq": _layers_with_window(model)}
    if variant == "Gemma 3 with images":
        # the biases have the windows, and the kernel reads all pairs (`Gemma3TEDotProductAttention`)
        fields.pop("window_size", None)
    return Read(
        ModelParts(variant=variant, builder=BRIDGE, global_heads=_global_heads(model) if variant == "Gemma 4" else None), fields
    )


def _global_heads(model: Tree) -> GlobalHeads:
    """The heads of layers without a window (`Gemma4SelfAttention`). Their projection has rows of values also if it ties these."""
    return GlobalHeads(head_dim=number(model, "global_head_dim", 512), groups=number(model, "num_global_key_value_heads", 2))


def check_packing(parts: ModelParts, *, packed: bool) -> None:
    """Raises InputError for packed sequences with Gemma 2, which `Gemma2DotProductAttention` refuses."""
    if packed and parts.variant == "Gemma 2":
        fault = "Megatron-Bridge refuses packed sequences with the attention of Gemma 2"
        raise InputError("dataset.offline_packing_specs", fault, "leave it out")


def _layers_with_window(model: Tree) -> int | list[int]:
    """The period of the layers without a window, or a number for each layer (`_is_local_attn_layer`)."""
    pattern, count = model.get("interleaved_attn_pattern", [5, 1]), natural(str(model.get("num_layers"))) or 0
    if isinstance(pattern, list | tuple) and pattern and all(isinstance(each, str) for each in pattern):
        return [int(each == "sliding_attention") for each in pattern]
    numbers = [natural(str(each)) or 0 for each in pattern] if isinstance(pattern, list | tuple) else []
    if len(numbers) != 2 or not sum(numbers):
        fault = f"{pattern!r} is no pair of numbers of layers"
        raise InputError("model.interleaved_attn_pattern", fault, "write model.interleaved_attn_pattern=[5,1], for example")
    local, period = numbers[0], sum(numbers)
    return period if numbers[1] == 1 else [int(layer % period < local) for layer in range(count)]
