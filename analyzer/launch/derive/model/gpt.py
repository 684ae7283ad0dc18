"""The GPT model: its layers, positions, activation, attention kernels and loss.

Megatron: `validate_args`, `core_transformer_config_from_args` (megatron/training/arguments.py) and
`TransformerConfig.__post_init__`, 0.16.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal, TypedDict, cast

from analyzer.errors import InputError
from analyzer.launch.derive.model.attention_backend import (
    AttentionNeeds,
    attention_in_mxfp8,
    check_switches,
    choose_backend,
    switched_off,
)
from analyzer.launch.derive.model.families import facts_of, local_attention
from analyzer.launch.derive.model.linear_attention import linear_attention_spec, output_gate
from analyzer.launch.derive.model.mla import mla_spec
from analyzer.launch.derive.model.mtp import mtp_layers
from analyzer.launch.derive.model.sparse_attention import sparse_attention_spec
from analyzer.launch.derive.model.window import read_window, softmax_type
from analyzer.launch.derive.reading import RELEASE_2023, option, positive, share, since, switched_on, text
from analyzer.launch.software import software_in
from analyzer.specs import Activation, AttentionBackend, CrossEntropy, Implementation, MlaSpec, ModelSpec, ParallelSpec
from analyzer.specs.release_changes import core_behavior

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.launch.derive.launch_input import LaunchInput
    from analyzer.launch.derive.model.shape import Shape
    from analyzer.launch.tokenizer.vocabulary import Vocabulary

_POSITIONS: Final = ("learned_absolute", "rope", "yarn", "none")
"""yarn (from core 0.19 on) is rope with other frequencies."""


def model_spec(
    launch: LaunchInput, *, shape: Shape, vocabulary: Vocabulary, parallel: ParallelSpec, half_precision: bool
) -> ModelSpec:
    """The model without experts and MTP layers. Raises InputError for options that contradict each other."""
    arguments, environ = launch.arguments, launch.environ
    implementation = _implementation(launch)
    mla = mla_spec(arguments, parallel=parallel)
    position = _position(arguments)
    activation = _activation(arguments)
    bias = not _is_off(arguments, "add_bias_linear")
    scaling = switched_on(arguments, "apply_query_key_layer_scaling")
    needs = _attention_needs(launch, shape, mla, parallel, implementation=implementation, half_precision=half_precision)
    layers = shape.num_layers + (mtp_layers(arguments) if since(arguments, "0.16") else 0)
    attention = _attention_kernels(launch, needs, layers=layers, implementation=implementation)
    model = ModelSpec(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.kv_channels,
        vocab_size=vocabulary.size,
        padded_vocab_size=vocabulary.padded,
        max_position_embeddings=shape.max_position_embeddings,
        position_embedding=position,
        yarn_positions=_yarn_positions(arguments),
        rotary_percent=share(arguments, "rotary_percent", 1.0, zero=False),
        normalization=cast(Literal["LayerNorm", "RMSNorm"], text(arguments, "normalization", "LayerNorm")),
        activation=activation,
        bias_linear=bias,
        bias_qkv=bias or switched_on(arguments, "add_qkv_bias"),
        qk_layernorm=switched_on(arguments, "qk_layernorm"),
        tied_embeddings=not switched_on(arguments, "untie_embeddings_and_output_weights"),
        hidden_dropout=share(arguments, "hidden_dropout", 0.1, zero=True),
        attention_dropout=share(arguments, "attention_dropout", 0.1, zero=True),
        attention_softmax_in_fp32=switched_on(arguments, "attention_softmax_in_fp32") or scaling,
        apply_query_key_layer_scaling=scaling,
        apply_residual_connection_post_layernorm=switched_on(arguments, "apply_residual_connection_post_layernorm"),
        fp32_residual_connection=switched_on(arguments, "fp32_residual_connection"),
        implementation=implementation,
        softmax_type=softmax_type(arguments, implementation=implementation),
        activation_clamped=arguments.get("activation_func_clamp_value") is not None,
        glu_offset=implementation != "legacy" and core_behavior(arguments.release).glu_offset,
        cross_entropy=_cross_entropy(arguments, implementation=implementation),
        fp16_lm_cross_entropy=switched_on(arguments, "fp16_lm_cross_entropy"),
        mla=mla,
        linear_attention=linear_attention_spec(arguments, num_layers=shape.num_layers),
        sparse_attention=sparse_attention_spec(arguments),
        output_gate=output_gate(arguments),
        **_fusions(arguments, position, activation, bias=bias, implementation=implementation),
        **attention,
    )
    _assume_local_norms(launch, implementation=implementation)
    _check_layer_scaling(launch, scaling, implementation=implementation, environ=environ)
    return model


class _FusionFields(TypedDict):
    """The fields of `ModelSpec` about fused kernels of layers."""

    rope_fusion: bool
    bias_activation_fusion: bool
    fused_squared_relu: bool
    bias_dropout_fusion: bool
    masked_softmax_fusion: bool


def _fusions(
    arguments: Arguments, position: str, activation: Activation, *, bias: bool, implementation: Implementation
) -> _FusionFields:
    """Which kernels of layers are fused."""
    return {
        "rope_fusion": position == "rope" and implementation != "legacy" and _is_fused_since_0_5(arguments, "apply_rope_fusion"),
        "bias_activation_fusion": _bias_activation_fusion(
            arguments, activation=activation, bias=bias, implementation=implementation
        ),
        "fused_squared_relu": activation == "squared_relu" and switched_on(arguments, "use_fused_weighted_squared_relu"),
        "bias_dropout_fusion": not _is_off(arguments, "bias_dropout_fusion"),
        "masked_softmax_fusion": not _is_off(arguments, "masked_softmax_fusion"),
    }


class _AttentionFields(TypedDict):
    """The fields of `ModelSpec` about windows and attention kernels."""

    window: tuple[int, int] | None
    windowed: tuple[bool, ...]
    attention_backend: AttentionBackend
    window_backend: AttentionBackend | None


def _attention_needs(
    launch: LaunchInput,
    shape: Shape,
    mla: MlaSpec | None,
    parallel: ParallelSpec,
    *,
    implementation: Implementation,
    half_precision: bool,
) -> AttentionNeeds:
    """What attention kernels must support, without a window."""
    arguments = launch.arguments
    _check_exchanged_heads(arguments, shape, mla, parallel)
    return AttentionNeeds(
        half_precision=half_precision,
        head_dim=mla.query_head_dim if mla else shape.kv_channels,
        value_head_dim=mla.v_head_dim if mla else None,
        context=parallel.context,
        deterministic=switched_on(arguments, "deterministic_mode") or launch.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0",
        software=software_in(arguments),
        max_logit=switched_on(arguments, "log_max_attention_logit"),
        sinks=softmax_type(arguments, implementation=implementation) != "vanilla",
        dropout=share(arguments, "attention_dropout", 0.1, zero=True) > 0,
        cp_comm_type=parallel.cp_comm_type,
        in_fp8=attention_in_mxfp8(arguments),
    )


def _check_exchanged_heads(arguments: Arguments, shape: Shape, mla: MlaSpec | None, parallel: ParallelSpec) -> None:
    """Raises InputError if ranks that exchange heads would not get the same number of heads."""
    ranks = {"a2a": parallel.context, "a2a+p2p": parallel.cp_inner_size}.get(parallel.cp_comm_type, 1)
    groups = shape.num_attention_heads if mla else shape.num_query_groups
    for name, heads in (("query heads", shape.num_attention_heads), ("heads of keys and values", groups)):
        on_rank = max(1, heads // parallel.tensor)
        if on_rank % ranks:
            raise InputError(
                option(arguments, "cp_comm_type"),
                f"{parallel.cp_comm_type} divides {on_rank} {name} of a tensor-parallel rank over {ranks} context-parallel ranks",
                "use p2p or all_gather, or a smaller tensor or context size",
            )


def _attention_kernels(
    launch: LaunchInput, needs: AttentionNeeds, *, layers: int, implementation: Implementation
) -> _AttentionFields:
    """The window, the layers with it, and the kernels of layers without and with it."""
    window, windowed = read_window(launch.arguments, layers=layers, implementation=implementation)
    if windowed and all(windowed):
        needs = replace(needs, window=window)
    backend, sentences = _attention(launch, needs, implementation=implementation)
    launch.assume(*sentences)
    window_backend = None
    if window and any(windowed) and not all(windowed):
        of_window, sentences = _attention(launch, replace(needs, window=window), implementation=implementation)
        if of_window != backend:
            window_backend = of_window
            launch.assume(*(f"In layers with a window of {window[0]}: {each}" for each in sentences))
    return {"window": window, "windowed": windowed, "attention_backend": backend, "window_backend": window_backend}


def _assume_local_norms(launch: LaunchInput, *, implementation: Implementation) -> None:
    """RMSNorm of the local layers is torch's own (`LocalSpecProvider.layer_norm`, `WrappedTorchNorm`)."""
    if implementation == "local" and launch.arguments.get("normalization") == "RMSNorm":
        launch.warn(
            "--normalization RMSNorm of the local layers is torch's own: Megatron starts only with --no-persist-layer-norm and "
            "without --sequence-parallel; its fp32 copies are not counted, so the prediction is too low."
        )


