"""Launches of ms-swift (`megatron sft`): values of flags, the model, and defaults.

Source: swift/megatron/arguments/megatron_args.py and megatron_base_args.py of ms-swift 4.6. All flags take a value, and the sizes
of the model come from the config.json of `--model`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from analyzer.launch.forks.launch_options import NOTHING, LaunchOptions, Reading
from analyzer.launch.options.option_table import Option
from analyzer.launch.other_models import refuse_other_model

KEY: Final = "ms-swift"
TRUE: Final = ("true", "1", "yes", "t", "y")
_FALSE: Final = ("false", "0", "no", "f", "n")
_DEFAULTS: Final = (
    ("--use-distributed-optimizer",),
    ("--cross-entropy-loss-fusion",),
    ("--make-vocab-size-divisible-by", "1"),
    ("--recompute-granularity", "selective"),
    ("--attention-backend", "flash"),
    ("--micro-batch-size", "1"),
    ("--global-batch-size", "16"),
)
"""Defaults that differ from those of Megatron-LM. The vocabulary is padded to a multiple of the tensor-parallel size (`GPTModel` of
mcore-bridge)."""
_SHARDED: Final = "--use-distributed-optimizer"
_OF_EXPERTS: Final = (
    ("--moe-token-dispatcher-type", "alltoall"),
    ("--moe-grouped-gemm",),
    ("--moe-router-dtype", "fp32"),
    ("--moe-aux-loss-coeff", "0"),
    ("--expert-tensor-parallel-size", "1"),
)
"""The same for models with experts."""
_FP32_GRADIENTS: Final = "--accumulate-allreduce-grads-in-fp32"
_LENGTH: Final = "4096"
"""Tokens of a sequence that are assumed without `--max_length`, whose default is the longest sequence of the model."""


def without_values_of_flags(words: Sequence[str], known: Mapping[str, Option]) -> tuple[str, ...]:
    """`words` with Megatron's flags, such as `--finetune true`, without their values; false ones as `--use_rope_fusion=false`.

    Options with underscores are those of ms-swift, which may be on by default.
    """
    kept: list[str] = []
    position = 0
    while position < len(words):
        flag, equals, attached = words[position].partition("=")
        position += 1
        following = words[position] if position < len(words) and not equals else attached
        value = following.lower()
        if flag not in known or known[flag].kind == "store" or value not in (*TRUE, *_FALSE):
            kept.append(words[position - 1])
            continue
        own = f"--{flag[2:].replace('-', '_')}"
        kept += [flag] if value in TRUE else [f"{own}=false"] if own != flag else []
        position += 0 if equals else 1
    return tuple(kept)


def model_of(given: Mapping[str, Sequence[str]], others: Mapping[str, Sequence[str]]) -> str | None:
    """The published model or the path that `--model`, `--mcore_model` or `--load` names; None if sizes are given.

    `given` are the options that Megatron-LM lacks, `others` those that it has, both by flag with their values.
    """
    from analyzer.launch.model_config.published import published_model  # reads the catalogue of models

    launch = LaunchOptions(given, others)
    if launch.has("--num-layers") or launch.has("--num_layers"):
        return None
    flag = next((each for each in ("--model", "--mcore_model", "--load") if launch.word(each)), None)
    if flag is None:
        return None
    named = launch.word(flag) or ""
    published = published_model(named)
    if published is None and not Path(named).is_dir():
        refuse_other_model(flag, named)
    return published or named.rstrip("/")


def model_configuration(launch: LaunchOptions, flag: str) -> Reading:
    """The model, whose configuration is read unless sizes are given (`model_of`)."""
    if not launch.has("--num-layers"):
        return NOTHING
    return Reading(warnings=(f"{flag}: its config.json is not read, and only sizes given as options are counted.",))


def defaults(launch: LaunchOptions) -> Reading:
    """What the launch does not give."""
    absent = [words for words in _DEFAULTS if not _gives(launch, words[0])]
    of_experts = tuple(word for words in _OF_EXPERTS if not _gives(launch, words[0]) for word in words)
    dropped: tuple[str, ...] = ()
    if (launch.word("--optimizer") or "").endswith("muon"):  # ms-swift then sets use_distributed_optimizer to False
        absent = [words for words in absent if words[0] != _SHARDED]
        dropped = (_SHARDED,)
    if not _gives(launch, _FP32_GRADIENTS) and launch.word("--main-grads-dtype") in (None, "fp32"):
        absent.append((_FP32_GRADIENTS,))
    if (launch.word("--apply_rope_fusion") or "false").lower() not in TRUE:
        absent.append(("--no-rope-fusion",))
    if (launch.word("--padding_free") or "true").lower() in TRUE:
        absent.append(("--no-create-attention-mask-in-dataloader",))
    if not (launch.has("--fp16") or launch.has("--bf16")):
        absent.append(("--bf16",))
    words = tuple(word for each in absent for word in each)
    if launch.has("--num-experts"):
        words, of_experts = (*words, *of_experts), ()
    if launch.has("--max_length") or launch.has("--seq-length"):
        return Reading(words=words, of_experts=of_experts, dropped=dropped)
    warning = f"--max_length is not given: sequences of {_LENGTH} tokens are counted, so the prediction may be too high or too low."
    return Reading(words=(*words, "--seq-length", _LENGTH), of_experts=of_experts, warnings=(warning,), dropped=dropped)


def _gives(launch: LaunchOptions, flag: str) -> bool:
    """Whether the launch has the option, in Megatron's spelling or, as flags that are false, in that of ms-swift."""
    return launch.has(flag) or launch.has(f"--{flag[2:].replace('-', '_')}")
