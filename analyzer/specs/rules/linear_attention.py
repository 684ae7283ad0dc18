"""Rules for linear attention and for output gates: what Megatron refuses or computes wrongly, and what is not modelled with them.

Source: `TransformerConfig.__post_init__`, `GatedDeltaNet` (core/ssm/gated_delta_net.py) and
`SelfAttention.get_query_key_value_tensors` (core/transformer/attention.py), 0.16 to 0.19.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from analyzer.specs.attention import LinearAttentionSpec
from analyzer.specs.job import TrainingJob
from analyzer.specs.release import is_before
from analyzer.specs.release_changes import core_failures
from analyzer.specs.rules.violation import Violation

_LEAVE: Final = "leave it out"
_FP8_ROWS: Final = 16
"""Elements of which GEMMs in FP8 read a multiple."""
_NOT_MODELLED: Final = "is not modelled with linear attention"


def linear_attention_violations(job: TrainingJob) -> Iterator[Violation]:
    """Layouts and features that exclude linear attention or output gates."""
    yield from _gates_of_few_groups(job)
    linear = job.model.linear_attention
    if linear is None:
        return
    yield from _heads(linear, job.parallel.tensor)
    yield from _quantized_width(job, linear)
    yield from _context(job, linear)
    yield from _mtp_layers(job)
    yield from _features(job)


def _gates_of_few_groups(job: TrainingJob) -> Iterator[Violation]:
    """With fewer groups than ranks, queries are sliced and gates are not, so that their product fails. Fixed in 0.17."""
    few = job.model.mla is None and job.model.num_query_groups < job.parallel.tensor
    if job.model.output_gate and few and core_failures(job.megatron).gates_of_few_groups:
        yield Violation(
            ("attention_output_gate",),
            f"fails in this release with fewer query groups ({job.model.num_query_groups}) than tensor-parallel ranks",
            f"use --tensor-model-parallel-size {job.model.num_query_groups} or less",
        )


def _head_counts(linear: LinearAttentionSpec) -> tuple[tuple[str, str, int], ...]:
    return (
        ("linear_num_key_heads", "key heads", linear.num_key_heads),
        ("linear_num_value_heads", "value heads", linear.num_value_heads),
    )


def _heads(linear: LinearAttentionSpec, tensor: int) -> Iterator[Violation]:
    for dest, what, heads in _head_counts(linear):
        if heads % tensor:
            best = max(size for size in range(1, tensor) if heads % size == 0)
            yield Violation(
                (dest,),
                f"{heads} {what} of linear attention cannot be split over {tensor} tensor-parallel ranks",
                f"use a multiple of {tensor}, or --tensor-model-parallel-size {best}",
            )


def _quantized_width(job: TrainingJob, linear: LinearAttentionSpec) -> Iterator[Violation]:
    """The output of the input projection in FP8 has a multiple of 16 elements, or 32 with mxfp8 (`get_fp8_align_size`).

    So has the part of each tensor-parallel rank, which its GEMMs read (`assert_dim_for_fp8_exec` of Transformer Engine, cuBLAS).
    """
    fp8 = job.precision.fp8
    if fp8 is None or fp8.recipe == "nvfp4":
        return
    multiple = 32 if fp8.recipe == "mxfp8" else 16
    if linear.projected_width % multiple:
        yield Violation(
            ("linear_num_value_heads",),
            f"in FP8, {linear.projected_width} outputs of a projection of linear attention are not a multiple of {multiple}",
            "use a multiple of 16 value heads, or leave --fp8-format out",
        )
        return
    outputs, rest = divmod(linear.projected_width, job.parallel.tensor)
    if not rest and outputs % _FP8_ROWS:
        yield Violation(
            ("linear_num_value_heads",),
            f"in FP8, {outputs} outputs of a projection of linear attention on each rank are not a multiple of {_FP8_ROWS}",
            "use more value heads, a smaller --tensor-model-parallel-size, or leave --fp8-format out",
        )


def _context(job: TrainingJob, linear: LinearAttentionSpec) -> Iterator[Violation]:
    """Before 0.18 each rank would compute the recurrence of its own tokens only. Later releases exchange tokens for heads.

    `GatedDeltaNet.__init__` of 0.18 does not accept `cp_comm_type`, which `TransformerLayer.__init__` always gives it.
    """
    parallel = job.parallel
    if parallel.context == 1:
        return
    if is_before(job.megatron, "0.19"):
        fault = "cannot be used with linear attention before 0.18: its state is not exchanged between ranks"
        if not is_before(job.megatron, "0.18"):
            fault = "fails with linear attention in 0.18: GatedDeltaNet does not accept cp_comm_type"
        yield Violation(("context_parallel_size",), fault, "use --context-parallel-size 1, or 0.19")
        return
    ranks = parallel.tensor * parallel.context
    for dest, what, heads in _head_counts(linear):
        if heads % parallel.tensor == 0 and heads % ranks:
            yield Violation(
                (dest,),
                f"{heads} {what} of linear attention cannot be split over tensor {parallel.tensor} × context {parallel.context}",
                f"use a multiple of {ranks}, or a smaller --context-parallel-size",
            )


def _mtp_layers(job: TrainingJob) -> Iterator[Violation]:
    """From 0.19 on, MTP layers are like the last decoder layer (`gpt_builder`), but may not be linear.

    `MultiTokenPredictionLayer.__init__` asserts a kind of the attention mask, and linear attention has none.
    """
    linear = job.model.linear_attention
    if job.model.hybrid is not None or linear is None or not job.model.mtp_num_layers:
        return
    if linear.layers[-1] and not is_before(job.megatron, "0.19"):
        yield Violation(
            ("mtp_num_layers",),
            "fails in this release if the last layer has linear attention, like which MTP layers are built",
            "give the last layer full attention with --linear-attention-freq",
        )


def _features(job: TrainingJob) -> Iterator[Violation]:
    """Features that change the modules of attention, and that are modelled for full attention only."""
    flags = job.flags
    if flags.deterministic:
        yield Violation(("deterministic_mode",), _NOT_MODELLED, _LEAVE)
    if flags.overlap_moe_expert_parallel_comm and is_before(job.megatron, "0.18"):
        fault = "fails with linear attention before 0.18: GatedDeltaNet has no backward_dw"
        yield Violation(("overlap_moe_expert_parallel_comm",), fault, _LEAVE)
    if job.activation_offload is not None:
        layers = bool(job.activation_offload.layers)
        dest = "cpu_offloading_num_layers" if layers else "fine_grained_activation_offloading"
        yield Violation((dest,), _NOT_MODELLED, _LEAVE)
    if job.fsdp is not None:
        dest = "use_torch_fsdp2" if job.fsdp.implementation == "torch" else "use_megatron_fsdp"
        yield Violation((dest,), _NOT_MODELLED, "use --use-distributed-optimizer")