def _is_off(arguments: Arguments, dest: str) -> bool:
    """Whether a flag that is on by default was turned off."""
    return arguments.get(dest) is False


def _is_fused_since_0_5(arguments: Arguments, dest: str) -> bool:
    """Whether a fusion that core 0.5 introduced is on, as it is by default."""
    return since(arguments, "0.5") and not _is_off(arguments, dest)


def _implementation(launch: LaunchInput) -> Implementation:
    """Layers of Transformer Engine, of Megatron core (local), or of the code before core (legacy).

    Legacy models are the default before core 0.8, which replaced `--use-mcore-models` by `--use-legacy-models`.
    """
    arguments = launch.arguments
    of_script = facts_of(arguments).implementation
    if of_script is not None:
        return of_script(arguments)
    written = text(arguments, "transformer_impl", "transformer_engine")
    by_default = not since(arguments, "0.8")
    if not switched_on(arguments, "use_mcore_models") if by_default else switched_on(arguments, "use_legacy_models"):
        if written != "transformer_engine":
            return "legacy"
        named = option(arguments, "transformer_impl")
        launch.warn(
            f"{named} transformer_engine: legacy models with layers of Transformer Engine are counted as models of Megatron core, "
            "so the prediction may be too high or too low."
        )
        return "transformer_engine"
    return "local" if written == "local" else "transformer_engine"


