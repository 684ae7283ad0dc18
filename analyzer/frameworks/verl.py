"""Launches of verl (verl-project/verl), whose actor, or whose supervised fine-tuning, can be trained by Megatron-LM.

They have no options of Megatron-LM, but settings of Hydra, `name=value`, or a YAML file with all of them. Of reinforcement learning
the update of the actor is analyzed, and that of a critic as a further training. Names and defaults: actor/actor.yaml,
engine/megatron.yaml, optim/megatron.yaml, critic/critic.yaml, model/hf_model.yaml and sft_trainer_engine.yaml of
verl/trainer/config, 2026; models/mcore/model_forward.py for packed sequences; workers/engine/megatron/transformer_impl.py for what
verl sets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from analyzer.errors import InputError, UnsupportedError
from analyzer.frameworks.adapters import bridge_vision, check_dropout, dtype_name, is_regathered, kind_named, settings_of_adapter
from analyzer.frameworks.batches import Batch, packed_batch, plain_batch, replicas_of
from analyzer.frameworks.models import NamedModel, named_model
from analyzer.frameworks.options import Fields, Words
from analyzer.frameworks.prepare import Input, Output
from analyzer.frameworks.recognize import YAML
from analyzer.frameworks.verl_settings import settings
from analyzer.launch.launchers.world import World
from analyzer.launch.megatron_words import LayoutSettings, MegatronWords
from analyzer.launch.options.catalogue import load_catalogue
from analyzer.specs.fine_tuning import Adapter, Engine, FineTuning, ForwardPass, OtherTraining, Phase, StatePart, engine_name
from analyzer.specs.vision_part import VisionTraining
from analyzer.units import MIB, natural, share_of

_ACTOR: Final = "actor_rollout_ref.actor."
_REFERENCE: Final = "actor_rollout_ref.ref.megatron."
_SIZES: Final = {
    "tensor_model_parallel_size": "--tensor-model-parallel-size",
    "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
    "context_parallel_size": "--context-parallel-size",
    "expert_model_parallel_size": "--expert-model-parallel-size",
    "expert_tensor_parallel_size": "--expert-tensor-parallel-size",
}
"""Settings of the Megatron engine, and the options that they stand for."""
_MODEL_PARALLEL: Final = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
_IGNORED: Final = frozenset({
    "freeze_language_model", "freeze_vision_model", "freeze_vision_projection", "freeze_audio_model",
    "lr", "lr_warmup_steps_ratio", "total_training_steps", "weight_decay", "lr_warmup_steps", "betas", "clip_grad",
    "lr_warmup_init", "lr_decay_steps", "lr_decay_style", "min_lr", "weight_decay_incr_style", "lr_wsd_decay_style",
    "lr_wsd_decay_steps", "use_checkpoint_opt_param_scheduler", "zero_indexed_step", "override_optimizer_config", "_target_",
    "grad_reduce_in_fp32",
})  # fmt: skip
"""Settings of the optimizer and of gradients without an effect on memory, and those that are read elsewhere."""
_KNOWN: Final = frozenset({
    "use_mbridge", "vanilla_mbridge", "use_dist_checkpointing", "dist_checkpointing_path", "dist_checkpointing_prefix",
    "dist_ckpt_optim_fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient", "seed", "forward_only", "dtype",
    "param_offload", "grad_offload", "optimizer_offload", "sequence_parallel", "use_remove_padding", "use_distributed_optimizer",
    "pad_bshd_to_minibatch_max", "pad_to_length", "pad_to_length_bucket", "entropy_from_logits_with_chunking",
    "entropy_from_logits_chunk_size", "override_ddp_config", "override_transformer_config", "override_mcore_model_config",
    "router_replay", "load_weight", "use_megatron_fsdp", "_target_", "strategy", "extra",
})  # fmt: skip
"""Settings of the engine that are read, or have no effect on the memory of an update."""
_NESTED: Final = ("override_transformer_config.", "override_ddp_config.", "router_replay.", "extra.")
"""Beginnings of nested settings of the engine that are read, or have no effect."""
_OF_MODEL: Final = ("mtp.enable", "enable_activation_offload", "tiled_mlp.enabled")
"""Settings of the model that change memory, and are not read."""
_UNCHECKED: Final = frozenset({"CUDA_DEVICE_MAX_CONNECTIONS"})
"""Variables that Megatron-LM's arguments, which verl does not use, refuse with full sharding."""
_OFF: Final = ("null", "None", "False", "false", "", "disabled", "{}", "[]", "0")
_ROUTER: Final = ("--moe-router-load-balancing-type", "none")
"""What verl sets for models with experts (`provider_overrides`)."""
_UNPADDED: Final = ("--make-vocab-size-divisible-by", "1")
"""verl does not pad the vocabulary (`should_pad_vocab` of its bridges is off)."""
_PACKED: Final = "--no-create-attention-mask-in-dataloader"
"""Packed sequences have no attention mask (`attention_mask=None` in model_forward.py)."""


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
    f"{_ACTOR}optim.",
    f"{_ACTOR}strategy=megatron",
)
_OF_CRITIC: Final = _Names(
    "critic.megatron.", ("critic.strategy", "model_engine"), "critic.model.", "critic.optim.", "critic.strategy=megatron"
)
_OF_TUNING: Final = _Names("engine.", ("engine", "model_engine"), "model.", "optim.", "engine=megatron")


