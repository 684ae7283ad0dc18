"""The number of layers in each virtual stage. The split is assumed to follow `analyzer.specs.rules.stages`."""

from __future__ import annotations

from analyzer.specs.parallel import ParallelSpec


def layers_of_stages(model_layers: int, parallel: ParallelSpec) -> tuple[int, ...]:
    """Layers of each virtual stage, in model order."""
    split = parallel.pipeline_layout
    if split.layout is not None:
        return tuple(stage.count("t") for stage in split.layout)
    if split.num_layers_in_first is not None or split.num_layers_in_last is not None:
        return _uneven(model_layers, parallel)
    stages = parallel.pipeline * parallel.chunks
    counts = [(model_layers + split.account_for_embedding + split.account_for_loss) // stages] * stages
    counts[0] -= split.account_for_embedding
    counts[-1] -= split.account_for_loss
    return tuple(counts)


def _uneven(model_layers: int, parallel: ParallelSpec) -> tuple[int, ...]:
    """First and last pipeline rank as given, equal numbers for the others."""
    first, last = parallel.pipeline_layout.num_layers_in_first, parallel.pipeline_layout.num_layers_in_last
    ranks = parallel.pipeline - (first is not None) - (last is not None)
    of_rank = [(model_layers - (first or 0) - (last or 0)) // ranks if ranks else 0] * parallel.pipeline
    if first is not None:
        of_rank[0] = first
    if last is not None:
        of_rank[-1] = last
    return tuple(count // parallel.chunks for count in of_rank) * parallel.chunks
