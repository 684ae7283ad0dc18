"""Layers that differ by configuration (`--heterogeneous-layers-config-path`), as in the Nemotron models of Llama.

Megatron: `validate_model_config_args_from_heterogeneous_config` (megatron/training/arguments.py),
core/transformer/heterogeneous/heterogeneous_config.py and core/models/gpt/heterogeneous, 0.16.1.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from analyzer.errors import InputError, UnsupportedError
from analyzer.files import refuse_special_file
from analyzer.launch.derive.reading import option, switched_on
from analyzer.launch.written_files import as_written
from analyzer.specs import BlockSpec, Branch

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.launch.derive.launch_input import LaunchInput
    from analyzer.specs import ModelSpec, RecomputeSpec

_PATH: Final = "heterogeneous_layers_config_path"
_TEXT: Final = "heterogeneous_layers_config_encoded_json"

_INCOMPATIBLE: Final = {
    "num_experts": "Megatron builds MoE layers instead",
    "multi_latent_attention": "Megatron supports multi-latent attention for equal layers only",
    "mtp_num_layers": "MTP layers are not modelled with them",
    "fine_grained_activation_offloading": "offloading is not modelled with them",
    "cpu_offloading_num_layers": "offloading is not modelled with them",
    "enable_cuda_graph": "CUDA graphs are not modelled with them",
    "external_cuda_graph": "CUDA graphs are not modelled with them",
}

Json = dict[str, object]


def block_specs(launch: LaunchInput, *, model: ModelSpec, recompute: RecomputeSpec) -> tuple[BlockSpec, ...]:
    """The branches of each decoder layer, from the configuration file, relative to the working folder.

    Raises InputError for a file that cannot be read or whose sizes differ from the options, UnsupportedError for
    options that are not modelled with it.
    """
    arguments = launch.arguments
    named = option(arguments, _PATH)
    if arguments.get(_PATH) is None:
        raise InputError(option(arguments, _TEXT), f"has no effect without {named}", f"add {named}, or leave it out")
    _check_options(arguments, model=model, recompute=recompute)
    content = _read(arguments, folder=launch.folder)
    layers = content.get("block_configs")
    if not isinstance(layers, list) or not layers or not all(isinstance(layer, dict) for layer in layers):
        raise InputError(
            named, "has no block_configs with one entry for each layer", "give the config.json of a model with block_configs"
        )
    blocks = tuple(_block(named, layer, at=at, hidden=model.hidden_size) for at, layer in enumerate(layers, 1))
    _check_sizes(arguments, content, layers, model=model)
    if len(blocks) != model.num_layers:
        raise InputError(named, f"has block_configs for {len(blocks)} of {model.num_layers} layers", "give one for each layer")
    return blocks


def _check_options(arguments: Arguments, *, model: ModelSpec, recompute: RecomputeSpec) -> None:
    named = option(arguments, _PATH)
    for dest, reason in _INCOMPATIBLE.items():
        if arguments.get(dest):
            raise UnsupportedError(option(arguments, dest), f"cannot be used with {named}: {reason}", "leave one of them out")
    if arguments.get("cuda_graph_impl") not in (None, "none"):
        raise UnsupportedError(
            option(arguments, "cuda_graph_impl"), f"CUDA graphs are not modelled with {named}", "leave one of them out"
        )
    if model.implementation != "transformer_engine":
        raise UnsupportedError(
            option(arguments, "transformer_impl"),
            f"local layers are not modelled with {named}",
            "use --transformer-impl transformer_engine",
        )
    if recompute.granularity == "selective" and set(recompute.modules) - {"core_attn"}:
        raise UnsupportedError(
            option(arguments, "recompute_modules"),
            f"only the module core_attn is modelled with {named}",
            "use core_attn, or --recompute-granularity full",
        )


def _read(arguments: Arguments, *, folder: Path) -> Json:
    """The configuration: the encoded text, as saved in checkpoints, if it is given too; otherwise the file."""
    encoded = arguments.get(_TEXT)
    named = option(arguments, _TEXT if encoded else _PATH)
    path = as_written(folder / str(arguments.get(_PATH)))
    if not encoded:
        refuse_special_file(path, named, "give the config.json of the model")
    try:
        content = json.loads(str(encoded) if encoded else path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(named, f"{path} cannot be read ({error.strerror})", "give the config.json of the model") from None
    except (ValueError, RecursionError):
        raise InputError(named, "is not JSON, or is nested too deeply", "give the config.json of the model") from None
    if not isinstance(content, dict):
        raise InputError(named, "is not a JSON object", "give the config.json of the model")
    return content


def _block(named: str, layer: Json, *, at: int, hidden: int) -> BlockSpec:
    attention, feed_forward = layer.get("attention"), layer.get("ffn") or layer.get("mlp")
    if not isinstance(attention, dict) or not isinstance(feed_forward, dict):
        raise InputError(named, f"layer {at} has no attention or no ffn", "give both")
    kind = _kind(feed_forward)
    width = _width(named, feed_forward, at=at, hidden=hidden) if kind == "full" else None
    return BlockSpec(attention=_kind(attention), feed_forward=kind, ffn_hidden_size=width)


def _kind(branch: Json) -> Branch:
    if branch.get("no_op"):
        return "none"
    return "linear" if branch.get("replace_with_linear") else "full"


def _width(named: str, branch: Json, *, at: int, hidden: int) -> int | None:
    """The FFN width (`MLPConfig`): ffn_hidden_size, or 2/3 · ffn_mult · hidden size rounded up to a multiple of 256.

    None for the FFN width of the model.
    """
    width, multiple = branch.get("ffn_hidden_size"), branch.get("ffn_mult")
    given = multiple if "ffn_hidden_size" not in branch else width
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int | float) or given <= 0:
        raise InputError(named, f"the FFN width {given!r} of layer {at} is not a number above 0", "give a number above 0")
    if "ffn_hidden_size" in branch:
        return int(given)
    return -(-int(2 * given * hidden / 3) // 256) * 256


def _check_sizes(arguments: Arguments, content: Json, layers: list[Json], *, model: ModelSpec) -> None:
    """Megatron compares the options with the file, and refuses different values."""
    named = option(arguments, _PATH)
    shared = [each for layer in layers if (each := cast(Json, layer["attention"]).get("n_heads_in_group")) is not None]
    if not shared or any(each != shared[0] for each in shared) or not isinstance(shared[0], int) or shared[0] <= 0:
        raise InputError(named, "n_heads_in_group is not the same in all layers with attention", "use one value")
    expected_values = {
        "num_layers": (content.get("num_hidden_layers"), model.num_layers),
        "hidden_size": (content.get("hidden_size"), model.hidden_size),
        "num_attention_heads": (content.get("num_attention_heads"), model.num_attention_heads),
        "num_query_groups": (model.num_attention_heads // shared[0], model.num_query_groups),
        "swiglu": (content.get("hidden_act") == "silu", model.activation == "swiglu"),
        "normalization": ("RMSNorm", model.normalization),
        "untie_embeddings_and_output_weights": (not content.get("tie_word_embeddings"), not model.tied_embeddings),
        "use_rotary_position_embeddings": (True, switched_on(arguments, "use_rotary_position_embeddings")),
        "use_rope_scaling": (True, switched_on(arguments, "use_rope_scaling")),
        "rotary_percent": (1.0, model.rotary_percent),
    }
    for dest, (expected, given) in expected_values.items():
        if expected != given:
            raise InputError(
                option(arguments, dest), f"is {_word(given)}, and {named} has {_word(expected)}", "use the same value in both"
            )


def _word(value: object) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)
