"""Options of Megatron-DeepSpeed: ZeRO, partitions of the pipeline, recomputation, and sequence parallelism.

Sources: megatron/arguments.py and megatron/model/gpt_model.py of microsoft/Megatron-DeepSpeed and
bigscience-workshop/Megatron-DeepSpeed; deepspeed/runtime/engine.py and deepspeed/runtime/bf16_optimizer.py of DeepSpeed.
"""

from __future__ import annotations

from analyzer.launch.forks.launch_options import NOTHING, LaunchOptions, Reading

_SHARDED = ("--use-distributed-optimizer",)
_NOT_SHARDED = {
    2: "gradients are counted as without sharding, so the prediction is too high",
    3: "gradients and parameters are counted as without sharding, so the prediction is too high",
}


def zero_stage(launch: LaunchOptions, flag: str) -> Reading:
    """Stage 1 shards optimizer states, as the distributed optimizer does. DeepSpeed's BF16 optimizer does so in stage 0, too."""
    stage = launch.integer(flag, 0)
    if not launch.has("--deepspeed"):
        return NOTHING
    if stage == 0 and not launch.has("--bf16"):
        return NOTHING
    words = () if launch.has("--use-distributed-optimizer") else _SHARDED
    if stage == 0:
        return Reading(
            words=words,
            notes=(f"{flag} 0 is read as {_SHARDED[0]}: with --bf16 DeepSpeed shards the optimizer states in stage 0, too.",),
        )
    if stage == 1:
        return Reading(words=words)
    return Reading(words=words, warnings=(f"{flag} {stage}: {_NOT_SHARDED[min(stage, 3)]}.",))


def configuration(launch: LaunchOptions, flag: str) -> Reading:
    """The configuration file is not read: without `--zero-stage` its stage is unknown."""
    if not launch.has("--deepspeed") or launch.has("--zero-stage"):
        return NOTHING
    fault = "the ZeRO stage in this file is not read, and optimizer states are counted as without sharding"
    return Reading(warnings=(f"{flag}: {fault}, so the prediction may be too high.",))


def remote_device(launch: LaunchOptions, flag: str) -> Reading:
    """Parameters in host memory or in files."""
    if launch.word(flag) in (None, "none"):
        return NOTHING
    return Reading(warnings=(f"{flag}: parameters are counted on the GPU, so the prediction is too high.",))


def partition_activations(launch: LaunchOptions, flag: str) -> Reading:  # noqa: ARG001
    """Saved layer inputs are split over tensor-parallel ranks."""
    if launch.tensor == 1 or not (launch.has("--checkpoint-activations") or launch.word("--recompute-granularity") == "full"):
        return NOTHING
    return Reading(words=("--distribute-saved-activations",))


def checkpoint_activations(launch: LaunchOptions, flag: str) -> Reading:  # noqa: ARG001
    """Full recomputation, by chunks of `--checkpoint-num-layers` layers (default 1)."""
    method = launch.word("--activations-checkpoint-method") or launch.word("--checkpoint-method") or "uniform"
    return Reading(words=_full(launch, method), dropped=_RECOMPUTE)


def checkpoint_method(launch: LaunchOptions, flag: str) -> Reading:
    """The method that enables full recomputation in the code of 2021 and 2022."""
    granularity = launch.word("--activations-checkpoint-granularity") or launch.word("--checkpoint-granularity")
    if launch.has("--checkpoint-activations") or granularity == "selective":
        return NOTHING
    return Reading(words=_full(launch, launch.word(flag) or "uniform"), dropped=_RECOMPUTE)


def checkpoint_granularity(launch: LaunchOptions, flag: str) -> Reading:
    """Selective recomputation; full recomputation is read from the method."""
    if launch.word(flag) == "selective":
        return Reading(words=("--recompute-granularity", "selective"))
    return NOTHING


def no_reading(launch: LaunchOptions, flag: str) -> Reading:  # noqa: ARG001
    """An option that the reading of another one includes."""
    return NOTHING


def sequence_parallel(launch: LaunchOptions, flag: str) -> Reading:
    """Sequences split over ranks that exchange heads and tokens by all-to-all, as in Ulysses."""
    size = launch.integer(flag, 1)
    if size == 1:
        return NOTHING
    return Reading(words=("--context-parallel-size", str(size), "--cp-comm-type", "a2a"))


def partition_method(launch: LaunchOptions, flag: str) -> Reading:
    """`type:transformer|embedding` counts the embedding and the output layer as layers when layers are split over stages."""
    method = (launch.word(flag) or "").lower()
    layers = launch.integer("--num-layers", 0)
    if launch.pipeline == 1 or method in ("type:transformer", "uniform"):
        return NOTHING
    if method == "type:transformer|embedding" and (layers + 2) % launch.pipeline == 0:
        return Reading(words=("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"))
    return Reading(warnings=(f"{flag}: layers are counted as split evenly, so the prediction may be too high or too low.",))


_RECOMPUTE = ("--checkpoint-activations",)


def _full(launch: LaunchOptions, method: str) -> tuple[str, ...]:
    layers = launch.word("--activations-checkpoint-num-layers") or launch.word("--checkpoint-num-layers") or "1"
    return ("--recompute-granularity", "full", "--recompute-method", method, "--recompute-num-layers", layers)
