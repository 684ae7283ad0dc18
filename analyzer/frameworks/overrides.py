"""Changed options of Megatron-LM in the terms of the framework that a launch came from: model.tensor_model_parallel_size=4."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from analyzer.frameworks.options import RENAMED, text
from analyzer.frameworks.recognize import YAML, words_of_launch
from analyzer.launch.argv_parser import options_with_values, words_of_options
from analyzer.launch.megatron_words import LayoutSettings
from analyzer.specs.option_names import flag_of

if TYPE_CHECKING:
    from analyzer.api import Launch

Changes = Mapping[str, object]
"""New values of options, by dest; None for those that are left out."""

_FIELDS: Final = {RENAMED[name]: name for name in (
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "virtual_pipeline_model_parallel_size",
)}  # fmt: skip
"""Names of dests in configurations, if they differ."""
_OF_GRADIENTS: Final = ("overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer")
"""Fields of the gradients' configuration."""
_SIZES: Final = "_parallel_size"
"""Ends the names of parallel sizes."""
_OVERLAPS: Final = frozenset({
    "overlap_grad_reduce", "overlap_param_gather", "tp_comm_overlap", "defer_embedding_wgrad_compute", "wgrad_deferral_limit",
    "overlap_moe_expert_parallel_comm", "delay_wgrad_compute",
})  # fmt: skip
"""Fields of `CommOverlapConfig` of Megatron-Bridge."""
_OF_ROLL: Final = frozenset({
    "sequence_parallel", "virtual_pipeline_model_parallel_size", "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split", "pipeline_model_parallel_layout", "recompute_granularity", "recompute_method",
    "recompute_modules", "recompute_num_layers", "cross_entropy_loss_fusion", "moe_layer_recompute", "moe_shared_expert_overlap",
    "overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer", "optimizer_cpu_offload",
    "optimizer_offload_fraction",
})  # fmt: skip
"""Fields of the arguments of ROLL (training_args.py of mcore_adapter) beside the parallel sizes."""
_VARIABLES: Final = re.compile(
    r"NPROC_PER_NODE|NNODES|PYTORCH_(CUDA_)?ALLOC_CONF|CUDA_DEVICE_MAX_CONNECTIONS|CUBLAS_WORKSPACE_CONFIG|(NVTE|NCCL)_\w+"
)
"""Variables of a script that change its layout or its memory."""
_UNIFORM: Final = {"recompute_method": "uniform", "recompute_num_layers": 1}
"""Full recomputation in NeMo-RL."""
_MICRO: Final = "micro_batch_size"


class _Layout(NamedTuple):
    """Sizes of a layout that its batch depends on."""

    micro_batch: int
    context: int
    replicas: int


def command(launch: Launch, argv: Sequence[str], changes: Changes) -> str | None:
    """The words of a launch with `changes`, without options of this program.

    None for a launch whose options are those of Megatron-LM.
    """
    words = words_of_launch(argv)
    if launch.framework in _WRITERS:
        words += overrides(launch, changes)
    elif launch.framework == "ms_swift":
        words = _of_swift(launch, words, changes)
    elif launch.arguments.fork == "slime":
        words = _of_slime(launch, words, changes)
    else:
        return None
    return " ".join((*_variables(launch), shlex.join([*_interpreter(words), *words])))


def _interpreter(words: Sequence[str]) -> list[str]:
    """What a command begins with whose words begin with options of torchrun, or with a script or module."""
    first = next(iter(words), "")
    if first.startswith("--"):
        return ["torchrun"]
    return ["python3"] if first == "-m" or first.endswith(".py") else []


def _variables(launch: Launch) -> Iterator[str]:
    """What a script sets before its command."""
    for name, value in launch.environ.items():
        if _VARIABLES.fullmatch(name) and os.environ.get(name) != value:
            yield f"{name}={shlex.quote(value)}"


def overrides(launch: Launch, changes: Changes) -> list[str]:
    """The overrides KEY=VALUE for `changes`. The framework of the launch must have them."""
    assert launch.framework is not None
    settings = launch.settings or LayoutSettings("")
    found = list(_WRITERS[launch.framework](settings, changes))
    names = [(_FIELDS.get(dest, dest), value) for dest, value in changes.items()]
    found += [f"{prefix}{name}={_value(value)}" for prefix in settings.mirrored for name, value in names if name.endswith(_SIZES)]
    if not settings.microbatch:
        return found
    old, new = _layout(launch, {}), _layout(launch, changes)
    return [*found, *(f"{name}={value}" for name, value in _of_batch(settings, old, new))]


