"""What launches of ms-swift and slime train beside, or instead of, all parameters: adapters, frozen parts, and other models.

Sources: swift/megatron/arguments/megatron_args.py and rlhf_args.py of ms-swift 4.6, slime/utils/arguments.py of slime.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

from analyzer.launch.forks.launch_options import LaunchOptions
from analyzer.launch.forks.plugins import plugin_layers
from analyzer.specs.distillation import DistillationSpec
from analyzer.specs.fine_tuning import (
    ALL_PARAMETERS,
    ALL_STATES,
    Adapter,
    Engine,
    FineTuning,
    ForwardPass,
    Objective,
    Phase,
    StatePart,
)
from analyzer.specs.freezing import FreezeSpec
from analyzer.specs.vision_part import NO_PARTS, SECTIONS, ModelParts, VisionTraining
from analyzer.units import MIB, natural, share_of

SWIFT: Final = "ms-swift"
SLIME: Final = "slime"
PAIRED: Final = ("dpo", "rm")
"""Values of `--rlhf_type` whose samples are two sequences: a chosen and a rejected one. Of KTO the second sequence, which estimates
the KL divergence, is read without gradients (kto_trainer.py)."""
_FALSE: Final = ("", "0", "0.0", "false", "no", "none", "null", "full")
_OBJECTIVES: Final[dict[str, tuple[Objective, str]]] = {
    "dpo": ("preference", "DPO"),
    "kto": ("preference", "KTO"),
    "orpo": ("preference", "ORPO"),
    "simpo": ("preference", "SimPO"),
    "cpo": ("preference", "CPO"),
    "rm": ("reward", "reward model"),
    "gkd": ("distillation", "GKD"),
    "opsd": ("distillation", "OPSD"),
    "grpo": ("reinforcement", "GRPO"),
    "ppo": ("reinforcement", "PPO"),
}
"""By `--rlhf_type`."""
_REFERENCED: Final = ("dpo", "kto")
_HEADS: Final = ("seq_cls", "embedding", "reranker", "generative_reranker")
"""Values of `--task_type` with another head or loss."""
_LABELS: Final = 2
"""Labels of a classification without `--num_labels`: the default of a configuration of transformers."""
_FROZEN: Final = ("--freeze_parameters", "--freeze_parameters_ratio", "--freeze_parameters_regex")
"""Options that act on a training of all parameters only (`prepare_mcore_model`)."""


def tuning_of(launch: LaunchOptions, key: str | None) -> FineTuning:
    """What the launch trains. `key`: the fork that it is for."""
    if key == SWIFT:
        return _of_swift(launch)
    if key == SLIME:
        return _of_slime(launch)
    return ALL_PARAMETERS


def parts_of(launch: LaunchOptions, key: str | None) -> ModelParts:
    """What options of the fork say of the model that those of Megatron-LM do not: slime's norms after attention and FFN, and its
    plugins."""
    norms = ("--post-self-attn-layernorm", "--post-mlp-layernorm")
    if key != SLIME:
        return NO_PARTS
    return ModelParts(variant="GLM-4" if all(launch.has(flag) for flag in norms) else None, plugin=plugin_layers(launch))


def _of_swift(launch: LaunchOptions) -> FineTuning:
    kind = launch.word("--rlhf_type") or ""
    objective, method = _OBJECTIVES.get(kind, ("language model", ""))
    task = launch.word("--task_type") or ""
    if task in _HEADS and not kind:
        objective, method = "classification", task
    outputs = _head_outputs(launch, "seq_cls" if kind == "rm" else task)
    adapter = _swift_adapter(launch)
    phases: tuple[Phase, ...] = ()
    if kind in _REFERENCED:  # `null_ref_context`: with adapters the model without them
        phases = (Phase(name="reference", weights="own" if adapter is None else "shared"),)
    elif objective == "distillation":
        phases = (_teacher(launch, adapters=adapter is not None), *_phases_of_students(launch))
    elif objective == "reinforcement":
        phases = tuple(_phases_of_swift(launch, adapters=adapter is not None))
        if launch.has("--teacher_model"):
            phases = (*phases, _teacher(launch, adapters=adapter is not None))
    flags = _FROZEN if adapter is None else ()
    frozen = tuple(flag for flag in flags if launch.has(flag) and (launch.word(flag) or "").lower() not in _FALSE)
    freezing = _freezing(launch) if frozen else None
    return FineTuning(
        objective=objective,
        method=method,
        adapter=adapter,
        frozen=frozen,
        freezing=freezing,
        phases=phases,
        distillation=_distillation(launch) if objective == "distillation" else None,
        head_outputs=outputs,
        token_score=task == "generative_reranker" and not kind,
        sequences_per_sample=2 if kind in PAIRED else 1,
        vision=None if _true(launch, "--language_model_only") else _vision(launch, adapters=adapter is not None),
        packed=_true(launch, "--packing"),
        longest_counted=objective == "distillation" or (launch.has("--max_length") and not _true(launch, "--packing")),
    )


def _vision(launch: LaunchOptions, *, adapters: bool) -> VisionTraining:
    """What of a multimodal model is frozen (`_init_multimodal_full`). The encoders and the projections are by default.

    What is not frozen has adapters (`get_multimodal_target_regex`), or with `lora_llm` is trained itself (`_prepare_full_vit`).
    """
    if adapters and launch.word(_tuner(launch)) == "lora_llm":
        frozen = tuple((section, False, "lora_llm") for section in SECTIONS)
        return VisionTraining(holder="ms-swift", frozen=frozen, trained_beside_adapters=True)
    flags = {"vision_model": "--freeze_vit", "vision_projection": "--freeze_aligner", "language_model": "--freeze_llm"}
    flags |= {"sound_model": "--freeze_vit", "sound_projection": "--freeze_aligner"}
    frozen = tuple((section, _true(launch, flag), flag) for section, flag in flags.items() if launch.has(flag))
    if adapters:
        adapted = tuple(section for section, is_frozen, _ in frozen if not is_frozen and section in SECTIONS)
        return VisionTraining(holder="ms-swift", frozen=frozen, adapted=adapted)
    named = (name for name in launch.fork.get("--trainable_parameters", ()) if name.startswith("visual"))
    reasons = tuple(f"--trainable_parameters {name} is not read for the vision part" for name in named)
    return VisionTraining(holder="ms-swift", frozen=frozen, uncounted=reasons)


def _head_outputs(launch: LaunchOptions, task: str) -> int | None:
    """The outputs of the head that `--task_type` selects: labels, 1 for a reward, or none for an embedding."""
    if task == "embedding":
        return 0
    if task != "seq_cls":
        return None
    return 1 if launch.word("--rlhf_type") == "rm" else launch.integer("--num_labels", _LABELS)


def _distillation(launch: LaunchOptions) -> DistillationSpec:
    """The loss of GKD (`MegatronGKDTrainer`), and for how many iterations the teacher computes logits."""
    beta = _number(launch.word("--beta"), 0.5)
    samples = max(launch.integer("--global-batch-size", 16), 1)
    iterations = launch.integer("--steps_per_generation", max(launch.integer("--generation_batch_size", samples) // samples, 1))
    return DistillationSpec(
        divergence="forward" if beta == 0 else "reverse" if beta == 1 else "Jensen-Shannon",
        topk=launch.maybe_integer("--gkd_logits_topk"),
        iterations=max(iterations, 1),
        from_server=launch.has("--teacher_model_server"),
        reads_labels=_number(launch.word("--sft_alpha"), 0.0) > 0,
    )


def _teacher(launch: LaunchOptions, *, adapters: bool) -> Phase:
    """The teacher: another model, the one before the training, or without `--teacher_model` the trained model itself.

    Its logits are in the dtype of the weights. Those that it keeps are counted beside the update. With GRPO they are in fp32, less
    their maximum, and the exponentials. Sources: `_check_teacher`, swift/megatron/trainers/{rollout_mixin,gkd_trainer}.py.
    """
    if launch.has("--teacher_model_server"):
        return Phase(name="teacher", on_same_gpus=False)
    tokens = launch.integer("--micro-batch-size", 1) * launch.integer("--max_length", 4096)
    kept = 0 if launch.maybe_integer("--gkd_logits_topk") is None else 2
    work = ForwardPass(tokens=tokens, logit_bytes=kept if launch.word("--rlhf_type") == "gkd" else 12)
    name = launch.word("--teacher_model") or ""
    if not name or (adapters and name == launch.word("--model")):
        return Phase(name="teacher", weights="shared", work=work)
    weights: Literal["host", "own"] = "host" if _true(launch, "--offload_teacher_model") else "own"
    return Phase(name="teacher", weights=weights, model_name=name, work=work)


def _phases_of_students(launch: LaunchOptions) -> Iterator[Phase]:
    """The rollout of a student that also learns from its own responses (`_init_rollout_engine`)."""
    on_policy = _number(launch.word("--lmbda"), 0.5) != 0
    if on_policy and (launch.word("--use_vllm") or "true").lower() not in _FALSE:
        yield from _rollout_of_swift(launch)


def _freezing(launch: LaunchOptions) -> FreezeSpec:
    """What `freeze_parameters` and `activate_parameters` freeze. The parts of a multimodal model have its name before theirs."""
    return FreezeSpec(
        prefixes=_names(launch, "--freeze_parameters"),
        pattern=launch.word("--freeze_parameters_regex") or "",
        ratio=_number(launch.word("--freeze_parameters_ratio"), 0.0),
        trained_prefixes=_names(launch, "--trainable_parameters"),
        trained_pattern=launch.word("--trainable_parameters_regex") or "",
    )


def _names(launch: LaunchOptions, flag: str) -> tuple[str, ...]:
    return tuple(each.removeprefix("language_model.") for each in launch.fork.get(flag, ()) if each.lower() not in _FALSE)


def _phases_of_swift(launch: LaunchOptions, *, adapters: bool) -> Iterator[Phase]:
    """The phases of GRPO beside the update. Sources: swift/megatron/trainers/{grpo_trainer,rollout_mixin,utils}.py.

    The reference model stays on the GPU; with adapters it is the model without them. Log-probabilities are those of a microbatch.
    """
    length = launch.integer("--max_length", 0) + launch.integer("--max_completion_length", 512)
    tokens = launch.integer("--micro-batch-size", 1) * length
    work = ForwardPass(tokens=tokens, logit_bytes=12)  # fp32 logits, less their maximum, and the exponentials
    yield Phase(name="log-probabilities", work=work)
    if (launch.word("--beta") or "") not in ("0", "0.0"):
        yield Phase(name="reference", weights="shared" if adapters else "own", work=work)
    yield from _rollout_of_swift(launch)


def _rollout_of_swift(launch: LaunchOptions) -> Iterator[Phase]:
    """The rollout with vLLM, and the refit."""
    same = (launch.word("--vllm_mode") or "colocate") == "colocate"
    moved: set[StatePart] = {"parameters", "gradients"} if _true(launch, "--offload_model") else set()
    optimizer: set[StatePart] = {"optimizer"} if _true(launch, "--offload_optimizer") else set()
    engine = Engine(
        gpu_share=_number(launch.word("--vllm_gpu_memory_utilization"), 0.9),
        tensor=launch.integer("--vllm_tensor_parallel_size", 1),
        stays=launch.integer("--sleep_level", 0) == 0,
    )
    yield Phase(name="rollout", on_same_gpus=same, on_host=frozenset(moved | optimizer), work=engine)
    yield Phase(name="refit", on_same_gpus=same, on_host=frozenset(optimizer | moved - {"parameters"}), work=engine)


def _true(launch: LaunchOptions, flag: str) -> bool:
    return (launch.word(flag) or "false").lower() not in _FALSE


def _tuner(launch: LaunchOptions) -> str:
    """The option that says what is trained, in the current or the former spelling."""
    return "--train_type" if launch.has("--train_type") and not launch.has("--tuner_type") else "--tuner_type"


def _swift_adapter(launch: LaunchOptions) -> Adapter | None:
    flag = _tuner(launch)
    kind = launch.word(flag)
    if kind is None or kind.lower() in _FALSE:
        return None
    return Adapter(
        kind="lora" if kind.startswith("lora") else "other",
        rank=launch.integer("--lora_rank", 8),
        alpha=float(launch.integer("--lora_alpha", 32)),
        targets=tuple(launch.fork.get("--target_modules", ("all-linear",))),
        dropout=_number(launch.word("--lora_dropout"), 0.05),
        share_expert_adapters=False,
        layers="transformer_engine",
        also_trained=tuple(each for each in launch.fork.get("--modules_to_save", ()) if each.lower() not in _FALSE),
        adapter_dtype={"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}.get(launch.word("--lora_dtype") or ""),
        source=f"{flag} {kind}",
    )


def _of_slime(launch: LaunchOptions) -> FineTuning:
    rank = natural(launch.word("--lora-rank") or launch.word("--lora_rank") or "")
    adapter = None
    if rank:
        targets = launch.fork.get("--target-modules", ())
        adapter = Adapter(kind="lora", rank=rank, targets=tuple(targets), source=f"--lora-rank {rank}")
    if launch.word("--loss-type") == "sft_loss":
        return FineTuning(adapter=adapter)
    same = launch.has("--colocate")
    phases = [*_phases_of_slime(launch, same=same)]
    estimator = launch.word("--advantage-estimator") or "grpo"
    if estimator == "ppo":
        phases.append(Phase(name="critic", on_same_gpus=same))
    filled = launch.has("--use-dynamic-batch-size") and launch.has("--max-tokens-per-gpu")
    return FineTuning(objective="reinforcement", method=estimator.upper(), adapter=adapter, phases=tuple(phases), filled=filled)


def _phases_of_slime(launch: LaunchOptions, *, same: bool) -> Iterator[Phase]:
    """The phases beside the update. With `--colocate` the training is not on the GPU while the engine generates.

    Sources: backends/megatron_utils/{actor,loss}.py, utils/{arguments,tensor_backper,reloadable_process_group}.py. The weights of
    the reference model are in host memory, and replace those of the actor for its pass. Process groups are destroyed while the
    training sleeps.
    """
    tokens = launch.integer("--log-probs-max-tokens-per-gpu", launch.integer("--max-tokens-per-gpu", 0))
    tokens *= launch.integer("--context-parallel-size", 1)
    # bf16 logits, and then fp32 with a contiguous copy of those of a sample
    work = ForwardPass(tokens=tokens, logit_bytes=8) if tokens and launch.has("--use-dynamic-batch-size") else None
    yield Phase(name="log-probabilities", work=work)
    share = share_of(launch.word("--sglang-mem-fraction-static") or "")
    tensor = launch.integer("--rollout-num-gpus-per-engine", 1)
    buffer = launch.integer("--update-weight-buffer-size", 512 * MIB)
    engine = Engine(name="sglang", gpu_share=share, tensor=tensor, buffer_bytes=buffer) if share is not None else None
    yield Phase(name="rollout", on_same_gpus=same, on_host=ALL_STATES, work=engine, groups_stay=False)
    yield Phase(name="refit", on_same_gpus=same, on_host=ALL_STATES - {"parameters"}, work=engine)
    if launch.has("--use-kl-loss") or _number(launch.word("--kl-coef"), 0.0) != 0:
        yield Phase(name="reference", weights="swapped", work=work)


def _number(word: str | None, default: float) -> float:
    try:
        return default if word is None else float(word)
    except ValueError:
        return default
