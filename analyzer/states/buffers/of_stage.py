"""Choose the buffers of a pipeline stage. The layer-wise layout is imported only here."""

from __future__ import annotations

from analyzer.modules.stage import StageModel
from analyzer.specs import TrainingJob
from analyzer.states.buffers.gradient_buffers import Buffer, bucket_size, chunk_buffers
from analyzer.states.buffers.parameter_order import numel_of, parameter_runs


def stage_buffers(job: TrainingJob, stage: StageModel) -> tuple[tuple[Buffer, ...], ...]:
    """Parameter and gradient buffers of each chunk of a pipeline rank."""
    if job.optimizer.muon is not None and job.optimizer.muon.aligned:
        from analyzer.states.buffers.layer_wise import aligned_buffers

        return aligned_buffers(job, stage)
    rank_numel = sum(numel_of(tree) for tree in stage.trees)
    return tuple(
        chunk_buffers(
            job,
            parameter_runs(tree),
            bucket_size=bucket_size(job, pipeline_rank=stage.pipeline_rank, chunk=index, rank_numel=rank_numel),
        )
        for index, tree in enumerate(stage.trees)
    )
