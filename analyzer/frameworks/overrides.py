"""Changed options of Megatron-LM as overrides of the framework that a launch came from: model.tensor_model_parallel_size=4."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Final

from analyzer.frameworks.options import RENAMED, text

_FIELDS: Final = {RENAMED[name]: name for name in (
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "virtual_pipeline_model_parallel_size",
)}  # fmt: skip
"""Names of dests in configurations, if they differ."""
_OF_GRADIENTS: Final = ("overlap_grad_reduce", "overlap_param_gather")
"""Fields of the gradients' configuration in Megatron-Bridge."""
_ENGINE: Final = "actor_rollout_ref.actor.megatron."
_POLICY: Final = "policy.megatron_cfg."


def command(framework: str, argv: Sequence[str], changes: Mapping[str, object]) -> str | None:
    """The words of a launch with overrides for `changes`, values by dest, without options of this program.

    None for a framework whose overrides are options of Megatron-LM, and for a change that no override gives.
    """
    found = overrides(framework, changes)
    if found is None:
        return None
    from analyzer.frameworks.recognize import recognize

    launch = recognize(argv)
    if launch is None:
        return None
    launcher = [word for word in launch.rest if not word.startswith("--info")] if launch.framework is not None else []
    return shlex.join([*launcher, launch.program, *launch.words, *found])


def overrides(framework: str, changes: Mapping[str, object]) -> list[str] | None:
    """The overrides for `changes`, values by dest; None if they cannot be given.

    The micro-batch size of NeMo-RL and verl is left alone: with packing it is a number of tokens.
    """
    if framework == "primus":
        return [f"{dest}={_value(value)}" for dest, value in changes.items()]
    if framework == "bridge":
        return [f"{_of_bridge(dest)}={_value(value)}" for dest, value in changes.items()]
    if framework not in ("nemo_rl", "verl") or "micro_batch_size" in changes:
        return None
    return _of_policy(changes) if framework == "nemo_rl" else [_of_verl(dest, value) for dest, value in changes.items()]


def _of_bridge(dest: str) -> str:
    section = "train" if dest == "micro_batch_size" else "ddp" if dest in _OF_GRADIENTS else "model"
    return f"{section}.{_FIELDS.get(dest, dest)}"


def _of_policy(changes: Mapping[str, object]) -> list[str]:
    """NeMo-RL recomputes only with activation_checkpointing."""
    found = []
    for dest, value in changes.items():
        if dest == "recompute_granularity":
            found.append(f"{_POLICY}activation_checkpointing={_value(value is not None)}")
        if dest not in ("recompute_method", "recompute_num_layers") and (dest != "recompute_granularity" or value is not None):
            found.append(f"{_POLICY}{_FIELDS.get(dest, dest)}={_value(value)}")
    return found


def _of_verl(dest: str, value: object) -> str:
    name = _FIELDS.get(dest, dest)
    if name.endswith("_parallel_size"):
        return f"{_ENGINE}{name}={_value(value)}"
    if name == "sequence_parallel":
        return f"{_ENGINE}{name}={value}"
    return f"++{_ENGINE}override_transformer_config.{name}={_value(value)}"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(text, value)) + "]"
    return "null" if value is None else text(value)