def read(launch: Input) -> Output:
    """The training of the actor, or the supervised fine-tuning.

    Raises UnsupportedError if another engine than Megatron-LM trains, InputError if a setting has no valid value.
    """
    given: dict[str, str] = {}
    if launch.found.program.endswith(YAML):
        from analyzer.frameworks.yaml_files import read_tree, resolve

        name = launch.found.program
        tree = resolve(read_tree(launch.folder / name, name), name, environ=launch.environ)
        given = dict(_flat(tree, ""))
    own = _read(given | settings(launch.found.words), launch.folder)
    return Output(own, without=_UNCHECKED if "--use-megatron-fsdp" in own.words else frozenset())


def _flat(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """The values of a tree, each with its path, as an override would give it."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield prefix + str(name), str(value)


def _read(settings: Mapping[str, str], folder: Path) -> MegatronWords:
    names = _OF_ACTOR if any(name.startswith("actor_rollout_ref.") for name in settings) else _OF_TUNING
    engines = settings.get("--config-name", "") + "".join(settings.get(name, "") for name in names.strategies)
    if "megatron" not in engines and not any(name.startswith(f"{_ACTOR}megatron.") for name in settings):
        engine = "Megatron Lite" if "mlite" in engines else "FSDP of PyTorch"
        fault = f"trains with {engine}, and only training by Megatron-LM is modelled"
        raise UnsupportedError("verl", fault, f"give {names.remedy}")
    path = settings.get(f"{names.model}path")
    if not path:
        raise InputError(f"{names.model}path", "is missing", "add it, with a Hugging Face name or the folder of a config.json")
    model = named_model(f"{names.model}path", path, folder=folder)
    configured = _configured(settings, names)
    world = World(_count(settings, "trainer.nnodes", 1), _count(settings, "trainer.n_gpus_per_node", 8))
    batch = _batch(settings, world) if names is _OF_ACTOR else _batch_of_tuning(settings, world)
    notes = batch.notes
    what = "its actor" if names is _OF_ACTOR else "supervised fine-tuning"
    tuning = batch.tuned(replace(_tuning(settings, names), vision=_vision(settings, names)))
    if names is _OF_ACTOR and _has_critic(settings):
        critic, about = _critic(settings, folder, world)
        tuning, notes = replace(tuning, phases=(*tuning.phases, critic)), [*notes, *about]
    return MegatronWords(
        words=_words(settings, names, model, (*configured.words, *batch.words)),
        model=model.name,
        world=world,
        notes=(f"The launch is one of verl: the training of {what} is analyzed.", *notes),
        statements=(*_not_counted(settings, names), *configured.statements()),
        unknown=tuple(configured.unknown),
        withheld=configured.withheld(),
        tuning=tuning,
        layout=batch.layout,
    )


def _words(settings: Mapping[str, str], names: _Names, model: NamedModel, more: tuple[str, ...]) -> tuple[str, ...]:
    """The options of a model that is trained, with its layout. `more`: those of its configurations and its batch."""
    layout = [word for name, flag in _SIZES.items() for word in _sized(settings.get(names.engine + name), flag)]
    tensor = _count(settings, f"{names.engine}tensor_model_parallel_size", 1)
    if settings.get(f"{names.engine}sequence_parallel", "True") == "True" and tensor > 1:
        layout.append("--sequence-parallel")
    if settings.get(f"{names.engine}use_distributed_optimizer", "True") == "True":
        layout.append("--use-distributed-optimizer")
    layout.append("--fp16" if "float16" in settings.get(f"{names.engine}dtype", "").replace("bfloat16", "") else "--bf16")
    packed = settings.get(f"{names.engine}use_remove_padding", settings.get(f"{names.model}use_remove_padding", "True")) == "True"
    return (
        *model.defaults,
        *(_ROUTER if model.experts else ()),
        *layout,
        *more,
        *_UNPADDED,
        *([_PACKED] if packed else []),
    )


def _has_critic(settings: Mapping[str, str]) -> bool:
    """Source: `need_critic` of trainer/ppo/utils.py."""
    enabled = settings.get("critic.enable", "null")
    return settings.get("algorithm.adv_estimator", "gae") == "gae" if enabled in ("null", "None") else enabled == "True"


def _critic(settings: Mapping[str, str], folder: Path, world: World) -> tuple[Phase, list[str]]:
    """The critic: a model with a value for each token, which is trained on the GPUs of the actor, and what is assumed about it.

    Its microbatches are packed always, with ppo_infer_max_token_len_per_gpu tokens: the trainer overwrites the number of
    ppo_max_token_len_per_gpu, unless `trainer.use_v1` is off. Sources: trainer/ppo/v1/trainer_base.py, trainer/ppo/ray_trainer.py,
    `make_value_model` of models/mcore/bridge.py, and `use_dynamic_bsz` of workers/config/engine.py.
    """
    strategy = settings.get("critic.strategy", settings.get("--config-name", "") + settings.get("model_engine", ""))
    path = settings.get("critic.model.path", "")
    strategy += "megatron" if any(name.startswith(_OF_CRITIC.engine) for name in settings) else ""
    if "megatron" not in strategy or not path:
        return Phase(name="critic"), []
    model = named_model("critic.model.path", path, folder=folder)
    infer, train = ("critic.ppo_infer_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu")
    setting = infer if settings.get("trainer.use_v1", "True") in ("True", "true") else train
    samples = _count(settings, "critic.ppo_mini_batch_size", _count(settings, f"{_ACTOR}ppo_mini_batch_size", 256))
    samples *= _count(settings, "actor_rollout_ref.rollout.n", 1)
    tokens = (_count(settings, setting, 32768), setting)
    batch = _packed(settings, _OF_CRITIC.engine, world, tokens, (samples, _length(settings)))
    configured = _configured(settings, _OF_CRITIC)
    found = FineTuning(
        objective="reinforcement",
        method="critic",
        adapter=_adapter(settings, _OF_CRITIC),
        head_outputs=1,
        value_head=True,
        vision=_vision(settings, _OF_CRITIC),
        longest_sample=batch.longest_sample,
    )
    training = OtherTraining(
        words=_words(settings, _OF_CRITIC, model, (*configured.words, *batch.words)),
        tuning=found,
        moved=_moved(settings, _OF_CRITIC),
    )
    context = _count(settings, f"{_OF_CRITIC.engine}context_parallel_size", 1)
    work = ForwardPass(tokens=_count(settings, infer, 32768) * context, logit_bytes=0)
    phase = Phase(name="critic", model_name=model.name, on_host=_moved(settings, _OF_ACTOR), work=work, training=training)
    return phase, [f"Of the critic: {each}" for each in (*batch.notes, *(f"{each} is not counted." for each in configured.unknown))]


def _moved(settings: Mapping[str, str], names: _Names) -> frozenset[StatePart]:
    """States that are not on the GPU outside the phases of a model. Gradients are freed with moved parameters."""
    optimizer: set[StatePart] = {"optimizer"} if settings.get(f"{names.engine}optimizer_offload") == "True" else set()
    return frozenset(optimizer | ({"parameters", "gradients"} if settings.get(f"{names.engine}param_offload") == "True" else set()))


def _vision(settings: Mapping[str, str], names: _Names) -> VisionTraining:
    """The model of a bridge, whose provider can be told what to freeze."""
    if settings.get(f"{names.engine}vanilla_mbridge", "False") == "True":
        return VisionTraining(holder="mbridge")
    prefix = f"{names.engine}override_transformer_config."
    given = {name.removeprefix(prefix): value for name, value in settings.items() if name.startswith(f"{prefix}freeze_")}
    return bridge_vision(given, prefix)


def _tuning(settings: Mapping[str, str], names: _Names) -> FineTuning:
    """Adapters, and the phases of reinforcement learning."""
    adapter = _adapter(settings, names)
    frozen = tuple(
        f"{name}=True"
        for name in (f"{_ACTOR}freeze_vision_tower", f"{names.model}freeze_vision_model")
        if settings.get(name) == "True"
    )
    if names is _OF_TUNING:
        return FineTuning(adapter=adapter, frozen=frozen)
    method = settings.get("algorithm.adv_estimator", "gae").upper()
    return FineTuning(
        objective="reinforcement",
        method="PPO" if method == "GAE" else method,
        adapter=adapter,
        frozen=frozen,
        phases=tuple(_phases(settings, names, adapters=adapter is not None)),
    )


def _phases(settings: Mapping[str, str], names: _Names, *, adapters: bool) -> Iterator[Phase]:
    """The phases beside the update.

    Sources: workers/engine/megatron/transformer_impl.py (`to`, `_lm_head_logits_processor`) and workers/engine_workers.py
    (`update_weights`). Gradients are freed when parameters are moved to the host.
    """

    def on(name: str, default: str = "False") -> bool:
        return settings.get(name, default) == "True"

    apart = not on("actor_rollout_ref.hybrid_engine", "True")
    away = _moved(settings, names)
    optimizer, moved = away & {"optimizer"}, away - {"optimizer"}
    fused = on(f"{names.model}use_fused_kernels")
    # fp32 logits, a copy for the log-probabilities, and that of the entropy; chunks of the last one are small
    bytes_each = 0 if fused else 8 if on(f"{names.engine}entropy_from_logits_with_chunking") else 12
    yield Phase(
        name="log-probabilities",
        on_host=frozenset(optimizer | moved - {"parameters"}),
        work=ForwardPass(tokens=_tokens(settings, "rollout"), logit_bytes=bytes_each),
    )
    engine = Engine(
        name=engine_name(settings.get("actor_rollout_ref.rollout.name")),
        gpu_share=_share(settings, "actor_rollout_ref.rollout.gpu_memory_utilization", 0.5),
        tensor=_count(settings, "actor_rollout_ref.rollout.tensor_model_parallel_size", 2),
        stays=not on("actor_rollout_ref.rollout.free_cache_engine", "True"),
        buffer_bytes=_count(settings, "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes", 2048) * MIB,
    )
    yield Phase(name="rollout", on_same_gpus=not apart, on_host=frozenset(optimizer | moved), work=engine)
    if on(f"{_ACTOR}use_kl_loss") or on("algorithm.use_kl_in_reward"):
        offloaded = on("actor_rollout_ref.ref.megatron.param_offload", str(bool(moved)))
        yield Phase(
            name="reference",
            weights="shared" if adapters else "host" if offloaded else "own",
            on_host=frozenset(optimizer | moved - ({"parameters"} if adapters else set())),
            work=ForwardPass(tokens=_tokens(settings, "ref"), logit_bytes=0 if fused else 6),  # bf16, and then fp32
        )
    yield Phase(name="refit", on_same_gpus=not apart, on_host=frozenset(optimizer | moved - {"parameters"}), work=engine)
    for prefix in ("reward.reward_model.", "reward_model."):
        if on(f"{prefix}enable"):
            yield Phase(name="reward", on_same_gpus=not on(f"{prefix}enable_resource_pool"))
    if on("distillation.enabled"):
        yield Phase(name="teacher", on_same_gpus=False)


def _tokens(settings: Mapping[str, str], role: str) -> int:
    """Tokens of a microbatch of the pass for log-probabilities of the rollout or the reference model."""
    prefix = f"actor_rollout_ref.{role}.log_prob_"
    context = _count(settings, f"{_ACTOR}megatron.context_parallel_size", 1)
    if settings.get(f"{prefix}use_dynamic_bsz", settings.get(f"{_ACTOR}use_dynamic_bsz", "False")) == "True":
        most = _count(settings, f"{_ACTOR}ppo_max_token_len_per_gpu", 16384)
        return _count(settings, f"{prefix}max_token_len_per_gpu", most) * context
    return _count(settings, f"{prefix}micro_batch_size_per_gpu", 1) * _length(settings)


def _share(settings: Mapping[str, str], name: str, default: float) -> float:
    """Raises InputError for a value that is no share."""
    value = settings.get(name, str(default))
    share = share_of(value)
    if share is None:
        raise InputError(name, f"{value!r} is not a number from 0 to 1", f"write {name}={default}")
    return share


def _adapter(settings: Mapping[str, str], names: _Names) -> Adapter | None:
    for name in (f"{names.model}lora.rank", f"{names.model}lora_rank"):
        rank = natural(settings.get(name, "0"))
        if rank:
            kind = kind_named(settings.get(f"{names.model}lora.type", "lora"), f"{names.model}lora.type")
            own = {key.removeprefix(f"{names.model}lora."): value for key, value in settings.items()}
            check_dropout(own, f"{names.model}lora", kind)
            targets = settings.get(f"{names.model}lora.target_modules", settings.get(f"{names.model}target_modules", ""))
            alpha = settings.get(f"{names.model}lora.alpha", settings.get(f"{names.model}lora_alpha"))
            return Adapter(
                kind=kind,
                rank=rank,
                alpha=float(alpha) if alpha is not None and alpha.replace(".", "", 1).isdecimal() else None,
                targets=_names_in(targets),
                excluded=_names_in(own.get("exclude_modules", "")),
                dropout=_share(settings, f"{names.model}lora.dropout", 0.0),
                adapter_dtype=dtype_name(own.get("lora_dtype", own.get("dtype"))),
                share_expert_adapters={"false": False, "true": True}.get(own.get("share_expert_adapters", "").lower()),
                regathers=is_regathered(own, kind),
                options=settings_of_adapter(own, kind),
                source=f"{name}={rank}",
            )
    return None


def _names_in(text: str) -> tuple[str, ...]:
    """The names of a list; none for null."""
    listed = "" if text in ("null", "None") else text
    return tuple(filter(None, (each.strip(" '\"") for each in listed.strip("[]").split(","))))


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


def _configured(settings: Mapping[str, str], names: _Names) -> Words:
    """The options for Megatron's configurations, and the settings that have none."""
    fields = Fields(load_catalogue().newest)
    config = f"{names.engine}override_transformer_config."
    found = Words([] if f"{config}attention_backend" in settings else ["--attention-backend", "flash"])
    gradients = f"{names.engine}override_ddp_config."
    sharded = settings.get(f"{names.engine}use_megatron_fsdp") == "True"
    found.words += _fully_sharded(settings, gradients) if sharded else []
    for prefix in (config, gradients, names.optimizer, f"{names.optimizer}override_optimizer_config."):
        values = {
            name.removeprefix(prefix): _value(value)
            for name, value in settings.items()
            if name.startswith(prefix) and "." not in name.removeprefix(prefix)
        }
        ignored = _IGNORED if sharded else _IGNORED | {"data_parallel_sharding_strategy"}
        found.add(fields.words(values, ignored=ignored, prefix=prefix))
    found.words += _gradients(settings, names)
    for name, value in settings.items():
        rest = name.removeprefix(names.engine)
        if name.startswith(names.engine) and value not in _OFF and not _is_known(rest):
            found.unknown.append(name)
    found.unknown += [name for name in (f"{names.model}{each}" for each in _OF_MODEL) if settings.get(name, "False") not in _OFF]
    return found


def _fully_sharded(settings: Mapping[str, str], prefix: str) -> list[str]:
    """What full sharding sets, unless `override_ddp_config` does (`create_ddp_config` of Megatron-Bridge)."""
    words = ["--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor"]
    if f"{prefix}data_parallel_sharding_strategy" not in settings:
        words += ["--data-parallel-sharding-strategy", "optim_grads_params"]
    return words if f"{prefix}overlap_grad_reduce" in settings else [*words, "--overlap-grad-reduce"]


def _is_known(name: str) -> bool:
    """Whether a setting of the engine is read, or has no effect on the memory of an update."""
    return name in _KNOWN or name in _SIZES or name.startswith(_NESTED) or name.endswith("freeze_moe_router")


def _gradients(settings: Mapping[str, str], names: _Names) -> list[str]:
    """The dtype of gradients: verl reduces in fp32, unless main gradients are in bf16 (`_resolve_override_ddp_config`)."""
    given = settings.get(f"{names.engine}override_ddp_config.grad_reduce_in_fp32")
    if given is None:
        aware = settings.get(f"{names.optimizer}use_precision_aware_optimizer") == "True"
        low = aware and settings.get(f"{names.optimizer}main_grads_dtype", "fp32") == "bf16"
    else:
        low = given in _OFF
    return ["--grad-reduce-in-bf16"] if low else ["--accumulate-allreduce-grads-in-fp32"]


def _value(text: str) -> object:
    """The value of a setting."""
    if text in ("null", "None"):
        return None
    if text in ("True", "true", "False", "false"):
        return text in ("True", "true")
    if text.startswith("[") and text.endswith("]"):
        return [each.strip(" '\"") for each in text[1:-1].split(",") if each.strip(" '\"")]
    return text


def _length(settings: Mapping[str, str]) -> int:
    """Tokens of the longest prompt and response."""
    return _count(settings, "data.max_prompt_length", 512) + _count(settings, "data.max_response_length", 512)


def _batch(settings: Mapping[str, str], world: World) -> Batch:
    """Sequence length and batch sizes of the actor, and the assumptions about them."""
    length = _length(settings)
    samples = _count(settings, f"{_ACTOR}ppo_mini_batch_size", 256) * _count(settings, "actor_rollout_ref.rollout.n", 1)
    if settings.get(f"{_ACTOR}use_dynamic_bsz") == "True":
        setting = f"{_ACTOR}ppo_max_token_len_per_gpu"
        return _packed(settings, f"{_ACTOR}megatron.", world, (_count(settings, setting, 16384), setting), (samples, length))
    setting = f"{_ACTOR}ppo_micro_batch_size_per_gpu"
    micro = _count(settings, setting, 1)
    note = f"Sequences are assumed to have {length} tokens, the longest prompt and response."
    return plain_batch(length, micro, samples, note=note, layout=_layout(settings, _OF_ACTOR.engine, setting, micro))


def _packed(settings: Mapping[str, str], engine: str, world: World, packed: tuple[int, str], batch: tuple[int, int]) -> Batch:
    """Packed microbatches. `packed`: tokens of a context-parallel rank, and their setting. `batch`: samples, and their length."""
    tensor, pipeline, context = (_count(settings, f"{engine}{name}", 1) for name in _MODEL_PARALLEL)
    interleaved = settings.get(f"{engine}virtual_pipeline_model_parallel_size", "null") not in _OFF
    found = packed_batch(
        packed[0] * context,
        packed[1],
        samples=batch[0],
        length=batch[1],
        replicas=replicas_of(world, tensor, pipeline, context),
        multiple=pipeline if interleaved else 1,
    )
    return found._replace(layout=_layout(settings, engine, packed[1], packed[0], of_rank=True))


def _batch_of_tuning(settings: Mapping[str, str], world: World) -> Batch:
    """Sequence length and batch sizes of supervised fine-tuning, and the assumptions about them."""
    length, samples = _count(settings, "data.max_length", 1024), _count(settings, "data.train_batch_size", 256)
    if settings.get("data.use_dynamic_bsz", "True") == "True":
        setting = "data.max_token_len_per_gpu"
        return _packed(settings, "engine.", world, (_count(settings, setting, 8192), setting), (samples, length))
    setting = "data.micro_batch_size_per_gpu"
    micro = _count(settings, setting, 4)
    note = f"Sequences are assumed to have {length} tokens, from data.max_length."
    return plain_batch(length, micro, samples, note=note, layout=_layout(settings, _OF_TUNING.engine, setting, micro))


def _layout(settings: Mapping[str, str], engine: str, microbatch: str, value: int, *, of_rank: bool = False) -> LayoutSettings:
    """Where the layout is set: for the reference model too, if it is given for that."""
    mirrored = (_REFERENCE,) if any(name.startswith(_REFERENCE) and name.endswith("_parallel_size") for name in settings) else ()
    return LayoutSettings(engine, mirrored, microbatch, value, of_rank)


def _not_counted(settings: Mapping[str, str], names: _Names) -> Iterator[str]:
    if settings.get(f"{names.model}use_fused_kernels") == "True":
        yield f"{names.model}use_fused_kernels: whole logits are counted, so the prediction is too high."
    for part in ("param", "grad", "optimizer"):
        if names is _OF_TUNING and settings.get(f"{names.engine}{part}_offload") == "True":
            yield f"{names.engine}{part}_offload is not counted: the memory is that of an update, when everything is on the GPU."
