"""Assumptions about the optimizer, as sentences with their figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from analyzer.modules.stage import StageModel
from analyzer.specs import TrainingJob
from analyzer.states.buffers.of_stage import stage_buffers
from analyzer.states.cpu_offload import host_bytes, offload_of, unsharded_copy_bytes
from analyzer.units import format_bytes


def optimizer_notes(job: TrainingJob, stages: Sequence[StageModel]) -> Iterator[str]:
    """The assumptions of a job, one sentence each."""
    if job.optimizer.offload is not None:
        yield from _offload_notes(job, stages)
    yield from job.optimizer.facts.assumptions
    muon = job.optimizer.muon
    if muon is not None and muon.layer_wise and muon.tensor_parallel != "blockwise" and job.parallel.data_with_context > 1:
        yield (
            "tensor-parallel communication of Muon is that of the data-parallel rank that sends the most, so sums over the cluster "
            "are overestimated"
        )


def _offload_notes(job: TrainingJob, stages: Sequence[StageModel]) -> Iterator[str]:
    needs = [host_bytes(job, stage, stage_buffers(job, stage)) for stage in stages]
    most = max(needs, key=lambda need: need.pageable + need.pinned)
    total = most.pageable + most.pinned
    ranks = min(job.parallel.gpus_per_node, job.parallel.world_size)
    offload = offload_of(job)
    first = format_bytes(max(need.during_creation for need in needs))
    yield (
        f"--optimizer-cpu-offload: host memory up to {format_bytes(total)} per GPU and {format_bytes(ranks * total)} per node, "
        f"of which {format_bytes(most.pinned)} per GPU are pinned; while the optimizer is created"
        f"{'' if offload.collected else ', and until Python collects garbage'}, {first} more per GPU"
    )
    copies = max(unsharded_copy_bytes(job, stage.trees) for stage in stages)
    if copies and not offload.collected:
        yield (
            f"up to {format_bytes(copies)} of fp32 weights from the creation of the optimizer are assumed to stay allocated: "
            "an overestimate once Python collects garbage, which --manual-gc does before the first iteration"
        )
