"""DeepSeek-V4: a GPT with multi-latent attention in its options, whose attention and residual stream are of other kinds.

Megatron: `TransformerConfig.__post_init__` and `DSv4HybridAttention` of the branch dev, August 2026 (b3b1e2d7).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.info_options import MODEL
from analyzer.specs.release import is_before

if TYPE_CHECKING:
    from collections.abc import Iterator

    from analyzer.launch.derive.launch_input import LaunchInput
    from analyzer.specs import TrainingJob
    from analyzer.specs.attention import CompressedModel

_MOST_STREAMS: Final = 1000
_COMPARED_MODULES: Final = frozenset({"moe_act", "mla_up_proj"})
"""Modules whose recompute was compared, beside that of the stream."""


def with_compressed_attention(launch: LaunchInput, job: TrainingJob) -> TrainingJob:
    """The job with the attention and the residual stream of DeepSeek-V4. Raises InputError for releases before core 0.19."""
    parts = launch.arguments.parts.compressed
    assert parts is not None
    if is_before(job.megatron, "0.19"):
        fault = "the layers of DeepSeek-V4 are in the branch dev of Megatron-LM, which follows core 0.19"
        raise InputError(MODEL, fault, "add --info-megatron 0.19.0")
    parts = replace(parts, attention=replace(parts.attention, ratios=_ratios(parts, job)))
    _check_sizes(parts, job)
    _check_features(parts, job)
    launch.assume(
        "The layers of DeepSeek-V4 are those of the branch dev of Megatron-LM: attention to the last tokens and to compressed keys"
        + (f", and a residual stream of {parts.hyper_connections.streams} parts." if parts.hyper_connections else "."),
        "Kernels of its attention are assumed to be as fast as those of dense attention with as many operations, and those of its "
        "residual stream to be limited by memory: no measurements are known, and the time is probably too low.",
    )
    moe = None if job.model.moe is None else replace(job.model.moe, hash_layers=parts.hash_layers)
    model = replace(job.model, moe=moe, compressed_attention=parts.attention, hyper_connections=parts.hyper_connections)
    job = replace(job, model=model)
    return replace(job, withheld=(*job.withheld, *_reasons(job, parts)))


def _reasons(job: TrainingJob, parts: CompressedModel) -> Iterator[str]:
    """What Megatron-LM's code was not run with, so that the tensors were not compared with those that it allocates."""
    fp8, moe, spec, graphs = job.precision.fp8, job.model.moe, parts.attention, job.graphs
    found = {
        "context parallelism": job.parallel.context > 1,
        "packed samples": job.tuning.packed or job.tuning.sample_length is not None,
        "FSDP": job.fsdp is not None,
        "parameters in fp32 or fp16": job.precision.parameters != "bf16",
        "FP4": fp8 is not None and fp8.format == "e2m1",
        "a layer-wise optimizer": job.optimizer.facts.layer_wise,
        "several instances of the distributed optimizer": job.parallel.distributed_optimizer_instances > 1,
        "an optimizer on the host": job.optimizer.offload is not None,
        "offloaded activations": job.activation_offload is not None,
        "layers without experts": moe is None or not all(moe.layers),
        "unfused rotations": not job.model.rope_fusion,
        "a loss of the indexer over all keys": spec.logged and not spec.sparse_loss,
        "graphs of single layers": graphs is not None and "full_iteration" not in graphs.scope,
        **{f"{name} recomputed": True for name in job.recompute.modules if name not in _COMPARED_MODULES},
        **dict.fromkeys(parts.not_compared, True),
    }
    for feature, used in found.items():
        if used:
            yield f"the memory of layers of DeepSeek-V4 with {feature} was not compared with that of Megatron-LM"


def _ratios(parts: CompressedModel, job: TrainingJob) -> tuple[int, ...]:
    """Those of the decoder layers and MTP layers of the launch. Raises InputError if it has more of either than the model."""
    given, layers, depths = parts.attention.ratios, job.model.num_layers, job.model.mtp_num_layers
    for option, count, known in (("--num-layers", layers, parts.layers), ("--mtp-num-layers", depths, len(given) - parts.layers)):
        if count > known:
            fault = f"{count} layers, and the model states the attention of {known}"
            raise InputError(option, fault, f"use {known} at most, or a configuration with more compression ratios")
    return (*given[:layers], *given[parts.layers : parts.layers + depths])


def _check_sizes(parts: CompressedModel, job: TrainingJob) -> None:
    """Raises InputError for options that contradict the model, and for sizes that the layers refuse."""
    mla, own = job.model.mla, parts.attention
    assert mla is not None, "the options of DeepSeek-V4 have multi-latent attention"
    pairs = (
        ("--q-lora-rank", mla.q_lora_rank, own.q_lora_rank),
        ("--kv-lora-rank", mla.kv_lora_rank, own.head_dim),
        ("--v-head-dim", mla.v_head_dim, own.head_dim),
        ("--qk-head-dim", mla.qk_head_dim, own.head_dim - mla.qk_pos_emb_head_dim),
    )
    for option, found, wanted in pairs:
        if found != wanted:
            raise InputError(
                option, f"{found}, and the attention of the model has {wanted}", "leave it out, or change the configuration"
            )
    heads, groups = job.model.num_attention_heads, own.output_groups
    if heads % groups:
        fault = f"{heads} heads cannot be divided into {groups} groups of the output projection (o_groups)"
        raise InputError("--num-attention-heads", fault, f"use a multiple of {groups}")
    if parts.hash_layers > job.model.num_layers:
        fault = f"{job.model.num_layers} layers, and the model has hashed routing in the first {parts.hash_layers}"
        raise InputError("--num-layers", fault, f"use {parts.hash_layers} or more")


def _check_features(parts: CompressedModel, job: TrainingJob) -> None:
    """Raises UnsupportedError for what is not modelled together with hyper-connections."""
    if parts.hyper_connections is None:
        return
    if parts.hyper_connections.streams > _MOST_STREAMS:
        fault = f"a residual stream of {parts.hyper_connections.streams} parts is above {_MOST_STREAMS}, the most that are modelled"
        raise UnsupportedError(MODEL, fault, "give less (hc_mult, or num_residual_streams)")
    if job.graphs is not None and "full_iteration" not in job.graphs.scope:
        fault = "graphs of layers with hyper-connections are not modelled"
        raise UnsupportedError("--cuda-graph-scope", fault, "use full_iteration, or leave --cuda-graph-impl out")
    if job.model.hidden_dropout:
        raise UnsupportedError("--hidden-dropout", "is not modelled with hyper-connections", "write --hidden-dropout 0")
