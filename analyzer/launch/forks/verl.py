"""Launches of verl (verl-project/verl), whose actor, or whose supervised fine-tuning, can be trained by Megatron-LM.

They have no options of Megatron-LM, but settings of Hydra, `name=value`. Of reinforcement learning only the training of the actor
is analyzed, not the rollout. Names and defaults: actor/actor.yaml, engine/megatron.yaml and sft_trainer_engine.yaml of
verl/trainer/config, 2026; models/mcore/model_forward.py for packed sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.forks import adapters
from analyzer.launch.launchers.world import World
from analyzer.launch.options.option_table import Option
from analyzer.launch.other_models import refuse_other_model
from analyzer.units import natural

_ACTOR: Final = "actor_rollout_ref.actor."
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
    "overlap_cpu_optimizer_d2h_h2d": "--overlap-cpu-optimizer-d2h-h2d",
}
_NO_OPTION: Final = frozenset({"variable_seq_lengths", "average_in_collective", "check_for_nan_in_grad", "bucket_size"})
"""Fields of Megatron's configurations without an option that matters, and without an effect on memory."""
_FALSE: Final = ("null", "None", "False", "false")
_ALWAYS: Final = ("--use-distributed-optimizer", "--make-vocab-size-divisible-by", "1")
"""verl shards the optimizer, and does not pad the vocabulary (`should_pad_vocab` of its bridges is off)."""
_PACKED: Final = "--no-create-attention-mask-in-dataloader"
"""Packed sequences have no attention mask (`attention_mask=None` in model_forward.py)."""


@dataclass(frozen=True, slots=True)
class VerlLaunch:
    """The training in Megatron's terms."""

    words: tuple[str, ...]
    model: str
    """The Hugging Face name of the model, or its folder."""
    world: World
    notes: tuple[str, ...]
    """Assumptions, one sentence each."""
    statements: tuple[str, ...]
    """About parts that are not counted, one sentence each."""
    withheld: tuple[str, ...]
    """Why there can be no verdict (`Arguments.withheld`)."""


@dataclass(frozen=True, slots=True)
class _Names:
    """The settings of one kind of training."""

    engine: str
    strategies: tuple[str, ...]
    """Settings that name the engine."""
    model: str
    optimizer: str
    remedy: str


_OF_ACTOR: Final = _Names(
    f"{_ACTOR}megatron.",
    (f"{_ACTOR}strategy", "model_engine"),
    "actor_rollout_ref.model.",
    f"{_ACTOR}optim.override_optimizer_config.",
    f"{_ACTOR}strategy=megatron",
)
_OF_TUNING: Final = _Names("engine.", ("engine", "model_engine"), "model.", "optim.override_optimizer_config.", "engine=megatron")


def read_verl(words: Sequence[str], known: Mapping[str, Option]) -> VerlLaunch:
    """The training of the actor, or the supervised fine-tuning. `known`: Megatron's options by flag.

    Raises UnsupportedError if another engine than Megatron-LM trains, InputError if a setting has no valid value.
    """
    settings = {name.lstrip("+"): value for name, equals, value in (word.partition("=") for word in words) if equals}
    names = _OF_ACTOR if any(name.startswith("actor_rollout_ref.") for name in settings) else _OF_TUNING
    engines = settings.get("--config-name", "") + "".join(settings.get(name, "") for name in names.strategies)
    if "megatron" not in engines and not any(name.startswith(f"{_ACTOR}megatron.") for name in settings):
        fault = "trains with FSDP of PyTorch, and only training by Megatron-LM is modelled"
        raise UnsupportedError("verl", fault, f"give {names.remedy}")
    path = settings.get(f"{names.model}path")
    if not path:
        raise InputError(f"{names.model}path", "is missing", "add it, with a Hugging Face name or the folder of a config.json")
    refuse_other_model(f"{names.model}path", path)
    layout = [word for name, flag in _SIZES.items() for word in _sized(settings.get(names.engine + name), flag)]
    if (
        settings.get(f"{names.engine}sequence_parallel", "True") == "True"
        and _count(settings, f"{names.engine}tensor_model_parallel_size", 1) > 1
    ):
        layout.append("--sequence-parallel")
    configured, unknown = _configured(settings, names, known)
    batch, notes = _batch(settings) if names is _OF_ACTOR else _batch_of_tuning(settings)
    packed = settings.get(f"{names.engine}use_remove_padding", settings.get(f"{names.model}use_remove_padding", "True")) == "True"
    what = "its actor" if names is _OF_ACTOR else "supervised fine-tuning"
    return VerlLaunch(
        words=(*layout, *configured, *batch, *_ALWAYS, *([_PACKED] if packed else [])),
        model=path,
        world=World(_count(settings, "trainer.nnodes", 1), _count(settings, "trainer.n_gpus_per_node", 8)),
        notes=(f"The launch is one of verl: the training of {what} is analyzed.", *notes),
        statements=(*_not_counted(settings, names), *unknown),
        withheld=tuple(_withheld(settings, names)),
    )


