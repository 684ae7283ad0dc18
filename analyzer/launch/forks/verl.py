"""Launches of verl (volcengine/verl), whose actor can be trained by Megatron-LM.

They have no options of Megatron-LM, but settings of Hydra, `name=value`. Only the training of the actor is analyzed, not the
rollout. Names and defaults: verl/trainer/config/actor/actor.yaml and engine/megatron.yaml, 2026.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.launchers.world import World
from analyzer.launch.options.option_table import Option
from analyzer.units import natural

_ACTOR: Final = "actor_rollout_ref.actor."
_ENGINE: Final = f"{_ACTOR}megatron."
_CONFIG: Final = f"{_ENGINE}override_transformer_config."
_PATH: Final = "actor_rollout_ref.model.path"
_SIZES: Final = {
    "tensor_model_parallel_size": "--tensor-model-parallel-size",
    "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
    "context_parallel_size": "--context-parallel-size",
    "expert_model_parallel_size": "--expert-model-parallel-size",
    "expert_tensor_parallel_size": "--expert-tensor-parallel-size",
}
"""Settings of the Megatron engine, and the options that they stand for."""
_RENAMED: Final = {
    "num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers",
}
_NO_OPTION: Final = frozenset({"variable_seq_lengths"})
"""Fields of the configuration of the transformer without an option and without an effect on memory."""


@dataclass(frozen=True, slots=True)
class VerlLaunch:
    """The training of the actor in Megatron's terms."""

    words: tuple[str, ...]
    model: str
    """The Hugging Face name of the model, or its folder."""
    world: World
    notes: tuple[str, ...]
    """Assumptions, one sentence each."""
    statements: tuple[str, ...]
    """About parts that are not counted, one sentence each."""


def read_verl(words: Sequence[str], known: Mapping[str, Option]) -> VerlLaunch:
    """The training of the actor. `known`: Megatron's options by flag.

    Raises UnsupportedError if another engine than Megatron-LM trains the actor, InputError if a setting has no valid value.
    """
    settings = {name.lstrip("+"): value for name, equals, value in (word.partition("=") for word in words) if equals}
    config_name = settings.get("--config-name", "")
    if "megatron" not in config_name + settings.get(f"{_ACTOR}strategy", "") and not any(
        name.startswith(_ENGINE) for name in settings
    ):
        fault = "trains the actor with FSDP of PyTorch, and only training by Megatron-LM is modelled"
        raise UnsupportedError("verl", fault, f"give {_ACTOR}strategy=megatron")
    if not settings.get(_PATH):
        raise InputError(_PATH, "is missing", "add it, with a Hugging Face name or the folder of a config.json")
    layout = [word for name, flag in _SIZES.items() for word in _sized(settings.get(_ENGINE + name), flag)]
    if (
        settings.get(f"{_ENGINE}sequence_parallel", "True") == "True"
        and _count(settings, f"{_ENGINE}tensor_model_parallel_size", 1) > 1
    ):
        layout.append("--sequence-parallel")
    configured, unknown = _configured(settings, known)
    batch, notes = _batch(settings)
    return VerlLaunch(
        words=(*layout, *configured, *batch),
        model=settings[_PATH],
        world=World(_count(settings, "trainer.nnodes", 1), _count(settings, "trainer.n_gpus_per_node", 8)),
        notes=("The launch is one of verl: the training of its actor is analyzed.", *notes),
        statements=(*_not_counted(settings), *unknown),
    )


def _sized(value: str | None, flag: str) -> list[str]:
    return [] if value in (None, "null", "None") else [flag, str(value)]


def _count(settings: Mapping[str, str], name: str, default: int) -> int:
    value = settings.get(name)
    if value in (None, "null"):
        return default
    number = natural(value)
    if not number:
        raise InputError(name, f"{value!r} is not a number of 1 or more", f"write {name}={default}")
    return number


def _configured(settings: Mapping[str, str], known: Mapping[str, Option]) -> tuple[list[str], list[str]]:
    """The options for the configuration of the transformer, and statements about fields that have no option."""
    words = [] if f"{_CONFIG}attention_backend" in settings else ["--attention-backend", "flash"]
    unknown: list[str] = []
    for setting, value in settings.items():
        name = setting.removeprefix(_CONFIG)
        if name == setting or name in _NO_OPTION or value in ("null", "None", "False", "false"):
            continue
        flag = _RENAMED.get(name, "--" + name.replace("_", "-"))
        if flag not in known:
            unknown.append(f"{setting} is not known and not counted: its effect on memory and communication is unknown.")
        elif known[flag].kind == "store":
            words += [flag, *value.strip("[]").replace('"', "").replace("'", "").split(",")]
        else:
            words.append(flag)
    return words, unknown


def _batch(settings: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Sequence length and batch sizes, and the assumptions about them."""
    length = _count(settings, "data.max_prompt_length", 512) + _count(settings, "data.max_response_length", 512)
    if settings.get(f"{_ACTOR}use_dynamic_bsz") == "True":
        context = _count(settings, f"{_ENGINE}context_parallel_size", 1)
        tokens = _count(settings, f"{_ACTOR}ppo_max_token_len_per_gpu", 16384) * context
        note = f"A microbatch is assumed to have {tokens} tokens, from {_ACTOR}ppo_max_token_len_per_gpu, as one sequence."
        return ["--seq-length", str(tokens), "--micro-batch-size", "1"], [note]
    micro = _count(settings, f"{_ACTOR}ppo_micro_batch_size_per_gpu", 1)
    samples = _count(settings, f"{_ACTOR}ppo_mini_batch_size", 256) * _count(settings, "actor_rollout_ref.rollout.n", 1)
    note = f"Sequences are assumed to have {length} tokens, the longest prompt and response."
    return ["--seq-length", str(length), "--micro-batch-size", str(micro), "--global-batch-size", str(samples)], [note]


def _not_counted(settings: Mapping[str, str]) -> Iterator[str]:
    yield "verl: the memory of the rollout is not counted, so the prediction is too low while it keeps its weights on the GPU."
    if "True" in (settings.get(f"{_ACTOR}use_kl_loss"), settings.get("algorithm.use_kl_in_reward")):
        yield "verl: the reference model is not counted, so the prediction is too low unless its parameters are offloaded."
    if settings.get("algorithm.adv_estimator", "gae") == "gae":
        yield "verl: the critic is not counted, so the prediction is too low unless it is offloaded or on other GPUs."
    if _count(settings, "actor_rollout_ref.model.lora.rank", 1) > 1:
        yield "actor_rollout_ref.model.lora.rank: the training of all parameters is counted, so the prediction is too high."
    for part in ("param", "grad", "optimizer"):
        if settings.get(f"{_ENGINE}{part}_offload") == "True":
            yield f"{_ENGINE}{part}_offload is not counted: the memory is that of an update, when everything is on the GPU."
