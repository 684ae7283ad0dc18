"""Rules for features that need or exclude a layout, and for the microbatches of an interleaved schedule.

Source: `validate_args`, `TransformerConfig.__post_init__` and `forward_backward_pipelining_with_interleaving`
(core/pipeline_parallel/schedules.py), 0.16.1.
"""

from __future__ import annotations

from collections.abc import Iterator

from analyzer.specs.job import TrainingJob
from analyzer.specs.parallel import ParallelSpec
from analyzer.specs.release_changes import core_failures
from analyzer.specs.rules.violation import Violation, multiple_near
from analyzer.specs.training import BatchSpec


def schedule_violations(batch: BatchSpec, parallel: ParallelSpec) -> Iterator[Violation]:
    """Too few microbatches for an interleaved schedule."""
    if parallel.virtual_pipeline is None:
        return
    group, pipeline = parallel.microbatch_group_size, parallel.pipeline
    size = group or pipeline
    named = ("microbatch_group_size_per_vp_stage" if group else "global_batch_size",)
    if size < pipeline:
        yield Violation(named, f"{size} is less than the {pipeline} pipeline ranks", f"use {pipeline} or more")
        return
    per_microbatch = batch.global_batch_size // max(1, batch.microbatches)
    for microbatches in sorted({batch.first_microbatches, batch.microbatches}):
        if microbatches < size:
            yield Violation(
                named,
                f"virtual stages need {size} microbatches per data-parallel rank, and there are {microbatches}",
                f"use a global batch size of {per_microbatch * size} or more",
            )
        elif 0 < microbatches % size < pipeline:
            yield Violation(
                named,
                f"{microbatches} microbatches in groups of {size} leave {microbatches % size}, fewer than the {pipeline} "
                "pipeline ranks",
                f"use a multiple of {size} microbatches: a global batch size of "
                f"{per_microbatch * multiple_near(microbatches, size)}",
            )


def feature_violations(job: TrainingJob) -> Iterator[Violation]:
    """Features that contradict the layout or each other."""
    parallel, recompute = job.parallel, job.recompute
    if recompute.distribute_saved_activations:
        yield from _distributed_activations(job)
    if job.flags.tp_comm_overlap:
        yield from _overlapped_tensor_parallelism(job)
    if job.flags.defer_embedding_wgrad and parallel.pipeline == 1:
        yield Violation(
            ("defer_embedding_wgrad_compute",),
            "needs a pipeline",
            "add --pipeline-model-parallel-size 2, or leave it out",
        )
    if job.flags.overlap_moe_expert_parallel_comm:
        yield from _overlapped_microbatches(job)
    if job.activation_offload is not None and job.activation_offload.layers:
        yield from _offloaded_layers(job)
    if job.graphs is not None and recompute.granularity == "full" and job.graphs.scope != ("full_iteration",):
        yield Violation(
            ("cuda_graph_impl",),
            "with full recomputation only graphs of full iterations can be captured",
            "use --recompute-granularity selective",
        )
    if job.fsdp is not None and job.fsdp.implementation == "torch":
        yield from _torch_fsdp2(parallel, distributed_optimizer=job.optimizer.distributed)
    if job.optimizer.overlap_param_gather_with_optimizer_step and parallel.virtual_pipeline is None:
        yield Violation(
            ("overlap_param_gather_with_optimizer_step",),
            "needs virtual pipeline stages",
            "add --num-virtual-stages-per-pipeline-rank 2, or leave it out",
        )
    if job.model.blocks and job.model.hybrid is None and parallel.virtual_pipeline is not None:
        yield Violation(
            ("heterogeneous_layers_config_path",), "cannot be used with virtual pipeline stages", "leave the virtual stages out"
        )


def _distributed_activations(job: TrainingJob) -> Iterator[Violation]:
    named = ("distribute_saved_activations",)
    if job.parallel.tensor == 1:
        yield Violation(
            named, "there is one tensor-parallel rank to distribute over", "add --tensor-model-parallel-size 2, or leave it out"
        )
    if job.recompute.granularity != "full":
        yield Violation(named, "needs full recomputation", "use --recompute-granularity full, or leave it out")
    if job.parallel.sequence_parallel:
        yield Violation(named, "contradicts --sequence-parallel, which distributes them already", "leave it out")


def _overlapped_tensor_parallelism(job: TrainingJob) -> Iterator[Violation]:
    named = ("tp_comm_overlap",)
    if job.parallel.tensor == 1:
        why = "needs tensor parallelism: with one tensor-parallel rank Megatron turns sequence parallelism off"
        yield Violation(named, why, "use --tensor-model-parallel-size 2 or more, or leave it out")
    elif not job.parallel.sequence_parallel:
        yield Violation(named, "needs sequence parallelism", "add --sequence-parallel, or leave it out")
    if job.model.mtp_num_layers and core_failures(job.megatron).mtp_without_userbuffers:
        yield Violation(named, "is not supported with MTP layers in this release", "leave it out")


def _offloaded_layers(job: TrainingJob) -> Iterator[Violation]:
    named = ("cpu_offloading_num_layers",)
    if job.parallel.pipeline > 1:
        yield Violation(named, "cannot be used with a pipeline", "use --pipeline-model-parallel-size 1, or leave it out")
    if job.recompute.granularity is not None:
        yield Violation(named, "cannot be used with recomputation", "leave --recompute-granularity out")


def _overlapped_microbatches(job: TrainingJob) -> Iterator[Violation]:
    named = ("overlap_moe_expert_parallel_comm",)
    if job.parallel.pipeline > 1 and job.parallel.virtual_pipeline is None:
        yield Violation(
            named, "in a pipeline needs virtual stages", "add --num-layers-per-virtual-pipeline-stage 1, or leave it out"
        )
    if job.parallel.expert == 1 or job.model.moe is None:
        yield Violation(named, "needs expert parallelism", "add --expert-model-parallel-size 2, or leave it out")
    if job.recompute.granularity == "full":
        yield Violation(named, "contradicts full recomputation", "use --recompute-granularity selective")


def _torch_fsdp2(parallel: ParallelSpec, *, distributed_optimizer: bool) -> Iterator[Violation]:
    named = ("use_torch_fsdp2",)
    if distributed_optimizer:
        yield Violation(named, "contradicts --use-distributed-optimizer", "keep one of the two")
    if parallel.pipeline > 1:
        yield Violation(named, f"cannot be used with {parallel.pipeline} pipeline ranks", "use --pipeline-model-parallel-size 1")
    if parallel.expert > 1:
        yield Violation(named, f"cannot be used with {parallel.expert} expert-parallel ranks", "use --expert-model-parallel-size 1")
