"""Older model families: GPT-2, OPT, GPT-NeoX and Falcon, from a Hugging Face configuration to options of Megatron-LM.

Source of the fields and modules: src/transformers/models/*/modeling_*.py of transformers 5.23.0.
"""

from __future__ import annotations

from typing import Final

from analyzer.launch.model_config.common import (
    NO_BIASES,
    MegatronModel,
    Option,
    dropout,
    embeddings,
    layer_norm,
    llama_model,
    no_gate,
    rope,
    sizes,
)
from analyzer.launch.model_config.configuration import Configuration

OPT_OFFSET: Final = 2
"""`OPTLearnedPositionalEmbedding.offset`: the first rows of the position embedding are not used."""


def gpt2(config: Configuration) -> MegatronModel:
    """GPT-2: learned positions, LayerNorm, GELU, biases."""
    hidden = config.integer("n_embd")
    positions = config.integer("n_positions", 1024)
    activation, notes = no_gate(config, "activation_function", default="gelu_new")
    options: list[Option] = [
        ("--num-layers", str(config.integer("n_layer"))),
        ("--hidden-size", str(hidden)),
        ("--ffn-hidden-size", str(config.integer("n_inner", 4 * hidden))),
        ("--num-attention-heads", str(config.integer("n_head"))),
        *activation,
        *layer_norm(config),
        *embeddings(config, tied=True),
        *dropout(attention=config.number("attn_pdrop", 0.1), hidden=config.number("resid_pdrop", 0.1)),
    ]
    return _with_learned_positions(config, options, positions=positions, rows=positions).noting(*notes)


def opt(config: Configuration) -> MegatronModel:
    """OPT: learned positions with two rows that are not used, LayerNorm, ReLU, biases."""
    hidden = config.integer("hidden_size")
    if not config.flag("do_layer_norm_before", True):
        raise config.not_expressible("its norms after attention and FFN (do_layer_norm_before is false)")
    if config.integer("word_embed_proj_dim", hidden) != hidden:
        raise config.not_expressible("an embedding of another width than the layers (word_embed_proj_dim)")
    if config.flag("_remove_final_layer_norm", False) or not config.flag("layer_norm_elementwise_affine", True):
        raise config.not_expressible("norms without weights")
    positions = config.integer("max_position_embeddings", 2048)
    activation, notes = no_gate(config, "activation_function", default="relu")
    options: list[Option] = [
        *sizes(config, ffn=config.integer("ffn_dim")),
        *activation,
        *layer_norm(config),
        *([] if config.flag("enable_bias", True) else [("--disable-bias-linear",)]),
        *embeddings(config, tied=True),
        *dropout(attention=config.number("attention_dropout", 0), hidden=config.number("dropout", 0.1)),
    ]
    model = _with_learned_positions(config, options, positions=positions, rows=positions + OPT_OFFSET)
    return model.noting(
        f"{config.name}: its position embedding has {OPT_OFFSET} rows more than positions.",
        *notes,
    )


def _with_learned_positions(config: Configuration, options: list[Option], *, positions: int, rows: int) -> MegatronModel:
    return MegatronModel(
        options=(*options, ("--position-embedding-type", "learned_absolute")),
        vocabulary=config.integer("vocab_size"),
        positions=positions,
        position_rows=rows,
    )


def gpt_neox(config: Configuration) -> MegatronModel:
    """GPT-NeoX and Pythia: rotary positions in a quarter of each head, LayerNorm, GELU, biases."""
    if not config.flag("attention_bias", True):
        raise config.not_expressible("biases in its FFN and none in its attention")
    share = config.number("rotary_pct", 0.25)
    model = llama_model(
        config,
        activation=no_gate(config, "hidden_act", default="gelu"),
        normed=layer_norm(config, key="layer_norm_eps"),
        rotated=rope(config, share=share, base="rotary_emb_base"),
        linear=([], ()),
        hidden_dropout=config.number("hidden_dropout", 0),
    )
    return model.noting(_in_sequence(config)) if config.flag("use_parallel_residual", True) else model


def _in_sequence(config: Configuration) -> str:
    return f"{config.name}: attention and FFN, which it computes from the same input, are computed one after the other."


def falcon(config: Configuration) -> MegatronModel:
    """Falcon: multi-query or grouped-query attention, LayerNorm, GELU.

    `FalconDecoderLayer` has one norm for attention and FFN if they are parallel, and two in the new architecture.
    """
    if config.flag("alibi", False):
        raise config.not_expressible("ALiBi positions")
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    new = config.flag("new_decoder_architecture", False)
    groups = config.integer("num_kv_heads", heads) if new else 1 if config.flag("multi_query", True) else heads
    parallel = new or config.flag("parallel_attn", True)
    norms = (config.integer("num_ln_in_parallel_attn", 2) if new else 1) if parallel else 2
    model = llama_model(
        config,
        sized=sizes(config, groups=groups, ffn=config.integer("ffn_hidden_size", 4 * hidden)),
        activation=no_gate(config, "activation", default="gelu"),
        normed=layer_norm(config),
        linear=([], ()) if config.flag("bias", False) else NO_BIASES,
        tied=True,
        hidden_dropout=config.number("hidden_dropout", 0),
    )
    if parallel:
        model = model.noting(_in_sequence(config))
    if norms == 1:
        extra = 2 * hidden * config.integer("num_hidden_layers")
        model = model.noting(
            f"{config.name} has one norm in each layer and Megatron-LM two: {extra:,} parameters too many are counted."
        )
    return model
