"""What training scripts of other models than GPT read otherwise than that of GPT, and what is not modelled for them.

Sources: pretrain_bert.py, pretrain_t5.py, and `validate_args` of megatron/training/arguments.py (0.16.1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from analyzer.errors import UnsupportedError
from analyzer.launch.derive.reading import option, positive, required, since, switched_on, text
from analyzer.launch.entry_script import family_of
from analyzer.launch.options.script_options import script_of
from analyzer.specs import FAMILY_NAMES, Family, Implementation, ModelSpec

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.launch.derive.launch_input import LaunchInput
    from analyzer.launch.derive.model.shape import Shape
    from analyzer.specs import ParallelSpec

_MULTIMODAL: Final = "multimodal/train"
_LEAVE_OUT: Final = "leave it out to analyze the launch without it"
_NOT_MODELLED: Final = (
    "num_experts", "mtp_num_layers", "multi_latent_attention", "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json", "window_size", "fp8", "fp4", "use_megatron_fsdp", "use_custom_fsdp",
    "use_torch_fsdp2",
    "enable_cuda_graph", "external_cuda_graph", "fine_grained_activation_offloading", "cpu_offloading_num_layers",
    "tp_comm_overlap", "defer_embedding_wgrad_compute", "fp32_residual_connection", "swiglu", "squared_relu", "quick_geglu",
    "group_query_attention", "qk_layernorm", "use_legacy_models", "apply_residual_connection_post_layernorm",
)  # fmt: skip
"""Dests that BERT and T5 would need formulas or comparisons of their own for."""
_NOT_MODELLED_WITH_IMAGES: Final = (
    *(
        dest
        for dest in _NOT_MODELLED
        if dest not in ("swiglu", "squared_relu", "quick_geglu", "group_query_attention", "qk_layernorm")
    ),
    "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "experimental_attention_variant",
    "attention_output_gate", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
    "optimizer_cpu_offload", "delay_wgrad_compute", "spec", "distribute_saved_activations",
)  # fmt: skip
"""The same for vision-language models."""


def _script_layers(arguments: Arguments) -> Implementation:
    """pretrain_bert.py has layers of Transformer Engine unless `--spec local`, whatever `--transformer-impl` is."""
    return "local" if _spec(arguments) == "local" else "transformer_engine"


def _chosen_layers(arguments: Arguments) -> Implementation:
    return "local" if text(arguments, "transformer_impl", "transformer_engine") == "local" else "transformer_engine"


def _layers_with_images(arguments: Arguments) -> Implementation:
    """examples/multimodal/train.py has layers of Transformer Engine with `--use-te` only, whatever `--transformer-impl` is."""
    if script_of(arguments.entry) != _MULTIMODAL:
        return _chosen_layers(arguments)
    return "transformer_engine" if switched_on(arguments, "use_te") else "local"


def _spec(arguments: Arguments) -> str:
    value = arguments.get("spec")
    words = value if isinstance(value, list | tuple) else () if value is None else (value,)
    return " ".join(map(str, words))


def _bert(launch: LaunchInput, model: ModelSpec) -> ModelSpec:
    """BertModel as pretrain_bert.py builds it: its positions are learned, whatever the option says."""
    arguments = launch.arguments
    if _spec(arguments) not in ("", "local"):
        raise UnsupportedError("--spec", f"{_spec(arguments)} is no layer of Megatron's own BERT", "use local, or leave it out")
    if model.position_embedding != "learned_absolute":
        launch.warn(
            f"{option(arguments, 'position_embedding_type')}: pretrain_bert.py does not read it, and BERT learns its positions."
        )
    return replace(
        model, position_embedding="learned_absolute", rope_fusion=False, binary_head=arguments.get("bert_binary_head") is not False
    )


def _t5(launch: LaunchInput, model: ModelSpec) -> ModelSpec:
    """T5Model as pretrain_t5.py builds it: the decoder has as many layers as the encoder."""
    arguments = launch.arguments
    layers = positive(arguments, "decoder_num_layers")
    if layers is not None and layers != model.num_layers:
        launch.warn(
            f"{option(arguments, 'decoder_num_layers')} {layers} has no effect: the decoder has {model.num_layers} layers like the "
            "encoder, because pretrain_t5.py builds both with the number of layers of the encoder."
        )
    if model.position_embedding != "learned_absolute":
        named = option(arguments, "position_embedding_type")
        raise UnsupportedError(
            f"{named} {model.position_embedding}", "T5 is modelled with learned positions only", "use learned_absolute"
        )
    recomputed = arguments.get("recompute_modules")
    if isinstance(recomputed, list | tuple) and "layernorm" in recomputed:
        raise UnsupportedError(f"{option(arguments, 'recompute_modules')} layernorm", "is not modelled for T5", "leave it out")
    return replace(model, decoder_seq_length=required(arguments, "decoder_seq_length", "128"))


def _llava_shape(launch: LaunchInput, shape: Shape, parallel: ParallelSpec) -> Shape:
    if script_of(launch.arguments.entry) == _MULTIMODAL:
        from analyzer.launch.derive.model.multimodal import multimodal_shape

        return multimodal_shape(launch, shape, parallel)
    from analyzer.launch.derive.model.vision import vlm_shape

    return vlm_shape(launch, shape, parallel)


def _llava(launch: LaunchInput, model: ModelSpec, parallel: ParallelSpec, length: int) -> ModelSpec:
    if script_of(launch.arguments.entry) == _MULTIMODAL:
        from analyzer.launch.derive.model.multimodal import multimodal_model

        return multimodal_model(launch, model, parallel, length=length)
    from analyzer.launch.derive.model.vision import vlm_model

    return vlm_model(launch, model, parallel, length=length)


def _mimo_shape(launch: LaunchInput, shape: Shape, parallel: ParallelSpec) -> Shape:
    from analyzer.launch.derive.model.mimo import mimo_shape

    return mimo_shape(launch, shape, parallel)


def _mimo(launch: LaunchInput, model: ModelSpec, parallel: ParallelSpec, length: int) -> ModelSpec:
    from analyzer.launch.derive.model.mimo import mimo_model

    return mimo_model(launch, model, parallel, length=length)


@dataclass(frozen=True, kw_only=True)
class ScriptFacts:
    """What differs between the training scripts."""

    tokenizer: str
    """The default of `--tokenizer-type`."""
    implementation: Callable[[Arguments], Implementation] | None
    """The layers; None for those of `derive.model.gpt`."""
    complete: Callable[[LaunchInput, ModelSpec, ParallelSpec, int], ModelSpec]
    """Adds the fields of the family to the model of the common options, from its layout and the length of a sequence.

    Raises for what the family does not support.
    """
    shape: Callable[[LaunchInput, Shape, ParallelSpec], Shape] = lambda _, shape, __: shape
    """The sizes that the script derives from those of the options."""
    vocabulary: int | None = None
    """Rows of the embedding, whatever the tokenizer is."""
    not_modelled: tuple[str, ...] = _NOT_MODELLED
    layer_norm_only: bool = True
    first_release: str = "0.3"
    """The first release that is modelled. Ranks of their own for the encoder of T5, before 0.14, are refused as options."""
    local_attention: bool = False
    """Whether `--attention-backend local` is accepted (with `--spec local`)."""


_WORD_PIECES: Final = "BertWordPieceLowerCase"
_FACTS: Final[dict[Family, ScriptFacts]] = {
    "gpt": ScriptFacts(tokenizer="GPT2BPETokenizer", implementation=None, complete=lambda _, model, __, ___: model),
    "bert": ScriptFacts(
        tokenizer=_WORD_PIECES,
        implementation=_script_layers,
        complete=lambda launch, model, _, __: _bert(launch, model),
        first_release="0.8",
        local_attention=True,
    ),
    "t5": ScriptFacts(
        tokenizer=_WORD_PIECES,
        implementation=_chosen_layers,
        complete=lambda launch, model, _, __: _t5(launch, model),
        first_release="0.12",
    ),
    "llava": ScriptFacts(
        tokenizer="GPT2BPETokenizer",
        implementation=_layers_with_images,
        complete=_llava,
        shape=_llava_shape,
        not_modelled=_NOT_MODELLED_WITH_IMAGES,
        layer_norm_only=False,
        first_release="0.12",
    ),
    "mimo": ScriptFacts(
        tokenizer="GPT2BPETokenizer",
        implementation=lambda _: "transformer_engine",
        complete=_mimo,
        shape=_mimo_shape,
        vocabulary=32256,
        not_modelled=_NOT_MODELLED_WITH_IMAGES,
        layer_norm_only=False,
        first_release="0.14",
    ),
}


def facts_of(arguments: Arguments) -> ScriptFacts:
    """The facts of the training script of a launch."""
    return _FACTS[family_of(arguments.entry)]


def check_family(launch: LaunchInput) -> None:
    """Raises for options of a launch that are not supported for the family of its model; nothing is refused for a GPT."""
    arguments = launch.arguments
    family = family_of(arguments.entry)
    if family == "gpt":
        return
    facts, title = _FACTS[family], FAMILY_NAMES[family]
    if not since(arguments, facts.first_release):
        remedy = f"use --info-megatron {facts.first_release} or a later release"
        raise UnsupportedError(title, f"is not modelled for Megatron-LM {arguments.release}", remedy)
    for dest in facts.not_modelled:
        if dest in arguments.given and arguments.get(dest) not in (None, False, 0):
            raise UnsupportedError(option(arguments, dest), f"is not modelled for {title}", _LEAVE_OUT)
    if arguments.get("cuda_graph_impl") not in (None, "none"):
        raise UnsupportedError(option(arguments, "cuda_graph_impl"), f"is not modelled for {title}", _LEAVE_OUT)
    if facts.layer_norm_only and text(arguments, "normalization", "LayerNorm") != "LayerNorm":
        raise UnsupportedError(option(arguments, "normalization"), f"{title} is modelled with LayerNorm only", "use LayerNorm")


def shape_of_family(launch: LaunchInput, shape: Shape, parallel: ParallelSpec) -> Shape:
    """The sizes that the training script derives from those of the options."""
    return facts_of(launch.arguments).shape(launch, shape, parallel)


def complete_family(launch: LaunchInput, model: ModelSpec, parallel: ParallelSpec, *, seq_length: int) -> ModelSpec:
    """The model with the fields of its family. `seq_length`: of `shape_of_family`."""
    completed = facts_of(launch.arguments).complete(launch, model, parallel, seq_length)
    if completed.vision is not None:
        launch.assume(
            "Model FLOPs and MFU count the language model with gradients of all its weights: not the vision encoder, and frozen "
            "weights as trained ones. The time counts what runs."
        )
    return replace(completed, family=family_of(launch.arguments.entry))


def local_attention(arguments: Arguments) -> bool:
    """Whether the launch may name Megatron's own attention (`validate_args`: only with `--spec local`)."""
    return facts_of(arguments).local_attention and _spec(arguments) == "local"
