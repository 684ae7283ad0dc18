"""`--use-checkpoint-args`: reads the arguments of a checkpoint without executing code from its pickle.

Megatron saves its `args` namespace in `common.pt` of a distributed checkpoint, or in `model_optim_rng.pt` of each rank in the older
format (megatron/training/checkpointing.py, `load_args_from_checkpoint`, 0.16). Both are zip files of `torch.save`, whose `data.pkl`
references the tensors. That pickle is read with every class replaced by a placeholder.
"""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from analyzer.errors import InputError
from analyzer.files import refuse_special_file
from analyzer.launch.arguments import Arguments
from analyzer.launch.options.safe_pickle import MAX_BYTES, Placeholder, TooLargeError, read_pickle
from analyzer.units import MAX_DIGITS

OPTION: Final = "--use-checkpoint-args"

TAKEN_IF_UNSET: Final = (
    "num_layers", "hidden_size", "ffn_hidden_size", "seq_length", "num_attention_heads", "kv_channels", "max_position_embeddings",
    "padded_vocab_size",
)  # fmt: skip
"""Taken from the checkpoint only if the command line does not set them."""
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


MAX_RATIO: Final = 100
"""Decompressed bytes per byte in the zip file. torch.save does not compress."""
MAX_VALUES: Final = 100_000
"""Values in one argument, which can be a list with an entry per layer."""
MAX_DEPTH: Final = 8
"""Lists inside lists in one argument."""
MAX_CHARACTERS: Final = 1 << 20
"""Characters of one string. The longest is the configuration of a heterogeneous model as JSON."""


def with_checkpoint_args(arguments: Arguments, folder: Path) -> Arguments:
    """`arguments` with the values that Megatron takes from the checkpoint in --load, a path relative to `folder` or absolute.

    Without a checkpoint Megatron uses the given arguments (`load_args_from_checkpoint`), and so does this function, with a
    statement in `unknown`. Raises InputError if there is a checkpoint whose arguments cannot be read.
    """
    load = arguments.get("load") or arguments.get("pretrained_checkpoint")
    try:
        if not isinstance(load, str):
            raise MissingCheckpointError(OPTION, "--load is not given", "add it")
        path = checkpoint_file(folder / load, step=arguments.get("ckpt_step"))
    except MissingCheckpointError as error:
        stated = f"{OPTION} has no effect, because {error.fault}. As in Megatron, the arguments of the command line are used."
        return replace(arguments, unknown=(*arguments.unknown, stated))
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
        assumptions=(*arguments.assumptions, f"The options of the model are read from the checkpoint {path}."),
    )


class MissingCheckpointError(InputError):
    """There is no checkpoint to read arguments from."""


def checkpoint_file(load: Path, *, step: object = None) -> Path:
    """The file with the arguments in the checkpoint folder `load`.

    Raises MissingCheckpointError if there is none, and InputError if its tracker file names no iteration.
    """
    tracker = load / "latest_checkpointed_iteration.txt"
    refuse_special_file(tracker, OPTION, "check the folder given with --load")
    try:
        latest = str(step) if step is not None else tracker.read_text(errors="replace").strip()
    except OSError:
        raise MissingCheckpointError(OPTION, f"{tracker} cannot be read", "check the folder given with --load") from None
    if latest != "release" and not (latest.isdecimal() and len(latest) <= MAX_DIGITS):
        raise InputError(
            OPTION, f"{tracker} contains {latest[:40]!r} instead of an iteration", "check the folder given with --load"
        )
    iteration = load / (latest if latest == "release" else f"iter_{int(latest):07d}")
    ranks = ("mp_rank_00", "mp_rank_00_000", "mp_rank_00_000_000")
    candidates = [iteration / "common.pt", *(iteration / rank / "model_optim_rng.pt" for rank in ranks)]
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        raise MissingCheckpointError(
            OPTION, f"{iteration} has neither common.pt nor mp_rank_00/model_optim_rng.pt", "give the options of the model instead"
        )
    return found


def read_args(path: Path) -> dict[str, object]:
    """The numbers, strings and lists in the `args` namespace of the checkpoint file `path`. Raises InputError."""
    remedy = "give the options of the model instead"
    try:
        content = read_pickle(_pickle_of(path))
        namespace = content.get("args") if isinstance(content, dict) else None
        state = namespace.state if isinstance(namespace, Placeholder) else None
        if not isinstance(state, dict) or not state:
            raise InputError(OPTION, f"{path} contains no arguments", remedy)
        values = {dest: _plain(value, [MAX_VALUES]) for dest, value in state.items() if isinstance(dest, str)}
    except InputError:
        raise
    except TooLargeError as error:
        raise InputError(OPTION, f"{path} is too large for arguments: {error}", remedy) from None
    except (OSError, zipfile.BadZipFile, StopIteration):
        raise InputError(OPTION, f"{path} is not a file of torch.save", remedy) from None
    except Exception as error:
        raise InputError(OPTION, f"{path} is damaged ({str(error)[:100]})", remedy) from None
    return {dest: value for dest, value in values.items() if value is not None}


def _pickle_of(path: Path) -> bytes:
    """The pickle in the zip file `path`. Raises OSError, BadZipFile, StopIteration without one, and TooLargeError."""
    with zipfile.ZipFile(path) as archive:
        found = next(each for each in archive.infolist() if each.filename.endswith("/data.pkl") or each.filename == "data.pkl")
        if found.file_size > found.compress_size * MAX_RATIO:
            raise TooLargeError(f"its pickle grows to more than {MAX_RATIO} times its compressed size")
        with archive.open(found) as stream:
            return stream.read(MAX_BYTES + 1)


def _plain(value: object, left: list[int], depth: int = 0) -> object:
    """`value` if it is a number, a string or a list of these, with lists as tuples; otherwise None.

    `left` is the number of values that may still be read. Raises TooLargeError if `value` exceeds a limit.
    """
    left[0] -= 1
    if left[0] < 0 or depth > MAX_DEPTH:
        raise TooLargeError(f"an argument has more than {MAX_VALUES} values, or lists nested deeper than {MAX_DEPTH}")
    if isinstance(value, str) and len(value) > MAX_CHARACTERS:
        raise TooLargeError(f"an argument has more than {MAX_CHARACTERS} characters")
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        items = tuple(_plain(item, left, depth + 1) for item in value)
        return None if None in items else items
    return None
