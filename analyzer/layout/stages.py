"""The layers of each pipeline rank.

Virtual stages are numbered in model order: chunk `vp` of pipeline rank `r` is stage `vp * pp + r`. Layers are assigned to them in
that order, as in `get_num_layers_to_build` (megatron/core/transformer/transformer_block.py) and `get_transformer_layer_offset`
(transformer_layer.py), 0.16.1. The split is assumed to follow `analyzer.specs.rules.stages`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from analyzer.specs import ModelSpec, ParallelSpec
from analyzer.specs.stage_sizes import layers_of_stages


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """The part of the model in one virtual stage of a pipeline rank."""

    virtual_stage: int
    layers: tuple[int, ...]
    """Global layer numbers, from 1."""
    pre_process: bool
    """Contains the embedding."""
    post_process: bool
    """Contains the output layer and the loss, and the final norm unless MTP layers follow it."""
    mtp_layers: int = 0
    """MTP layers: all of the model, or none."""


def chunks(model_layers: int, parallel: ParallelSpec, *, mtp_layers: int = 0) -> tuple[tuple[Chunk, ...], ...]:
    """Chunks of each pipeline rank: `[pipeline rank][virtual stage]`.

    All MTP layers are in one chunk: the last, or the one with m in the layout (`get_mtp_num_layers_to_build`,
    multi_token_prediction.py).
    """
    counts = layers_of_stages(model_layers, parallel)
    ends = tuple(accumulate(counts))
    last = len(counts) - 1
    predicting = mtp_stage(parallel)
    return tuple(
        tuple(
            Chunk(
                virtual_stage=stage // parallel.pipeline,
                layers=tuple(range(ends[stage] - counts[stage] + 1, ends[stage] + 1)),
                pre_process=stage == 0,
                post_process=stage == last,
                mtp_layers=mtp_layers if stage == predicting else 0,
            )
            for stage in range(rank, len(counts), parallel.pipeline)
        )
        for rank in range(parallel.pipeline)
    )


def mtp_stage(parallel: ParallelSpec) -> int:
    """The virtual stage, in model order, with the MTP layers."""
    layout = parallel.pipeline_layout.layout or ()
    last = parallel.pipeline * parallel.chunks - 1
    return next((stage for stage, letters in enumerate(layout) if "m" in letters), last)


def mtp_rank(model: ModelSpec, parallel: ParallelSpec) -> int | None:
    """The pipeline rank of the MTP layers, None without any."""
    return mtp_stage(parallel) % parallel.pipeline if model.mtp_num_layers else None
