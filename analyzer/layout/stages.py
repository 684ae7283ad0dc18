"""Which layers a pipeline rank owns.

Virtual stages are numbered in model order: chunk `vp` of pipeline rank `r` is stage `vp * pp + r`. Layers are dealt
out to them in that order, as `get_num_layers_to_build` (megatron/core/transformer/transformer_block.py) and
`get_transformer_layer_offset` (transformer_layer.py) of 0.16.1 do; the checks are those of `TransformerConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from analyzer.errors import InputError
from analyzer.specs import ModelSpec, ParallelSpec

LAYOUT = "--pipeline-model-parallel-layout"
FIRST = "--decoder-first-pipeline-num-layers"
LAST = "--decoder-last-pipeline-num-layers"
VIRTUAL = "--num-virtual-stages-per-pipeline-rank"


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """The part of the model that a pipeline rank holds as one virtual stage."""

    virtual_stage: int
    layers: tuple[int, ...]
    """Global layer numbers, from 1."""
    pre_process: bool
    """Holds the embedding."""
    post_process: bool
    """Holds the output layer and the loss, and the final norm where no multi-token prediction layers come after it."""
    mtp_layers: int = 0
    """Multi-token prediction layers here: all of the model's, or none."""


def chunks(model_layers: int, parallel: ParallelSpec, *, mtp_layers: int = 0) -> tuple[tuple[Chunk, ...], ...]:
    """Chunks of each pipeline rank: `[pipeline rank][virtual stage]`.

    The multi-token prediction layers lie all in one of them: the last, or where the m of the layout stand
    (`get_mtp_num_layers_to_build`, multi_token_prediction.py). Raises InputError where the layers cannot be spread as asked.
    """
    counts = _layers_of_stages(model_layers, parallel)
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
    """The virtual stage, in model order, that holds the multi-token prediction layers of a model that has them."""
    layout = parallel.pipeline_layout.layout or ()
    last = parallel.pipeline * parallel.chunks - 1
    return next((stage for stage, letters in enumerate(layout) if "m" in letters), last)


def mtp_rank(model: ModelSpec, parallel: ParallelSpec) -> int | None:
    """The pipeline rank of the multi-token prediction layers, None without any."""
    return mtp_stage(parallel) % parallel.pipeline if model.mtp_num_layers else None


def _layers_of_stages(model_layers: int, parallel: ParallelSpec) -> tuple[int, ...]:
    """Layers of each virtual stage, in model order."""
    spec = parallel.pipeline_layout
    uneven = spec.num_layers_in_first is not None or spec.num_layers_in_last is not None
    accounts = spec.account_for_embedding or spec.account_for_loss
    if spec.layout is not None:
        if uneven or accounts:
            raise InputError(LAYOUT, "it already says where each layer goes", "leave out the other options that spread layers")
        return _by_layout(model_layers, parallel, spec.layout)
    if uneven:
        if accounts:
            raise InputError(
                FIRST if spec.num_layers_in_first is not None else LAST,
                "it cannot be combined with --account-for-embedding-in-pipeline-split or --account-for-loss-in-pipeline-split",
                "keep one of the two ways",
            )
        return _uneven(model_layers, parallel)
    return _even(model_layers, parallel)