def _position(arguments: Arguments) -> Literal["learned_absolute", "rope", "none"]:
    """Position embeddings; other kinds are refused earlier, in `coverage.supported`."""
    rotary = switched_on(arguments, "use_rotary_position_embeddings")
    kind = "rope" if rotary else text(arguments, "position_embedding_type", "learned_absolute")
    if _is_off(arguments, "add_position_embedding") and kind not in ("rope", "yarn"):
        if arguments.release == RELEASE_2023:
            return "none"
        raise InputError(
            option(arguments, "add_position_embedding"),
            f"contradicts {kind} positions",
            "use --position-embedding-type none, or --position-embedding-type rope",
        )
    if kind not in _POSITIONS:
        raise InputError(
            option(arguments, "position_embedding_type"),
            f"{kind!r} is not a kind of position",
            f"use one of {', '.join(_POSITIONS)}",
        )
    return cast(Literal["learned_absolute", "rope", "none"], "rope" if kind == "yarn" else kind)


def _yarn_positions(arguments: Arguments) -> int | None:
    """Positions of the model before its context was extended: by default those of `YarnRotaryEmbedding`."""
    if text(arguments, "position_embedding_type", "") != "yarn":
        return None
    return positive(arguments, "yarn_original_max_position_embeddings") or 4096


def _activation(arguments: Arguments) -> Activation:
    swiglu, geglu, squared = (switched_on(arguments, dest) for dest in ("swiglu", "quick_geglu", "squared_relu"))
    if swiglu and (geglu or squared):
        raise InputError("--swiglu", f"contradicts {'--quick-geglu' if geglu else '--squared-relu'}", "keep one of the two")
    if swiglu:
        return "swiglu"
    if squared:
        return "squared_relu"
    return "quick_geglu" if geglu else "gelu"


