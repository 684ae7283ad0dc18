"""What launches of ms-swift and slime train beside, or instead of, all parameters: adapters, frozen parts, and other models.

Sources: swift/megatron/arguments/megatron_args.py and rlhf_args.py of ms-swift 4.6, slime/utils/arguments.py of slime.
"""

from __future__ import annotations

from typing import Final

from analyzer.launch.forks.launch_options import LaunchOptions
from analyzer.specs.fine_tuning import ALL_PARAMETERS, Adapter, FineTuning, Objective, Phase
from analyzer.units import natural

SWIFT: Final = "ms-swift"
SLIME: Final = "slime"
PAIRED: Final = ("dpo", "rm", "kto")
"""Values of `--rlhf_type` whose samples are two sequences: a chosen and a rejected one, or for KTO one that estimates the KL."""
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
_FROZEN: Final = ("--freeze_llm", "--freeze_parameters", "--freeze_parameters_ratio", "--freeze_parameters_regex")


def tuning_of(launch: LaunchOptions, key: str | None) -> FineTuning:
    """What the launch trains. `key`: the fork that it is for."""
    if key == SWIFT:
        return _of_swift(launch)
    if key == SLIME:
        return _of_slime(launch)
    return ALL_PARAMETERS


def _of_swift(launch: LaunchOptions) -> FineTuning:
    kind = launch.word("--rlhf_type") or ""
    objective, method = _OBJECTIVES.get(kind, ("language model", ""))
    task = launch.word("--task_type") or ""
    if task in _HEADS and not kind:
        objective, method = "classification", task
    phases: tuple[Phase, ...] = ()
    if kind in _REFERENCED:
        phases = (Phase(name="reference"),)
    elif objective == "distillation":
        phases = (Phase(name="teacher"),)
    elif objective == "reinforcement":
        same = (launch.word("--vllm_mode") or "colocate") == "colocate"
        reference = () if (launch.word("--beta") or "") in ("0", "0.0") else (Phase(name="reference"),)
        phases = (Phase(name="log-probabilities"), *reference, Phase(name="rollout", on_same_gpus=same), Phase(name="refit"))
    frozen = tuple(flag for flag in _FROZEN if launch.has(flag) and (launch.word(flag) or "").lower() not in _FALSE)
    return FineTuning(
        objective=objective,
        method=method,
        adapter=_swift_adapter(launch),
        frozen=frozen,
        phases=phases,
        sequences_per_sample=2 if kind in PAIRED else 1,
    )


def _swift_adapter(launch: LaunchOptions) -> Adapter | None:
    flag = next((each for each in ("--tuner_type", "--train_type") if launch.has(each)), None)
    kind = launch.word(flag) if flag is not None else None
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
    phases = [Phase(name="log-probabilities"), Phase(name="rollout", on_same_gpus=same), Phase(name="refit")]
    if launch.has("--use-kl-loss") or _number(launch.word("--kl-coef"), 0.0) != 0:
        phases.append(Phase(name="reference", offloaded=True))
    estimator = launch.word("--advantage-estimator") or "grpo"
    if estimator == "ppo":
        phases.append(Phase(name="critic", on_same_gpus=same))
    return FineTuning(objective="reinforcement", method=estimator.upper(), adapter=adapter, phases=tuple(phases))


def _number(word: str | None, default: float) -> float:
    try:
        return default if word is None else float(word)
    except ValueError:
        return default
