"""Families with Mamba layers: from a Hugging Face configuration to options of Megatron-LM's hybrid models.

Source of the fields and modules: src/transformers/models/{nemotron_h,granitemoehybrid}/ of transformers 5.24.0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from analyzer.launch.model_config.common import (
    MegatronModel,
    Option,
    dropout,
    embeddings,
    gate,
    no_gate,
    rms_norm,
    rope,
    rotary_model,
    sizes,
)
from analyzer.launch.model_config.configuration import Configuration
from analyzer.launch.model_config.experts import Experts, balancing, sigmoid_router

_LETTERS: Final = {
    "linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E",
}  # fmt: skip
_CONVOLUTION: Final = 4
"""Tokens that the convolution of Megatron-LM's Mamba layers reads (`MambaMixer`, d_conv)."""
_CHUNK: Final = 128
"""Tokens of a chunk of their scan (`MambaMixer`, chunk_size)."""


def nemotron_h(config: Configuration) -> MegatronModel:
    """Nemotron-H, Nemotron Nano 2 and Nemotron 3: each layer is a Mamba, attention, FFN or MoE layer."""
    for field in ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias"):
        if config.flag(field, False):
            raise config.not_expressible(f"biases in its linear layers ({field})")
    letters = _pattern(config)
    head = config.optional("attention_head_dim") or config.integer("head_dim", 128)
    plain = Configuration({**config.values, "head_dim": head, "num_hidden_layers": len(letters)}, config.name)
    activation, notes = no_gate(config, "mlp_hidden_act", default="relu2")
    experts: list[Option] = []
    if "E" in letters:
        experts = [*_nemotron_experts(config, len(letters)), *sigmoid_router(config)]
        latent = config.optional("moe_latent_size")
        experts += [] if latent is None else [("--moe-latent-size", str(latent))]
    model = _hybrid(
        plain,
        letters,
        sizes(plain, groups=config.integer("num_key_value_heads", 8)),
        activation,
        [("--normalization", "RMSNorm"), ("--norm-epsilon", f"{_epsilon(config):g}"), ("--position-embedding-type", "none")],
        _mamba(
            config,
            heads=config.integer("mamba_num_heads", 128),
            head=config.integer("mamba_head_dim", 64),
            groups=config.integer("n_groups", 8),
            state=config.integer("ssm_state_size", 128),
            names=("conv_kernel", "chunk_size", "use_conv_bias"),
        ),
        embeddings(config, tied=False),
        experts,
        notes=(*notes, *_mtp(config)),
    )
    return replace(model, depth_letters=config.text("mtp_hybrid_override_pattern", ""))


def _pattern(config: Configuration) -> str:
    """The letters of the layers: hybrid_override_pattern, or the names in layers_block_type."""
    names = config.get("layers_block_type", config.get("layer_types"))
    if isinstance(names, list):
        return "".join(_letters(config, names))
    written = config.text("hybrid_override_pattern", "")
    if not written or set(written) - set(_LETTERS.values()):
        raise config.not_expressible("no pattern of layers M, *, - and E")
    return written


def _letters(config: Configuration, names: list[object]) -> list[str]:
    """The letter of each layer."""
    if not names or not all(isinstance(name, str) and name in _LETTERS for name in names):
        raise config.not_expressible(f"layers of other kinds than {', '.join(_LETTERS)}")
    return [_LETTERS[str(name)] for name in names]


def _epsilon(config: Configuration) -> float:
    return config.number("layer_norm_epsilon", config.number("rms_norm_eps", 1e-5))


def _nemotron_experts(config: Configuration, layers: int) -> list[Option]:
    shared = config.optional("n_shared_experts") is not None
    return Experts(
        count=config.integer("n_routed_experts", 8),
        topk=config.integer("num_experts_per_tok", 2),
        ffn=config.integer("moe_intermediate_size", 7688),
        layers=(True,) * layers,
        shared=config.integer("moe_shared_expert_intermediate_size", 7688) if shared else None,
    ).options()