def _even(model_layers: int, parallel: ParallelSpec) -> tuple[int, ...]:
    """The same number everywhere; embedding and loss may each count as a layer of the stage that holds them."""
    spec = parallel.pipeline_layout
    counted = model_layers + spec.account_for_embedding + spec.account_for_loss
    if counted % parallel.pipeline:
        extra = " with the embedding and the loss counted as asked" if counted > model_layers else ""
        raise InputError(
            "--num-layers",
            f"{counted} layers{extra} cannot be spread evenly over {parallel.pipeline} pipeline ranks",
            f"use a multiple of {parallel.pipeline}, or {FIRST}, {LAST} or {LAYOUT}",
        )
    per_stage = _per_chunk(counted // parallel.pipeline, parallel, "each pipeline rank")
    counts = [per_stage] * (parallel.pipeline * parallel.chunks)
    counts[0] -= spec.account_for_embedding
    counts[-1] -= spec.account_for_loss
    return tuple(counts)


def _uneven(model_layers: int, parallel: ParallelSpec) -> tuple[int, ...]:
    """First and last pipeline rank as told, the others alike."""
    first, last = parallel.pipeline_layout.num_layers_in_first, parallel.pipeline_layout.num_layers_in_last
    layers = model_layers - (first or 0) - (last or 0)
    ranks = parallel.pipeline - (first is not None) - (last is not None)
    _check_uneven(model_layers, parallel, layers_left=layers, ranks_left=ranks)
    of_rank = [layers // ranks if ranks else 0] * parallel.pipeline
    if first is not None:
        of_rank[0] = first
    if last is not None:
        of_rank[-1] = last
    of_chunk = tuple(_per_chunk(count, parallel, f"pipeline rank {rank}") for rank, count in enumerate(of_rank))
    return of_chunk * parallel.chunks


def _check_uneven(model_layers: int, parallel: ParallelSpec, *, layers_left: int, ranks_left: int) -> None:
    told = {FIRST: parallel.pipeline_layout.num_layers_in_first, LAST: parallel.pipeline_layout.num_layers_in_last}
    given = {option: layers for option, layers in told.items() if layers is not None}
    for option, layers in given.items():
        if layers < 1:
            raise InputError(option, f"{layers} layers are too few", "use 1 or more")
    options = " and ".join(given)
    if layers_left < 0 or ranks_left < 0:
        raise InputError(
            options,
            f"{sum(given.values())} of {model_layers} layers for {len(given)} of {parallel.pipeline} pipeline ranks are too many",
            "ask for fewer",
        )
    if bool(layers_left) != bool(ranks_left) or (ranks_left and layers_left % ranks_left):
        raise InputError(
            options,
            f"{layers_left} of {model_layers} layers are left, and {ranks_left} other pipeline ranks cannot share them evenly",
            f"leave a multiple of {ranks_left} layers" if ranks_left else f"give away all {model_layers} layers",
        )
    if not ranks_left and parallel.virtual_pipeline is not None:  # get_transformer_layer_offset divides by ranks_left
        raise InputError(options, "virtual stages need a pipeline rank between the first and the last", "keep one of the two")


def _per_chunk(layers: int, parallel: ParallelSpec, where: str) -> int:
    if layers % parallel.chunks:
        raise InputError(
            VIRTUAL,
            f"{layers} layers of {where} cannot be cut into {parallel.chunks} virtual stages",
            f"use a divisor of {layers}",
        )
    return layers // parallel.chunks


def _by_layout(model_layers: int, parallel: ParallelSpec, layout: tuple[str, ...]) -> tuple[int, ...]:
    """As the letters say. The checks are those of `PipelineParallelLayerLayout.validate_layer_layout`."""
    stages = parallel.pipeline * parallel.chunks
    if len(layout) != stages:
        raise InputError(
            LAYOUT,
            f"it has {len(layout)} stages, and there are {parallel.pipeline} pipeline ranks × {parallel.chunks} virtual stages",
            f"describe {stages} stages, with | between them",
        )
    letters = "".join(layout)
    unknown = sorted(set(letters) - set("EtmL"))
    if unknown:
        raise InputError(LAYOUT, f"it has the letter {unknown[0]!r}", "use E, t, m and L")
    if not (letters.startswith("E") and letters.endswith("L") and letters.count("E") == letters.count("L") == 1):
        raise InputError(LAYOUT, "the embedding and the loss are not at its two ends, once each", "start with E and end with L")
    if letters.count("t") != model_layers:
        raise InputError(
            LAYOUT, f"it has {letters.count('t')} decoder layers (t), and --num-layers is {model_layers}", "make them equal"
        )
    return tuple(stage.count("t") for stage in layout)
