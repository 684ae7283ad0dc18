"""Inference launches: `--info-inference` and `--info-quantize`, and Megatron's inference scripts with their own options.

The options of the scripts are those of `add_inference_args` (megatron/inference/utils.py), `add_text_generate_args`
(tools/run_text_generation_server.py) and `add_inference_benchmarking_args` (tools/run_inference_performance_test.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from analyzer.errors import InputError
from analyzer.units import length, natural

INFERENCE: Final = "--info-inference"
ONLY_INFERENCE: Final = ("--info-quantize", "--info-offload", "--info-serving-engine", "--info-serving", "--info-serving-search")
"""Options that only inference uses."""
ONLY_TRAINING: Final = (
    "--info-engine", "--info-against", "--info-log", "--info-record", "--info-allocator", "--info-check", "--info-allow-truncated",
    "--info-tolerance", "--info-lora", "--info-lora-regather", "--info-sample-length", "--info-image-tokens",
    "--info-rank", "--info-layers", "--info-calibrate", "--info-calibrate-disk", "--info-tokens",
    "--info-search", "--info-search-over", "--info-keep", "--info-search-gpus", "--info-search-max",
    "--info-faster", "--info-search-fewest-gpus", "--info-search-days",
    "--info-search-thorough", "--info-search-time", "--info-search-csv", "--info-workers", "--info-launch", "--info-print-options",
    "--info-detail", "--info-timeline",
)  # fmt: skip
"""Options that only the analysis of a training uses."""
STATIC_SCRIPTS: Final = ("run_text_generation_server", "gpt_static_inference", "run_inference_performance_test")
DYNAMIC_SCRIPTS: Final = ("run_dynamic_text_generation_server", "gpt_dynamic_inference", "gpt_dynamic_inference_with_coordinator")
_LISTS: Final = frozenset({"--prompts", "--num-tokens-to-prompt", "--stop-words"})
_SWITCHES: Final = frozenset(
    {
        *("--return-log-probs", "--num-tokens-from-file", "--skip-prompt-log-probs", "--use-flashinfer-fused-rope"),
        *("--no-record-throughput", "--inference-ckpt-non-strict", "--throughput-check-only", "--stream", "--benchmark-profile"),
    }
)
_VALUES: Final = frozenset(
    {
        *("--port", "--temperature", "--top_k", "--top_p", "--num-tokens-to-generate", "--max-batch-size", "--top-n-logprobs"),
        *("--incoming-requests-per-step", "--incoming-requests-per-sec", "--incoming-requests-duration", "--model-provider"),
        *("--output-path", "--output-every-n-results", "--prompt-file", "--prompt-file-num-truncate", "--termination-id"),
        *("--suspend-resume-interval", "--inference-repeat-n", "--num-input-tokens", "--engine-type", "--out-seq-length"),
    }
)
MOST: Final = "max"
"""The batch that is the largest that fits."""
_FIELDS: Final = ("batch", "prompt", "generate")
_LARGEST: Final = 10**8


class Generation(NamedTuple):
    """What is generated: requests of one replica, tokens of each prompt, and tokens that are generated for it."""

    batch: int | None
    """None for the largest that fits."""
    prompt: int
    generate: int


@dataclass(frozen=True)
class ScriptOptions:
    """The options that belong to an inference script and not to Megatron's parser."""

    script: str = ""
    """Name of the inference script, without its folder and .py; empty if the launch names another script or none."""
    values: Mapping[str, tuple[str, ...]] | None = None

    def number(self, flag: str) -> int | None:
        """The last number of an option; None if it is not given. Raises InputError for another word."""
        words = (self.values or {}).get(flag)
        if not words:
            return None
        value = natural(words[-1])
        if not value or value > _LARGEST:
            raise InputError(flag, f"{words[-1]!r} is not a number from 1 to {_LARGEST}", "write a number of tokens, such as 256")
        return value

    def word(self, flag: str) -> str | None:
        """The value of an option; None if it is not given."""
        words = (self.values or {}).get(flag)
        return words[-1] if words else None


