"""Changed options of Megatron-LM in the terms of the framework that a launch came from: model.tensor_model_parallel_size=4."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from analyzer.frameworks.options import RENAMED, text
from analyzer.frameworks.recognize import YAML, words_of_launch
from analyzer.launch.argv_parser import options_with_values

if TYPE_CHECKING:
    from analyzer.api import Launch
    from analyzer.launch.megatron_words import LayoutSettings

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
_RECOMPUTE: Final = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
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
        return shlex.join([*words, *overrides(launch, changes)])
    if launch.framework == "ms_swift":
        return shlex.join(_of_swift(words, changes))
    if launch.arguments.fork == "slime":
        return shlex.join(_of_slime(launch, words, changes))
    return None


def overrides(launch: Launch, changes: Changes) -> list[str]:
    """The overrides KEY=VALUE for `changes`. The framework of the launch must have them."""
    assert launch.framework is not None
    settings = launch.settings
    found = list(_WRITERS[launch.framework]("" if settings is None else settings.engine, changes))
    if settings is None:
        return found
    sizes = [(dest, value) for dest, value in changes.items() if dest.endswith(_SIZES)]
    found += [f"{prefix}{dest}={_value(value)}" for prefix in settings.mirrored for dest, value in sizes]
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


def _of_primus(_: str, changes: Changes) -> Iterator[str]:
    return (f"{dest}={_value(value)}" for dest, value in changes.items())


def _of_bridge(_: str, changes: Changes) -> Iterator[str]:
    for dest, value in changes.items():
        section = "train" if dest == _MICRO else "ddp" if dest in _OF_GRADIENTS else "model"
        yield f"{section}.{_FIELDS.get(dest, dest)}={_value(value)}"


def _of_nemo_rl(engine: str, changes: Changes) -> Iterator[str]:
    """Recomputation is switched on by activation_checkpointing. Of whole layers it is uniform without `model_overrides`."""
    for dest, value in changes.items():
        name = _FIELDS.get(dest, dest)
        if dest == "recompute_granularity":
            yield f"{engine}activation_checkpointing={_value(value is not None)}"
        if dest in _UNIFORM:
            if value is not None and value != _UNIFORM[dest]:
                yield f"++{engine}model_overrides.{dest}={_value(value)}"
        elif dest in _OF_GRADIENTS:
            section = "optimizer" if dest == "use_distributed_optimizer" else "distributed_data_parallel_config"
            yield f"++{engine}{section}.{name}={_value(value)}"
        elif dest not in (_MICRO, "recompute_granularity") or (dest == "recompute_granularity" and value is not None):
            yield f"{_added(dest)}{engine}{name}={_value(value)}"


def _of_verl(engine: str, changes: Changes) -> Iterator[str]:
    for dest, value in changes.items():
        name = _FIELDS.get(dest, dest)
        if name.endswith(_SIZES) or dest in ("sequence_parallel", "use_distributed_optimizer"):
            yield f"{engine}{name}={value if isinstance(value, bool) else _value(value)}"
        elif dest in _OF_GRADIENTS:
            yield f"++{engine}override_ddp_config.{name}={_value(value)}"
        elif dest != _MICRO:
            yield f"++{engine}override_transformer_config.{name}={_value(value)}"


def _of_roll(engine: str, changes: Changes) -> Iterator[str]:
    """Fields that the arguments of ROLL do not have are in `additional_configs`."""
    for dest, value in changes.items():
        name = _FIELDS.get(dest, dest)
        if dest != _MICRO:
            own = name.endswith(_SIZES) or dest in ("sequence_parallel", *_OF_GRADIENTS, *_RECOMPUTE)
            yield f"++{engine}{'' if own else 'additional_configs.'}{name}={_value(value)}"


_WRITERS: Final[Mapping[str, Callable[[str, Changes], Iterator[str]]]] = {
    "bridge": _of_bridge,
    "primus": _of_primus,
    "nemo_rl": _of_nemo_rl,
    "verl": _of_verl,
    "roll": _of_roll,
}
"""By framework: the overrides of the layout. The first argument is what the names of its settings begin with."""


def _added(dest: str) -> str:
    """What Hydra needs before a key that a configuration may not have."""
    return "" if dest.endswith(_SIZES) or dest == "sequence_parallel" else "++"


def _of_swift(words: Sequence[str], changes: Changes) -> list[str]:
    """Options of ms-swift have underscores, and flags take a value. After a file, KEY=null leaves out what it has."""
    changed = {
        _FIELDS["num_virtual_stages_per_pipeline_rank"] if "virtual" in dest else dest: each for dest, each in changes.items()
    }
    if changed.get("recompute_granularity", "") is None:
        changed["recompute_granularity"] = "none"
    kept = [word for group in options_with_values(words) if _dest(group) not in changed for word in group]
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
    kept = [word for group in options_with_values(words) if _dest(group) not in changed for word in group]
    for dest, value in changed.items():
        if value is not None and value is not False:
            values = [] if value is True else map(text, value) if isinstance(value, list | tuple) else [text(value)]
            kept += [f"--{dest.replace('_', '-')}", *values]
    return kept


def _dest(group: Sequence[str]) -> str:
    return group[0].partition("=")[0].removeprefix("--").replace("-", "_")


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(text, value)) + "]"
    return "null" if value is None else text(value)
