"""Megatron's options that several model families share, each derived from fields of a Hugging Face configuration.

Defaults are those of the configuration classes of transformers 5.23.0 (src/transformers/models/*/configuration_*.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final, Literal

from analyzer.launch.model_config.configuration import GELU, SILU, Configuration
from analyzer.specs.vision_part import NO_PARTS, ModelParts

Option = tuple[str, ...]
"""An option of Megatron-LM and its values."""
Part = tuple[list[Option], tuple[str, ...]]
"""The options of a part of a model, and notes about what they do not express."""
ROPE_BASE: Final = 10000


@dataclass(frozen=True, kw_only=True)
class MegatronModel:
    """A model as options of Megatron-LM."""

    options: tuple[Option, ...]
    vocabulary: int
    """Rows of the embedding, without padding."""
    positions: int
    """Longest sequence that the model was made for."""
    position_rows: int | None = None
    """Rows of the learned position embedding; None for other kinds of positions."""
    notes: tuple[str, ...] = ()
    """Differences between the model and its options, one sentence each."""
    parts: ModelParts = NO_PARTS
    """What the options do not say."""
    depth_letters: str = ""
    """Of a hybrid model: the letters of the layers in an MTP depth, which the options do not give."""

    @property
    def letters(self) -> str:
        """Of a hybrid model: the letters of its layers."""
        return next((option[1] for option in self.options if option[0] == "--hybrid-override-pattern"), "")

    def noting(self, *sentences: str) -> MegatronModel:
        """The model with further notes."""
        return replace(self, notes=(*self.notes, *sentences))


def rotary_model(config: Configuration, *options: Iterable[Option], notes: Iterable[str] = ()) -> MegatronModel:
    """A model with rotary positions. Fields: vocab_size, max_position_embeddings (2048 if it is missing)."""
    return MegatronModel(
        options=tuple(option for group in options for option in group),
        vocabulary=config.integer("vocab_size"),
        positions=config.integer("max_position_embeddings", 2048),
        notes=(*notes, *_rope_notes(config)),
    )


def llama_model(
    config: Configuration,
    *options: Iterable[Option],
    sized: list[Option] | None = None,
    activation: Part | None = None,
    normed: list[Option] | None = None,
    rotated: list[Option] | None = None,
    linear: Part | None = None,
    tied: bool = False,
    hidden_dropout: float = 0,
    attention_dropout: float = 0,
    notes: Iterable[str] = (),
) -> MegatronModel:
    """A model with the parts of Llama. An argument replaces a part, `options` follow them.

    Defaults: `sizes`, `gate`, `rms_norm`, `rope`, and biases of attention by `attention_bias`. `tied` and `attention_dropout` are
    the values if these fields are missing.
    """
    biased, of_biases = biases(config, attention=attention_biases(config), ffn=False) if linear is None else linear
    activated, of_activation = gate(config) if activation is None else activation
    return rotary_model(
        config,
        sizes(config) if sized is None else sized,
        activated,
        rms_norm(config) if normed is None else normed,
        rope(config) if rotated is None else rotated,
        biased,
        embeddings(config, tied=tied),
        dropout(attention=config.number("attention_dropout", attention_dropout), hidden=hidden_dropout),
        *options,
        notes=(*of_biases, *of_activation, *notes),
    )


def sizes(config: Configuration, *, groups: int | None = None, ffn: int | None = None) -> list[Option]:
    """Layers, widths and heads. `groups` replaces num_key_value_heads, `ffn` replaces intermediate_size."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    groups = config.integer("num_key_value_heads", heads) if groups is None else groups
    options: list[Option] = [
        ("--num-layers", str(config.integer("num_hidden_layers"))),
        ("--hidden-size", str(hidden)),
        ("--ffn-hidden-size", str(config.integer("intermediate_size") if ffn is None else ffn)),
        ("--num-attention-heads", str(heads)),
    ]
    if groups != heads:
        options += [("--group-query-attention",), ("--num-query-groups", str(groups))]
    head = config.optional("head_dim")
    if head is not None and head * heads != hidden:
        options.append(("--kv-channels", str(head)))
    return options


def rope(config: Configuration, *, share: float = 1.0, base: str = "rope_theta") -> list[Option]:
    """Rotary positions. `share`: default of the rotated share of a head; `base`: name of the field with the base."""
    parameters = config.nested("rope_parameters")
    theta = config.number(base, parameters.number("rope_theta", ROPE_BASE))
    share = config.number("partial_rotary_factor", parameters.number("partial_rotary_factor", share))
    options: list[Option] = [("--position-embedding-type", "rope"), ("--rotary-base", str(int(theta)))]
    if share != 1:
        options.append(("--rotary-percent", f"{share:g}"))
    kind, scaling = _rope_scaling(config)
    if kind == "llama3":
        options += [("--use-rope-scaling",), ("--rope-scaling-factor", f"{scaling.number('factor', 8.0):g}")]
    return options