def _mtp(config: Configuration) -> tuple[str, ...]:
    if config.optional("num_nextn_predict_layers") is None:
        return ()
    return (f"{config.name}: its MTP layers are left out, as in the model class of Hugging Face, unless the launch adds them.",)


def granite_hybrid(config: Configuration) -> MegatronModel:
    """Granite 4: each layer has Mamba or attention, and then a FFN or experts with a shared one."""
    if config.flag("attention_bias", False) or config.flag("mamba_proj_bias", False):
        raise config.not_expressible("biases in its linear layers")
    count = config.optional("num_local_experts")
    width, shared = config.integer("intermediate_size"), config.integer("shared_intermediate_size", 1024)
    kinds = config.get("layer_types", ["mamba"] * config.integer("num_hidden_layers"))
    if not isinstance(kinds, list):
        raise config.not_expressible("layer_types that are no list")
    letters = "".join(letter + ("-" if count is None else "E") for letter in _letters(config, kinds))
    plain = Configuration({**config.values, "num_hidden_layers": len(letters)}, config.name)
    experts: list[Option] = []
    if count is not None:
        topk = config.integer("num_experts_per_tok", 2)
        layers = (True,) * len(letters)
        experts = [*Experts(count=count, topk=topk, ffn=width, layers=layers, shared=shared).options(), *balancing(config)]
    rotary = config.text("position_embedding_type", "nope") == "rope"
    heads, hidden = config.integer("mamba_n_heads", 128), config.integer("hidden_size")
    head = config.get("mamba_d_head", "auto")
    gated, notes = gate(config)
    return _hybrid(
        plain,
        letters,
        sizes(plain, ffn=shared if count is None else width),
        gated,
        rms_norm(config),
        rope(config) if rotary else [("--position-embedding-type", "none")],
        _mamba(
            config,
            heads=heads,
            head=config.integer("mamba_d_head") if head != "auto" else config.integer("mamba_expand", 2) * hidden // heads,
            groups=config.integer("mamba_n_groups", 1),
            state=config.integer("mamba_d_state", 256),
            names=("mamba_d_conv", "mamba_chunk_size", "mamba_conv_bias"),
        ),
        embeddings(config, tied=False),
        experts,
        notes=(*notes, f"{config.name}: its multipliers are left out; they change values, not memory."),
    )


def _mamba(
    config: Configuration, *, heads: int, head: int, groups: int, state: int, names: tuple[str, str, str]
) -> tuple[list[Option], tuple[str, ...]]:
    """The sizes of the Mamba layers, and a note if their chunks differ. `names`: the fields of convolution, chunk and bias."""
    convolution, chunk, bias = names
    if config.integer(convolution, _CONVOLUTION) != _CONVOLUTION or not config.flag(bias, True):
        raise config.not_expressible(f"a convolution of other than {_CONVOLUTION} tokens, or without a bias")
    tokens = config.integer(chunk, _CHUNK)
    notes = () if tokens == _CHUNK else (f"{config.name}: its scan in chunks of {tokens} tokens is counted with {_CHUNK}.",)
    options: list[Option] = [
        ("--mamba-num-heads", str(heads)),
        ("--mamba-head-dim", str(head)),
        ("--mamba-num-groups", str(groups)),
        ("--mamba-state-dim", str(state)),
    ]
    return options, notes


def _hybrid(
    config: Configuration,
    letters: str,
    *options: list[Option] | tuple[list[Option], tuple[str, ...]],
    notes: tuple[str, ...],
) -> MegatronModel:
    """A hybrid model with the layers `letters`. `options`: groups of options, some with notes."""
    groups = [each if isinstance(each, list) else each[0] for each in options]
    further = [note for each in options if isinstance(each, tuple) for note in each[1]]
    pattern: list[Option] = [("--is-hybrid-model",), ("--hybrid-override-pattern", letters), ("--disable-bias-linear",)]
    model = rotary_model(config, pattern, *groups, dropout(attention=config.number("attention_dropout", 0), hidden=0), notes=notes)
    return model.noting(*further) if further else model
