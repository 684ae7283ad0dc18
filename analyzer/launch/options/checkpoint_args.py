"""`--use-checkpoint-args`: the arguments that a checkpoint was trained with, read without running what its pickle holds.

Megatron keeps its `args` namespace in `common.pt` of a distributed checkpoint, and in `model_optim_rng.pt` of each rank
of an older one (megatron/training/checkpointing.py, `load_args_from_checkpoint`, 0.16). Both are zip files of
`torch.save`, in which `data.pkl` refers to the tensors. We read that pickle with every class replaced by an inert one.
"""

from __future__ import annotations

import pickle
import zipfile
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from analyzer.errors import InputError
from analyzer.launch.arguments import Arguments

OPTION: Final = "--use-checkpoint-args"

TAKEN_IF_UNSET: Final = (
    "num_layers", "hidden_size", "ffn_hidden_size", "seq_length", "num_attention_heads", "kv_channels", "max_position_embeddings",
    "padded_vocab_size",
)  # fmt: skip
"""Taken from the checkpoint only where the command line leaves them unset."""
TAKEN_ALWAYS: Final = (
    "num_query_groups", "group_query_attention", "position_embedding_type", "add_position_embedding",
    "use_rotary_position_embeddings", "rotary_base", "rotary_percent", "rotary_interleaved", "add_bias_linear", "add_qkv_bias",
    "squared_relu", "swiglu", "untie_embeddings_and_output_weights", "apply_layernorm_1p", "normalization",
    "apply_query_key_layer_scaling", "attention_dropout", "hidden_dropout", "hybrid_override_pattern", "spec",
    "hybrid_attention_ratio", "hybrid_mlp_ratio", "num_experts", "moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk",
    "moe_token_dispatcher_type", "moe_router_pre_softmax", "moe_grouped_gemm", "moe_shared_expert_intermediate_size",
    "mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads", "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json", "tokenizer_type", "tiktoken_pattern",
)  # fmt: skip
PARALLEL: Final = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
                   "num_layers_per_virtual_pipeline_stage", "expert_model_parallel_size")  # fmt: skip
"""Taken with --use-mp-args-from-checkpoint-args."""


class Inert:
    """Stands for every class and function that a pickle names. It holds what it is given and does nothing."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Inert:
        return super().__new__(cls)

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        """Takes whatever a pickle passes."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Items of a mapping that we do not need."""

    def append(self, item: Any) -> None:
        """Items of a list that we do not need."""

    def extend(self, items: Any) -> None:
        """Items of a list that we do not need."""

    add = append


class InertUnpickler(pickle.Unpickler):
    """Reads a pickle without importing or calling anything that it names."""

    def find_class(self, _module: str, _name: str, /) -> type[Inert]:
        return Inert

    def persistent_load(self, _reference: Any, /) -> Inert:
        return Inert()


def with_checkpoint_args(arguments: Arguments, folder: Path) -> Arguments:
    """`arguments` with what Megatron takes from the checkpoint in --load, a path that may be relative to `folder`."""
    load = arguments.get("load") or arguments.get("pretrained_checkpoint")
    if not isinstance(load, str):
        raise InputError(OPTION, "there is no --load to take the arguments from", "give --load, or leave it out")
    path = checkpoint_file(folder / load, step=arguments.get("ckpt_step"))
    saved = read_args(path)
    unset = tuple(dest for dest in TAKEN_IF_UNSET if arguments.get(dest) is None)
    parallel = PARALLEL if arguments.get("use_mp_args_from_checkpoint_args") else ()
    tokenizer = ("tokenizer_model",) if arguments.get("use_tokenizer_model_from_checkpoint_args") else ()
    taken = {dest: saved[dest] for dest in (*unset, *TAKEN_ALWAYS, *tokenizer, *parallel) if saved.get(dest) is not None}
    return replace(
        arguments,
        values=MappingProxyType({**arguments.values, **taken}),
        given=arguments.given | taken.keys(),
        spelled=MappingProxyType({**arguments.spelled, **{dest: f"{dest} of {OPTION}" for dest in taken}}),
        assumptions=(*arguments.assumptions, f"The model's options are those of the checkpoint {path}."),
    )


def checkpoint_file(load: Path, *, step: object = None) -> Path:
    """The file of the checkpoint in the folder `load` that holds the arguments. Raises InputError."""
    tracker = load / "latest_checkpointed_iteration.txt"
    try:
        latest = str(step) if step is not None else tracker.read_text().strip()
    except OSError:
        raise InputError(OPTION, f"{tracker} cannot be read", "check the folder given with --load") from None
    if latest != "release" and not latest.isdecimal():
        raise InputError(OPTION, f"{tracker} names no iteration but {latest[:40]!r}", "check the folder given with --load")
    iteration = load / (latest if latest == "release" else f"iter_{int(latest):07d}")
    ranks = ("mp_rank_00", "mp_rank_00_000", "mp_rank_00_000_000")
    candidates = [iteration / "common.pt", *(iteration / rank / "model_optim_rng.pt" for rank in ranks)]
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        raise InputError(
            OPTION, f"{iteration} holds neither common.pt nor mp_rank_00/model_optim_rng.pt", "give the model's options themselves"
        )
    return found


def read_args(path: Path) -> dict[str, object]:
    """The plain values of the `args` namespace in the checkpoint file `path`. Raises InputError."""
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("/data.pkl") or name == "data.pkl")
            with archive.open(name) as stream:
                content = InertUnpickler(stream).load()
    except (OSError, zipfile.BadZipFile, StopIteration):
        raise InputError(OPTION, f"{path} is not a file of torch.save", "give the model's options themselves") from None
    except Exception as error:
        raise InputError(OPTION, f"{path} is damaged ({error})", "give the model's options themselves") from None
    namespace = content.get("args") if isinstance(content, dict) else None
    if not isinstance(namespace, Inert) or not vars(namespace):
        raise InputError(OPTION, f"{path} holds no arguments", "give the model's options themselves")
    return {dest: frozen for dest, value in vars(namespace).items() if (frozen := _plain(value)) is not None}


def _plain(value: object) -> object:
    """`value` if it is a number, text or a list of such, lists as tuples; else None."""
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        items = tuple(_plain(item) for item in value)
        return None if None in items else items
    return None