def _layout(launch: Launch, changes: Changes) -> _Layout:
    parallel, batch = launch.job.parallel, launch.job.batch

    def size(dest: str, given: int) -> int:
        value = changes.get(dest, given)
        return value if isinstance(value, int) else 1

    context = size("context_parallel_size", parallel.context)
    split = size("tensor_model_parallel_size", parallel.tensor) * size("pipeline_model_parallel_size", parallel.pipeline) * context
    return _Layout(size(_MICRO, batch.micro_batch_size), context, max(parallel.world_size // split, 1))


def _of_batch(settings: LayoutSettings, old: _Layout, new: _Layout) -> Iterator[tuple[str, int]]:
    """The settings of a microbatch, and of the number of microbatches, if they change."""
    value = settings.value * new.micro_batch // old.micro_batch
    if settings.of_rank:
        value = -(-value * old.context // new.context)
    if value != settings.value:
        yield settings.microbatch, value
    if settings.steps:
        before, after = settings.per_step or settings.value, settings.per_step or value
        steps = -(-settings.samples // (after * new.replicas))
        if steps != -(-settings.samples // (before * old.replicas)):
            yield settings.steps, steps


def _of_primus(_: LayoutSettings, changes: Changes) -> Iterator[str]:
    return (f"{dest}={_value(value)}" for dest, value in changes.items())


def _of_bridge(settings: LayoutSettings, changes: Changes) -> Iterator[str]:
    for dest, value in changes.items():
        section = "train." if dest == _MICRO else "ddp." if dest in _OF_GRADIENTS else settings.engine
        section = settings.overlap if settings.overlap and dest in _OVERLAPS else section
        yield f"{section}{_FIELDS.get(dest, dest)}={_value(value)}"


def _of_nemo_rl(settings: LayoutSettings, changes: Changes) -> Iterator[str]:
    """Recomputation is switched on by activation_checkpointing. Of whole layers it is uniform without `model_overrides`."""
    engine = settings.engine
    for dest, value in changes.items():
        name = _FIELDS.get(dest, dest)
        if name in settings.overriding:
            yield f"{engine}model_overrides.{name}={_value(value)}"
        if dest == "recompute_granularity":
            yield f"{engine}activation_checkpointing={_value(value is not None)}"
        if dest in _UNIFORM:
            if value is not None and value != _UNIFORM[dest] and name not in settings.overriding:
                yield f"++{engine}model_overrides.{dest}={_value(value)}"
        elif dest in _OF_GRADIENTS:
            section = "optimizer" if dest == "use_distributed_optimizer" else "distributed_data_parallel_config"
            yield f"++{engine}{section}.{name}={_value(value)}"
        elif dest not in (_MICRO, "recompute_granularity") or (dest == "recompute_granularity" and value is not None):
            yield f"{_added(dest)}{engine}{name}={_value(value)}"


def _of_verl(settings: LayoutSettings, changes: Changes) -> Iterator[str]:
    engine = settings.engine
    for dest, value in changes.items():
        name = _FIELDS.get(dest, dest)
        if name.endswith(_SIZES) or dest in ("sequence_parallel", "use_distributed_optimizer"):
            yield f"{engine}{name}={value if isinstance(value, bool) else _value(value)}"
        elif dest in _OF_GRADIENTS:
            yield f"++{engine}override_ddp_config.{name}={_value(value)}"
        elif dest != _MICRO:
            yield f"++{engine}override_transformer_config.{name}={_value(value)}"


def _of_roll(settings: LayoutSettings, changes: Changes) -> Iterator[str]:
    """Fields that the arguments of ROLL do not have are in `additional_configs`."""
    for dest, value in changes.items():
        name = _FIELDS.get(dest, dest)
        if dest != _MICRO:
            own = name.endswith(_SIZES) or name in _OF_ROLL
            yield f"++{settings.engine}{'' if own else 'additional_configs.'}{name}={_value(value)}"


_WRITERS: Final[Mapping[str, Callable[[LayoutSettings, Changes], Iterator[str]]]] = {
    "bridge": _of_bridge,
    "primus": _of_primus,
    "nemo_rl": _of_nemo_rl,
    "verl": _of_verl,
    "roll": _of_roll,
}
"""By framework: the overrides of the layout."""


def _added(dest: str) -> str:
    """What Hydra needs before a key that a configuration may not have."""
    return "" if dest.endswith(_SIZES) or dest == "sequence_parallel" else "++"


def _of_swift(launch: Launch, words: Sequence[str], changes: Changes) -> list[str]:
    """Options of ms-swift have underscores, and flags take a value. After a file, KEY=null leaves out what it has.

    A microbatch has samples, which are two sequences each in DPO.
    """
    changed = {_with_underscores(flag_of(dest)): value for dest, value in changes.items()}
    if "num_virtual_stages_per_pipeline_rank" in changed:
        changed["virtual_pipeline_model_parallel_size"] = changed.pop("num_virtual_stages_per_pipeline_rank")
    micro = changed.get(_MICRO)
    if isinstance(micro, int):
        changed[_MICRO] = micro // launch.job.tuning.sequences_per_sample
    if changed.get("recompute_granularity", "") is None:
        changed["recompute_granularity"] = "none"
    kept = _without(words, changed)
    if any(word.endswith(YAML) for word in words):
        return [*kept, *(f"{dest}={_value(value)}" for dest, value in changed.items())]
    for dest, value in changed.items():
        if value is not None:
            kept += [f"--{dest}", *(map(text, value) if isinstance(value, list | tuple) else [_value(value)])]
    return kept


def _of_slime(launch: Launch, words: Sequence[str], changes: Changes) -> list[str]:
    """Options of Megatron-LM. Packed microbatches have a number of tokens for each context-parallel rank."""
    changed = dict(changes)
    if "--use-dynamic-batch-size" in words:
        old, new = _layout(launch, {}), _layout(launch, changes)
        changed.pop(_MICRO, None)
        if (old.micro_batch, old.context) != (new.micro_batch, new.context):
            changed["max_tokens_per_gpu"] = launch.job.batch.seq_length * new.micro_batch // new.context
    by_flag = {flag_of(dest): value for dest, value in changed.items()}
    return [*_without(words, map(_with_underscores, by_flag)), *words_of_options(by_flag)]


def _without(words: Sequence[str], names: Iterable[str]) -> list[str]:
    """`words` without the options with these names, which have underscores."""
    dropped = frozenset(names)
    groups = options_with_values(words)
    return [word for group in groups if _with_underscores(group[0].partition("=")[0]) not in dropped for word in group]


def _with_underscores(flag: str) -> str:
    """'tensor_model_parallel_size' for '--tensor-model-parallel-size'."""
    return flag.removeprefix("--").replace("-", "_")


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(text, value)) + "]"
    return "null" if value is None else text(value)
