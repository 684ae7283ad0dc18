"""Arguments of Megatron-LM in a YAML file (`--yaml-cfg`), which replaces all options of the command line.

Sources: megatron/training/yaml_arguments.py and examples/gpt3/gpt_config.yaml, core 0.16.1. The sections `language_model` and
`model_parallel` have fields of `TransformerConfig` and `ModelParallelConfig`; everything else has the dests of options.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from analyzer.errors import InputError
from analyzer.files import refuse_special_file
from analyzer.launch.options.option_table import Option
from analyzer.launch.written_files import as_written

FLAG: Final = "--yaml-cfg"
SECTIONS: Final = ("language_model", "model_parallel")
_VARIABLE: Final = re.compile(r"\$\{(.*?)\}")
_REMEDY: Final = "give a file such as examples/gpt3/gpt_config.yaml of Megatron-LM"
_RENAMED: Final = {
    "num_moe_experts": "num_experts",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
}
"""Fields of configurations whose options have other dests."""
_ACTIVATIONS: Final[dict[object, tuple[str, ...]]] = {"swiglu": ("--swiglu",), "squaredrelu": ("--squared-relu",), "gelu": ()}
_OF_CONFIGURATION: Final = frozenset({"swiglu", "squared_relu", "gated_linear_unit", "bias_activation_fusion"})
"""Keys that the field `activation_func` replaces."""
_WITHOUT_OPTION: Final = frozenset({
    "perform_initialization", "async_tensor_model_parallel_allreduce", "batch_p2p_comm", "batch_p2p_sync", "autocast_dtype",
    "cpu_offloading_activations", "cpu_offloading_weights", "barrier_with_L1_time", "fp8_wgrad", "tp_comm_split_ag",
    "tp_comm_atomic_ag", "tp_comm_split_rs", "tp_comm_atomic_rs", "deallocate_pipeline_outputs", "params_dtype", "pipeline_dtype",
    "bert_binary_head", "add_position_embedding", "overlap_p2p_comm", "log_params_norm", "log_num_zeros_in_grad", "save_interval",
    "local_rank",
})  # fmt: skip
"""Keys without an effect on memory, or that other keys give."""


def words_of_yaml(
    name: str, known: Mapping[str, Option], *, environ: Mapping[str, str], folder: Path
) -> tuple[list[str], list[str]]:
    """The options that the file `name` stands for, and statements about keys that are not counted.

    `known`: Megatron's options by flag. Raises InputError for a file that cannot be read or has another structure.
    """
    content = _read(as_written(folder / name), name, environ)
    flags = _flags_by_dest(known)
    merged = {key: value for key, value in content.items() if key not in SECTIONS}
    for section in SECTIONS:
        part = content.get(section)
        if not isinstance(part, dict):
            raise InputError(FLAG, f"{name} has no section {section}", _REMEDY)
        merged |= part
    words, statements = list(_activation(merged, name)), []
    for key, value in merged.items():
        dest = key if key in flags else _RENAMED.get(key, key)
        if value is None or key in _OF_CONFIGURATION or key == "activation_func":
            continue
        if key == "add_bias_linear":
            words += [] if value else ["--disable-bias-linear"]
        elif dest in flags:
            words += _words(flags[dest], value)
        elif value and key not in _WITHOUT_OPTION:
            statements.append(f"{key} of {name} is not known and not counted: its effect on memory and communication is unknown.")
    return words, statements


def _read(path: Path, name: str, environ: Mapping[str, str]) -> dict[str, Any]:
    import yaml  # for such launches only, for a short start-up

    refuse_special_file(path, FLAG, _REMEDY)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(FLAG, f"cannot read '{name}' ({getattr(error, 'strerror', None) or error})", _REMEDY) from None
    missing = [variable for variable in _VARIABLE.findall(text) if variable not in environ]
    if missing:
        raise InputError(FLAG, f"{name} uses the environment variable {missing[0]}, which is not set", f"set {missing[0]}")
    try:
        content = yaml.safe_load(_VARIABLE.sub(lambda found: environ[found[1]], text))
    except (yaml.YAMLError, RecursionError) as error:
        place = getattr(error, "problem_mark", None)
        where = f" in line {place.line + 1}" if place is not None else ""
        raise InputError(FLAG, f"'{name}' is not YAML{where}", _REMEDY) from None
    if not isinstance(content, dict):
        raise InputError(FLAG, f"'{name}' has no keys", _REMEDY)
    return content


def _flags_by_dest(known: Mapping[str, Option]) -> dict[str, list[tuple[str, Option]]]:
    flags: dict[str, list[tuple[str, Option]]] = {}
    for flag, option in known.items():
        flags.setdefault(option.dest, []).append((flag, option))
    return flags


def _activation(merged: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """The words for `activation_func`. Raises InputError for one that Megatron refuses."""
    function = merged.get("activation_func", "gelu")
    if not isinstance(function, str) or function not in _ACTIVATIONS:
        fault = f"activation_func {function!r} of {name} is not supported by Megatron-LM"
        raise InputError(FLAG, fault, f"use {', '.join(map(str, _ACTIVATIONS))}")
    return _ACTIVATIONS[function]


def _words(options: list[tuple[str, Option]], value: object) -> Iterator[str]:
    """The words that set a dest to `value`; none if that is what the dest is without an option."""
    for flag, option in options:
        if option.kind == "store":
            yield flag
            yield from (str(each) for each in (value if isinstance(value, list) else [value]))
            return
        if option.kind == "boolean":
            if flag.startswith("--no-") == (not value):
                yield flag
                return
        elif value is (option.kind != "false"):
            yield flag
            return
