"""Which kind of buffers a pipeline stage has. The one place that imports the layer-wise layout."""

from __future__ import annotations

from analyzer.buffers.gradient_buffers import Buffer, bucket_size, chunk_buffers
from analyzer.buffers.parameter_order import creation_order
from analyzer.modules.stage import StageModel
from analyzer.specs import TrainingJob


def stage_buffers(job: TrainingJob, stage: StageModel) -> tuple[tuple[Buffer, ...], ...]:
    """Parameter and gradient buffers of each chunk of a pipeline rank."""
    if job.optimizer.muon is not None and job.optimizer.muon.aligned:
        from analyzer.buffers.layer_wise import aligned_buffers

        return aligned_buffers(job, stage)
    parameters = tuple(tuple(creation_order(tree)) for tree in stage.trees)
    rank_numel = sum(parameter.numel for chunk in parameters for parameter in chunk)
    return tuple(
        chunk_buffers(
            job,
            chunk,
            bucket_size=bucket_size(job, pipeline_rank=stage.pipeline_rank, chunk=index, rank_numel=rank_numel),
        )
        for index, chunk in enumerate(parameters)
    )
