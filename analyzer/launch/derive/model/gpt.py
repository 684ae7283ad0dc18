"""Kind of the model: its layers, positions, activation, attention and loss.

Megatron: `validate_args`, `core_transformer_config_from_args` (megatron/training/arguments.py) and
`TransformerConfig.__post_init__`, 0.16.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, cast

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.derive.model.attention_backend import AttentionNeeds, check_switches, choose_backend
from analyzer.launch.derive.model.window import check_window, softmax_type
from analyzer.launch.derive.reading import RELEASE_2023, option, positive, share, since, switched_on, text
from analyzer.specs import Activation, AttentionBackend, CrossEntropy, HardwareSpec, Implementation, MlaSpec, ModelSpec

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.launch.derive.model.shape import Shape
    from analyzer.launch.tokenizer.vocabulary import Vocabulary

_POSITIONS: Final = ("learned_absolute", "rope", "yarn", "none")
"""yarn (core 0.19 on) rotates as rope does, by other angles."""


def _local_norm_assumption(arguments: Arguments, *, implementation: Implementation) -> tuple[str, ...]:
    """RMSNorm of the local layers is torch's own (`LocalSpecProvider.layer_norm`, `WrappedTorchNorm`), which is bare."""
    if implementation != "local" or arguments.get("normalization") != "RMSNorm":
        return ()
    return (
        "--normalization RMSNorm of the local layers is torch's own: Megatron starts with --no-persist-layer-norm and without "
        "--sequence-parallel only; its fp32 copies are not counted, so the prediction is too low.",
    )


def check_model(
    arguments: Arguments,
    *,
    shape: Shape,
    vocabulary: Vocabulary,
    mla: MlaSpec | None,
    half_precision: bool,
    context: int,
    cp_comm_type: str,
    environ: Mapping[str, str],
    gpu: HardwareSpec,
) -> tuple[ModelSpec, tuple[str, ...]]:
    """The model without its experts, and what was taken for granted. Raises InputError for kinds that contradict."""
    implementation = _implementation(arguments)
    position = _position(arguments)
    activation = _activation(arguments)
    bias = not _is_off(arguments, "add_bias_linear")
    window, windowed = check_window(arguments, num_layers=shape.num_layers, implementation=implementation)
    needs = AttentionNeeds(
        half_precision=half_precision,
        head_dim=mla.query_head_dim if mla else shape.kv_channels,
        value_head_dim=mla.v_head_dim if mla else None,
        context=context,
        deterministic=switched_on(arguments, "deterministic_mode") or environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0",
        max_logit=switched_on(arguments, "log_max_attention_logit"),
        sinks=softmax_type(arguments, implementation=implementation) != "vanilla",
        dropout=share(arguments, "attention_dropout", 0.1, zero=True) > 0,
        cp_comm_type=cp_comm_type,
    )
    choose = partial(_attention, arguments, implementation=implementation, environ=environ, gpu=gpu)
    if windowed and all(windowed):
        needs = replace(needs, window=window)
    backend, chosen = choose(needs)
    window_backend = None
    if window and any(windowed) and not all(windowed):
        of_window, sentence = choose(replace(needs, window=window))
        if of_window != backend:
            window_backend = of_window
            chosen += tuple(f"In layers with a window of {window[0]}: {each}" for each in sentence)
    scaling = switched_on(arguments, "apply_query_key_layer_scaling")
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
        rope_fusion=position == "rope" and implementation != "legacy" and not _is_off(arguments, "apply_rope_fusion"),
        normalization=cast(Literal["LayerNorm", "RMSNorm"], text(arguments, "normalization", "LayerNorm")),
        activation=activation,
        bias_linear=bias,
        bias_qkv=bias or switched_on(arguments, "add_qkv_bias"),
        qk_layernorm=switched_on(arguments, "qk_layernorm"),
        tied_embeddings=not switched_on(arguments, "untie_embeddings_and_output_weights"),
        hidden_dropout=share(arguments, "hidden_dropout", 0.1, zero=True),
        attention_dropout=share(arguments, "attention_dropout", 0.1, zero=True),
        bias_activation_fusion=_bias_activation_fusion(arguments, activation=activation, bias=bias, implementation=implementation),
        bias_dropout_fusion=not _is_off(arguments, "bias_dropout_fusion"),
        masked_softmax_fusion=not _is_off(arguments, "masked_softmax_fusion"),
        attention_softmax_in_fp32=switched_on(arguments, "attention_softmax_in_fp32") or scaling,
        apply_query_key_layer_scaling=scaling,
        apply_residual_connection_post_layernorm=switched_on(arguments, "apply_residual_connection_post_layernorm"),
        fp32_residual_connection=switched_on(arguments, "fp32_residual_connection"),
        implementation=implementation,
        attention_backend=backend,
        softmax_type=softmax_type(arguments, implementation=implementation),
        window=window,
        windowed=windowed,
        window_backend=window_backend,
        activation_clamped=arguments.get("activation_func_clamp_value") is not None,
        glu_offset=implementation != "legacy" and since(arguments, "0.15"),
        cross_entropy=_cross_entropy(arguments, implementation=implementation),
        fp16_lm_cross_entropy=switched_on(arguments, "fp16_lm_cross_entropy"),
        mla=mla,
    )
    chosen += _local_norm_assumption(arguments, implementation=implementation)
    return model, chosen + _layer_scaling_assumption(scaling, implementation=implementation, environ=environ)