def _rope_scaling(config: Configuration) -> tuple[str, Configuration]:
    """The kind of scaling, "default" without any, and its parameters (`rope_parameters` from transformers 5 on)."""
    scaling = config.nested("rope_scaling" if config.table("rope_scaling") else "rope_parameters")
    return scaling.text("rope_type", scaling.text("type", "default")), scaling


def yarn_scaling(config: Configuration) -> Configuration | None:
    """The parameters of YaRN; None for other rotary positions."""
    kind, scaling = _rope_scaling(config)
    return scaling if kind == "yarn" else None


def _rope_notes(config: Configuration) -> tuple[str, ...]:
    kind, _ = _rope_scaling(config)
    if kind in ("default", "llama3", "mrope") or config.get("kv_lora_rank") is not None:
        return ()
    return (f"{config.name}: its {kind} scaling of rotary positions is left out; the angles differ, the memory does not.",)


def gate(config: Configuration) -> Part:
    """The option for a gated FFN with the activation in hidden_act, SiLU if it is missing; a note if another one stands for it.

    The gates of Megatron-LM have the same shapes and save the same tensors.
    """
    activation = config.activation("hidden_act", default="silu")
    if activation in SILU:
        return [("--swiglu",)], ()
    if activation == "quick_gelu":
        return [("--quick-geglu",)], ()
    option = "--quick-geglu" if activation in GELU else "--swiglu"
    return [(option,)], (f"{config.name}: {option} stands for its gate with {activation}; the shapes are equal.",)


def no_gate(config: Configuration, *keys: str, default: str) -> Part:
    """The option for the activation of a FFN without a gate; a note if Megatron-LM has no option for it."""
    activation = config.activation(*keys, default=default)
    if activation == "relu2":
        return [("--squared-relu",)], ()
    if activation in GELU:
        return [], ()
    return [], (f"{config.name}: GELU stands for its activation {activation}, which Megatron-LM has no option for.",)


def rms_norm(config: Configuration, *, default: float = 1e-6) -> list[Option]:
    """RMSNorm with its epsilon."""
    return [("--normalization", "RMSNorm"), ("--norm-epsilon", f"{config.number('rms_norm_eps', default):g}")]


def layer_norm(config: Configuration, *, key: str = "layer_norm_epsilon") -> list[Option]:
    """LayerNorm with its epsilon."""
    return [("--normalization", "LayerNorm"), ("--norm-epsilon", f"{config.number(key, 1e-5):g}")]


def embeddings(config: Configuration, *, tied: bool) -> list[Option]:
    """Whether embedding and output layer share their weight. `tied` is the default of the model class."""
    return [] if config.flag("tie_word_embeddings", tied) else [("--untie-embeddings-and-output-weights",)]


def dropout(*, attention: float, hidden: float) -> list[Option]:
    """Probabilities of dropout in attention, and after it and the FFN."""
    return [("--attention-dropout", f"{attention:g}"), ("--hidden-dropout", f"{hidden:g}")]


def attention_biases(config: Configuration) -> Literal["none", "all"]:
    """Which linear layers of attention have a bias, by `attention_bias`."""
    return "all" if config.flag("attention_bias", False) else "none"


NO_BIASES: Final[Part] = ([("--disable-bias-linear",)], ())
QK_NORMS: Final[Option] = ("--qk-layernorm",)


def biases(config: Configuration, *, attention: Literal["none", "qkv", "all"], ffn: bool) -> Part:
    """Biases of the linear layers, and a note if Megatron cannot express them: its flag covers all but the q, k, v projection."""
    if attention == "all" and ffn:
        return [], ()
    if ffn:
        raise config.not_expressible("biases in its FFN and none in its attention")
    if attention == "none":
        return NO_BIASES
    options: list[Option] = [("--disable-bias-linear",), ("--add-qkv-bias",)]
    if attention == "qkv":
        return options, ()
    missing = config.integer("num_hidden_layers") * config.integer("hidden_size")
    note = f"{config.name} has a bias in the output projection of attention; its {missing:,} parameters are not counted."
    return options, (note,)


def window(config: Configuration, layers: tuple[bool, ...], *, size: int | None) -> list[Option]:
    """Sliding windows of `size` tokens, which include the current one, in the `layers` that are True.

    transformers: `sliding_window_overlay` (masking_utils.py) attends to positions above q - size.
    """
    longest = config.optional("max_position_embeddings")
    if size is None or not any(layers) or (longest is not None and size >= longest):
        return []
    options: list[Option] = [("--window-size", f"{size - 1},0")]
    if all(layers):
        return options
    every = layers.index(False) + 1
    periodic = every > 1 and layers == tuple(i % every != 0 for i in range(1, len(layers) + 1))
    return [*options, ("--window-attn-skip-freq", str(every) if periodic else pattern(layers))]


def pattern(layers: Iterable[bool]) -> str:
    """A layer pattern in Python's notation, such as ([0]*3+[1]*58)."""
    runs = [(int(value), len(list(group))) for value, group in groupby(layers)]
    return "(" + "+".join(f"[{value}]*{count}" for value, count in runs) + ")"