def asks_for_inference(argv: Sequence[str]) -> bool:
    """Whether the words of a launch ask for the analysis of inference: with `--info-inference`, or by an inference script.

    Raises InputError for options of inference in other launches, and for options of a training in an inference launch.
    """
    names = {word.partition("=")[0] for word in argv}
    script = script_of(argv)
    if INFERENCE not in names and script is None:
        for option in ONLY_INFERENCE:
            if option in names:
                example = f"{INFERENCE} batch=8,prompt=2048,generate=256"
                raise InputError(option, f"is only used with {INFERENCE}", f"add {example}, or leave it out")
        return False
    cause = INFERENCE if INFERENCE in names else str(script)
    for option in ONLY_TRAINING:
        if option in names:
            fault = f"is for the analysis of a training, and {cause} asks for inference"
            raise InputError(option, fault, "leave one of the two out")
    return True


def script_of(argv: Sequence[str]) -> str | None:
    """The name of Megatron's inference script among the words, without its folder and .py."""
    for word in argv:
        name = re.split(r"[/\\.]", word.removesuffix(".py"))[-1]
        is_file = word.endswith(".py") or not word.startswith("-")
        if is_file and name in (*STATIC_SCRIPTS, *DYNAMIC_SCRIPTS):
            return name
    return None


def without_script_options(argv: Sequence[str]) -> tuple[list[str], ScriptOptions]:
    """The words without the options of the inference script, and those options. All words if there is no such script."""
    script = script_of(argv)
    if script is None:
        return list(argv), ScriptOptions()
    kept: list[str] = []
    found: dict[str, tuple[str, ...]] = {}
    position = 0
    while position < len(argv):
        flag, equals, attached = argv[position].partition("=")
        position += 1
        if flag not in _LISTS | _SWITCHES | _VALUES:
            kept.append(argv[position - 1])
            continue
        if equals or flag in _SWITCHES:
            found[flag] = (attached,) if equals else ()
            continue
        end = position
        while end < len(argv) and not argv[end].startswith("--") and (flag in _LISTS or end == position):
            end += 1
        found[flag] = tuple(argv[position:end])
        position = end
    return kept, ScriptOptions(script, found)


def generation(option: str, text: str | None) -> Generation:
    """The value of `--info-inference`: lengths may have a suffix, as 32k of 1,024 tokens each, and the batch may be max.

    Raises InputError unless each of batch, prompt and generate is given once.
    """
    remedy = f"write {option} batch=8,prompt=2048,generate=256, or batch=max for the largest batch that fits"
    found: dict[str, int | None] = {}
    for part in (text or "").split(","):
        key, _, number = (each.strip() for each in part.partition("="))
        if key == "batch" and number == MOST and key not in found:
            found[key] = None
            continue
        value = length(number) if key != "batch" else natural(number)
        if key not in _FIELDS or key in found or not value or value > _LARGEST:
            raise InputError(option, f"{part!r} is not one of batch, prompt, generate with a number from 1 to {_LARGEST}", remedy)
        found[key] = value
    missing = [field for field in _FIELDS if field not in found]
    if missing:
        raise InputError(option, f"it does not give {missing[0]}", remedy)
    return Generation(**found)  # type: ignore[arg-type]


class Quantization(NamedTuple):
    """Bits of weights, activations and cache, and the elements that share a scale in 4-bit tensors."""

    weights: int
    activations: int
    cache: int
    group: int


_QUANTIZATION: Final = re.compile(r"(?=[wak])(?:w(4|8|16))?(?:a(4|8|16))?(?:kv(4|8|16))?(?:g(\d{1,5}))?", re.ASCII)
GROUP: Final = 64
"""Elements that share a scale if the option does not tell: the group size of FlexLLMGen's 4-bit compression."""


def quantization(option: str, text: str | None) -> Quantization:
    """The value of `--info-quantize`: w4a16kv8, and with g128 groups of 128 elements. Parts that are left out have 16 bits: kv8."""
    found = _QUANTIZATION.fullmatch(text or "")
    if found is None or not int(found[4] or 1):
        fault = f"{text!r} does not give the bits of weights, activations and cache, each 4, 8 or 16"
        raise InputError(
            option, fault, "write such as w4a16kv8, kv8 for the cache alone, or w4a16kv4g128 with 128 elements in a group"
        )
    weights, activations, cache = (int(found[index] or 16) for index in (1, 2, 3))
    return Quantization(weights, activations, cache, int(found[4] or GROUP))