def _withheld(settings: Mapping[str, str], names: _Names) -> Iterator[str]:
    for name in (f"{names.model}lora.rank", f"{names.model}lora_rank"):
        why = adapters.reason(f"{name}={settings.get(name, '0')}", ())
        if why is not None and settings.get(name, "0") not in ("0", "null"):
            yield why


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


def _configured(settings: Mapping[str, str], names: _Names, known: Mapping[str, Option]) -> tuple[list[str], list[str]]:
    """The options for Megatron's configurations, and statements about fields that have no option."""
    config = f"{names.engine}override_transformer_config."
    words = [] if f"{config}attention_backend" in settings else ["--attention-backend", "flash"]
    unknown: list[str] = []
    prefixes = (config, f"{names.engine}override_ddp_config.", names.optimizer)
    for setting, value in settings.items():
        prefix = next((each for each in prefixes if setting.startswith(each)), None)
        name = setting.removeprefix(prefix or "")
        if prefix is None or name in _NO_OPTION:
            continue
        if name == "grad_reduce_in_fp32":
            words += ["--grad-reduce-in-bf16"] if value in _FALSE else ["--accumulate-allreduce-grads-in-fp32"]
            continue
        flag = _RENAMED.get(name, "--" + name.replace("_", "-"))
        if value in _FALSE:
            continue
        if flag not in known:
            unknown.append(f"{setting} is not known and not counted: its effect on memory and communication is unknown.")
        elif known[flag].kind == "store":
            words += [flag, *value.strip("[]").replace('"', "").replace("'", "").split(",")]
        elif flag not in _ALWAYS:
            words.append(flag)
    return words, unknown


def _batch(settings: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Sequence length and batch sizes of the actor, and the assumptions about them."""
    length = _count(settings, "data.max_prompt_length", 512) + _count(settings, "data.max_response_length", 512)
    if settings.get(f"{_ACTOR}use_dynamic_bsz") == "True":
        context = _count(settings, f"{_ACTOR}megatron.context_parallel_size", 1)
        return _packed(
            _count(settings, f"{_ACTOR}ppo_max_token_len_per_gpu", 16384) * context, f"{_ACTOR}ppo_max_token_len_per_gpu"
        )
    micro = _count(settings, f"{_ACTOR}ppo_micro_batch_size_per_gpu", 1)
    samples = _count(settings, f"{_ACTOR}ppo_mini_batch_size", 256) * _count(settings, "actor_rollout_ref.rollout.n", 1)
    note = f"Sequences are assumed to have {length} tokens, the longest prompt and response."
    return ["--seq-length", str(length), "--micro-batch-size", str(micro), "--global-batch-size", str(samples)], [note]


def _packed(tokens: int, setting: str) -> tuple[list[str], list[str]]:
    note = f"A microbatch is assumed to have {tokens} tokens, from {setting}, as one sequence."
    return ["--seq-length", str(tokens), "--micro-batch-size", "1"], [note]


def _batch_of_tuning(settings: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Sequence length and batch sizes of supervised fine-tuning, and the assumptions about them."""
    if settings.get("data.use_dynamic_bsz", "True") == "True":
        context = _count(settings, "engine.context_parallel_size", 1)
        return _packed(_count(settings, "data.max_token_len_per_gpu", 8192) * context, "data.max_token_len_per_gpu")
    length = _count(settings, "data.max_length", 1024)
    micro, samples = _count(settings, "data.micro_batch_size_per_gpu", 4), _count(settings, "data.train_batch_size", 256)
    note = f"Sequences are assumed to have {length} tokens, from data.max_length."
    return ["--seq-length", str(length), "--micro-batch-size", str(micro), "--global-batch-size", str(samples)], [note]


def _not_counted(settings: Mapping[str, str], names: _Names) -> Iterator[str]:
    if names is _OF_ACTOR:
        yield "verl: the memory of the rollout is not counted, so the prediction is too low while it keeps its weights on the GPU."
        if "True" in (settings.get(f"{_ACTOR}use_kl_loss"), settings.get("algorithm.use_kl_in_reward")):
            yield "verl: the reference model is not counted, so the prediction is too low unless its parameters are offloaded."
        if settings.get("algorithm.adv_estimator", "gae") == "gae":
            yield "verl: the critic is not counted, so the prediction is too low unless it is offloaded or on other GPUs."
    for part in ("param", "grad", "optimizer"):
        if settings.get(f"{names.engine}{part}_offload") == "True":
            yield f"{names.engine}{part}_offload is not counted: the memory is that of an update, when everything is on the GPU."