def _is_off(arguments: Arguments, dest: str) -> bool:
    """Whether a flag that is on by default was turned off."""
    return arguments.get(dest) is False


def _implementation(arguments: Arguments) -> Implementation:
    """Whose layers: Transformer Engine's, Megatron core's own, or those of the code before core."""
    written = text(arguments, "transformer_impl", "transformer_engine")
    if arguments.release == RELEASE_2023 or switched_on(arguments, "use_legacy_models"):
        if written == "transformer_engine":
            named = option(arguments, "transformer_impl" if arguments.release == RELEASE_2023 else "use_legacy_models")
            raise UnsupportedError(
                named, "legacy models with layers of Transformer Engine are not modelled", "use --transformer-impl local"
            )
        return "legacy"
    return "local" if written == "local" else "transformer_engine"


def _position(arguments: Arguments) -> Literal["learned_absolute", "rope", "none"]:
    """Position embeddings; kinds other than these three are refused before, in `supported`."""
    rotary = switched_on(arguments, "use_rotary_position_embeddings")
    kind = "rope" if rotary else text(arguments, "position_embedding_type", "learned_absolute")
    if _is_off(arguments, "add_position_embedding") and kind not in ("rope", "yarn"):
        if arguments.release == RELEASE_2023:
            return "none"
        raise InputError(
            option(arguments, "add_position_embedding"),
            f"does not go with {kind} positions",
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
    """Those of the model before its sequences were made longer: the default of `YarnRotaryEmbedding` where none are given."""
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
        fused = not _is_off(arguments, "bias_swiglu_fusion")
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
    """Refuse a quick GEGLU fused with biases where an MLP is not an expert: it has no such kernel (`MLP.forward`)."""
    if model.activation != "quick_geglu" or not model.bias_activation_fusion:
        return
    if model.moe is None or not all(model.moe.layers) or model.moe.shared_ffn_hidden_size is not None:
        raise InputError(
            "--quick-geglu", "has no kernel fused with biases but in experts", "add --no-bias-gelu-fusion or --disable-bias-linear"
        )


def _layer_scaling_assumption(scaling: bool, *, implementation: Implementation, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Transformer Engine takes the scaling from the environment, which has to agree (`TEDotProductAttention`)."""
    if implementation != "transformer_engine":
        return ()
    value = environ.get("NVTE_APPLY_QK_LAYER_SCALING")
    if scaling and value is None:
        return ("NVTE_APPLY_QK_LAYER_SCALING=1 is set where the launch runs, as --apply-query-key-layer-scaling demands.",)
    if scaling != (value not in (None, "0")):
        raise InputError(
            "--apply-query-key-layer-scaling",
            f"is {'on' if scaling else 'off'} and NVTE_APPLY_QK_LAYER_SCALING is {value}",
            f"export NVTE_APPLY_QK_LAYER_SCALING={int(scaling)}",
        )
    return ()


def _cross_entropy(arguments: Arguments, *, implementation: Implementation) -> CrossEntropy:
    if implementation == "legacy" or not switched_on(arguments, "cross_entropy_loss_fusion"):
        return "unfused"
    return cast(CrossEntropy, text(arguments, "cross_entropy_fusion_impl", "native"))


def _attention(
    arguments: Arguments,
    needs: AttentionNeeds,
    *,
    implementation: Implementation,
    environ: Mapping[str, str],
    gpu: HardwareSpec,
) -> tuple[AttentionBackend, tuple[str, ...]]:
    """The kernel of core attention; outside Transformer Engine the flags alone decide."""
    named = option(arguments, "attention_backend")
    requested = text(arguments, "attention_backend", "auto")
    if implementation == "legacy":
        if not switched_on(arguments, "use_flash_attn"):
            return "unfused", ()
        if not needs.half_precision:
            raise InputError(
                option(arguments, "use_flash_attn"), "flash attention works in 16 bit only", "add --bf16, or leave it out"
            )
        return "flash", ()
    if requested == "local":
        raise InputError(
            named, "local is taken by Megatron only with a --spec that is not modelled", "use --transformer-impl local, or unfused"
        )
    check_switches(requested, environ=environ, option=named)
    if implementation == "local":
        if needs.context > 1:
            raise InputError(
                option(arguments, "context_parallel_size"),
                "needs the attention of Transformer Engine",
                "use --transformer-impl transformer_engine",
            )
        return "unfused", ()
    backend, sentence = choose_backend(requested, needs=needs, gpu=gpu, option=named)
    return backend, (sentence,)