def _bias_activation_fusion(arguments: Arguments, *, activation: Activation, bias: bool, implementation: Implementation) -> bool:
    """Whether bias and activation are one kernel. Without biases the GELU fusion is off by itself.

    The legacy models fuse GELU alone (megatron/model/transformer.py ParallelMLP).
    """
    if implementation == "legacy" and activation != "gelu":
        return False
    if activation == "swiglu":
        fused = _is_fused_since_0_5(arguments, "bias_swiglu_fusion")
    else:
        fused = bias and not _is_off(arguments, "bias_gelu_fusion")
    if fused and activation == "squared_relu" and arguments.release != RELEASE_2023:
        raise InputError("--squared-relu", "cannot be fused with the bias", "add --no-bias-gelu-fusion or --disable-bias-linear")
    if fused and switched_on(arguments, "use_te_activation_func"):
        flag = "--no-bias-swiglu-fusion" if activation == "swiglu" else "--no-bias-gelu-fusion"
        raise InputError(
            option(arguments, "use_te_activation_func"), "contradicts the fusion of bias and activation", f"add {flag}"
        )
    return fused


def check_fused_activation(model: ModelSpec) -> None:
    """Raises InputError for a quick GEGLU fused with biases outside experts, which has no kernel (`MLP.forward`)."""
    if model.activation != "quick_geglu" or not model.bias_activation_fusion:
        return
    if model.moe is None or not all(model.moe.layers) or model.moe.shared_ffn_hidden_size is not None:
        raise InputError(
            "--quick-geglu", "has a kernel fused with biases only in experts", "add --no-bias-gelu-fusion or --disable-bias-linear"
        )


def _check_layer_scaling(launch: LaunchInput, scaling: bool, *, implementation: Implementation, environ: Mapping[str, str]) -> None:
    """Transformer Engine reads the scaling from the environment, which must agree (`TEDotProductAttention`)."""
    if implementation != "transformer_engine":
        return
    value = environ.get("NVTE_APPLY_QK_LAYER_SCALING")
    if scaling and value is None:
        launch.assume(
            "NVTE_APPLY_QK_LAYER_SCALING=1 is assumed in the launch environment: --apply-query-key-layer-scaling requires it."
        )
    elif scaling != (value not in (None, "0")):
        raise InputError(
            "--apply-query-key-layer-scaling",
            f"is {'on' if scaling else 'off'} and NVTE_APPLY_QK_LAYER_SCALING is {value}",
            f"export NVTE_APPLY_QK_LAYER_SCALING={int(scaling)}",
        )


def _cross_entropy(arguments: Arguments, *, implementation: Implementation) -> CrossEntropy:
    if implementation == "legacy" or not switched_on(arguments, "cross_entropy_loss_fusion"):
        return "unfused"
    return cast(CrossEntropy, text(arguments, "cross_entropy_fusion_impl", "native"))


def _attention(
    launch: LaunchInput, needs: AttentionNeeds, *, implementation: Implementation
) -> tuple[AttentionBackend, tuple[str, ...]]:
    """The kernel of core attention, and what is assumed about it. Outside Transformer Engine the flags alone decide."""
    arguments = launch.arguments
    named = option(arguments, "attention_backend")
    requested = text(arguments, "attention_backend", "auto")
    if implementation == "legacy":
        if not switched_on(arguments, "use_flash_attn"):
            return "unfused", ()
        if not needs.half_precision:
            raise InputError(
                option(arguments, "use_flash_attn"), "flash attention supports 16 bit only", "add --bf16, or leave it out"
            )
        return "flash", ()
    if requested == "local" and local_attention(arguments):
        return "unfused", ()
    if requested == "local":
        raise InputError(
            named, "Megatron accepts local only with a --spec that is not modelled", "use --transformer-impl local, or unfused"
        )
    check_switches(requested, environ=launch.environ, option=named)
    if implementation == "local":
        if needs.context > 1:
            raise InputError(
                option(arguments, "context_parallel_size"),
                "needs the attention of Transformer Engine",
                "use --transformer-impl transformer_engine",
            )
        return "unfused", ()
    if arguments.parts.compressed is not None:  # `CompressedSparseAttention`, whose kernels are not those of Transformer Engine
        return "fused", ()
    off = switched_off(requested, environ=launch.environ)
    backend, sentence = choose_backend(requested, needs=needs, gpu=launch.gpu, option=named, off=off)
    return backend, (sentence,)
