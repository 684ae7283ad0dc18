"""How layers are cut into pipeline stages and virtual stages.

Megatron: `validate_args` (0.16.1), `TransformerConfig.__post_init__`, and `get_num_layers_to_build`
(megatron/core/transformer/transformer_block.py) for what is refused only when layers are built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from analyzer.errors import InputError
from analyzer.launch.derive.model.mtp import mtp_layers
from analyzer.launch.derive.pipeline_layout import check_layout
from analyzer.launch.derive.reading import RELEASE_2023, multiple_near, option, positive, switched_on
from analyzer.specs import PipelineSpec

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The cut of the layers and what the schedule needs of it."""

    layout: PipelineSpec
    virtual: int | None
    overlap_p2p: bool
    microbatch_group_size: int | None


def check_stages(arguments: Arguments, *, num_layers: int, pipeline: int) -> Stages:
    """Stages of `num_layers` layers on `pipeline` ranks. Raises InputError where they cannot be cut so."""
    _check_exclusive(arguments)
    layout = _layout(arguments, num_layers=num_layers, pipeline=pipeline)
    virtual = _virtual(arguments, layout=layout, num_layers=num_layers, pipeline=pipeline)
    if layout.layout is None:
        _check_split(arguments, layout=layout, num_layers=num_layers, pipeline=pipeline, virtual=virtual)
    overlap = virtual is not None and switched_on(arguments, "overlap_p2p_comm")
    if virtual is not None:
        _check_interleaving(arguments, pipeline=pipeline, overlap=overlap)
    if switched_on(arguments, "overlap_p2p_comm_warmup_flush") and not overlap:
        raise InputError(
            option(arguments, "overlap_p2p_comm_warmup_flush"),
            "there is no overlapped point-to-point communication to extend",
            "add --num-virtual-stages-per-pipeline-rank 2 without --no-overlap-p2p-communication, or leave it out",
        )
    group = positive(arguments, "microbatch_group_size_per_vp_stage")
    return Stages(layout=layout, virtual=virtual, overlap_p2p=overlap, microbatch_group_size=group if virtual else None)


def _check_exclusive(arguments: Arguments) -> None:
    """The three ways to say how many virtual stages there are exclude each other."""
    ways = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "pipeline_model_parallel_layout")
    given = [option(arguments, dest) for dest in ways if arguments.get(dest) is not None]
    if len(given) > 1:
        raise InputError(given[0], f"contradicts {given[1]}", "keep one of the two")


def _layout(arguments: Arguments, *, num_layers: int, pipeline: int) -> PipelineSpec:
    first = positive(arguments, "decoder_first_pipeline_num_layers")
    last = positive(arguments, "decoder_last_pipeline_num_layers")
    embedding = switched_on(arguments, "account_for_embedding_in_pipeline_split")
    loss = switched_on(arguments, "account_for_loss_in_pipeline_split")
    uneven = "decoder_first_pipeline_num_layers" if first is not None else "decoder_last_pipeline_num_layers"
    account = "account_for_embedding_in_pipeline_split" if embedding else "account_for_loss_in_pipeline_split"
    if (first is not None or last is not None) and (embedding or loss):
        raise InputError(option(arguments, uneven), f"contradicts {option(arguments, account)}", "keep one of the two")
    written = arguments.get("pipeline_model_parallel_layout")
    if written is None:
        return PipelineSpec(
            num_layers_in_first=first, num_layers_in_last=last, account_for_embedding=embedding, account_for_loss=loss
        )
    named = option(arguments, "pipeline_model_parallel_layout")
    if first is not None or last is not None or embedding or loss:
        other = uneven if first is not None or last is not None else account
        raise InputError(named, f"contradicts {option(arguments, other)}", "keep one of the two")
    stages = check_layout(str(written), num_layers=num_layers, pipeline=pipeline, mtp_layers=mtp_layers(arguments), option=named)
    return PipelineSpec(layout=stages)


def _virtual(arguments: Arguments, *, layout: PipelineSpec, num_layers: int, pipeline: int) -> int | None:
    """Model chunks of a pipeline rank, None for one."""
    per_stage = positive(arguments, "num_layers_per_virtual_pipeline_stage")
    virtual = positive(arguments, "num_virtual_stages_per_pipeline_rank") or 1
    if layout.layout is not None:
        virtual = len(layout.layout) // pipeline
    if per_stage is not None:
        named = option(arguments, "num_layers_per_virtual_pipeline_stage")
        if layout.num_layers_in_first is not None or layout.num_layers_in_last is not None:
            raise InputError(
                named,
                "does not go with uneven first and last stages",
                "use --num-virtual-stages-per-pipeline-rank, or leave out --decoder-first-pipeline-num-layers and its twin",
            )
        counted = _counted_layers(layout, num_layers)
        _check_even(arguments, counted=counted, num_layers=num_layers, pipeline=pipeline)
        if counted // pipeline % per_stage:
            raise InputError(
                named,
                f"{counted // pipeline} layers on a pipeline rank cannot be cut into virtual stages of {per_stage}",
                f"use a divisor of {counted // pipeline}",
            )
        virtual = counted // pipeline // per_stage
    return None if virtual == 1 else virtual


def _counted_layers(layout: PipelineSpec, num_layers: int) -> int:
    """Layers to be split evenly: the embedding and the loss count as one each where asked."""
    return num_layers + layout.account_for_embedding + layout.account_for_loss


def _check_even(arguments: Arguments, *, counted: int, num_layers: int, pipeline: int) -> None:
    if counted % pipeline:
        extra = "" if counted == num_layers else f" ({num_layers} and {counted - num_layers} for embedding and loss)"
        raise InputError(
            option(arguments, "num_layers"),
            f"{counted} layers{extra} cannot be split over {pipeline} pipeline ranks",
            f"use {multiple_near(counted, pipeline) - (counted - num_layers)} layers, or --decoder-first-pipeline-num-layers "
            "or --decoder-last-pipeline-num-layers for an uneven split",
        )


def _check_split(arguments: Arguments, *, layout: PipelineSpec, num_layers: int, pipeline: int, virtual: int | None) -> None:
    chunks = virtual or 1
    first, last = layout.num_layers_in_first, layout.num_layers_in_last
    if first is None and last is None:
        counted = _counted_layers(layout, num_layers)
        _check_even(arguments, counted=counted, num_layers=num_layers, pipeline=pipeline)
        _check_chunks(arguments, layers=counted // pipeline, chunks=chunks, where="a pipeline rank")
        return
    named = option(arguments, "decoder_first_pipeline_num_layers" if first is not None else "decoder_last_pipeline_num_layers")
    middle_ranks = pipeline - (first is not None) - (last is not None)
    middle = num_layers - (first or 0) - (last or 0)
    if middle < 0 or middle_ranks < 0 or bool(middle) != bool(middle_ranks):
        raise InputError(
            named,
            f"{middle} of {num_layers} layers would be left for {max(middle_ranks, 0)} middle pipeline ranks",
            "change it, or the pipeline size, so that both are left or neither is",
        )
    if middle_ranks and middle % middle_ranks:
        raise InputError(
            named,
            f"the {middle} layers between cannot be split over {middle_ranks} pipeline ranks",
            f"leave a multiple of {middle_ranks} layers for them",
        )
    for layers, where in (
        (first, "the first rank"),
        (last, "the last rank"),
        (middle // middle_ranks if middle_ranks else None, "a middle rank"),
    ):
        if layers is not None:
            _check_chunks(arguments, layers=layers, chunks=chunks, where=where)


def _check_chunks(arguments: Arguments, *, layers: int, chunks: int, where: str) -> None:
    if layers % chunks:
        raise InputError(
            option(arguments, "num_virtual_stages_per_pipeline_rank"),
            f"{layers} layers on {where} cannot be split over {chunks} virtual stages",
            f"use a divisor of {layers}",
        )


def _check_interleaving(arguments: Arguments, *, pipeline: int, overlap: bool) -> None:
    """More than one pipeline rank; more than two where sends and receives go in one batch."""
    least = 2 if overlap and arguments.release != RELEASE_2023 else 3
    if pipeline < least:
        how = "" if overlap else " without overlapped point-to-point communication"
        raise InputError(
            option(arguments, "pipeline_model_parallel_size"),
            f"virtual stages{how} need {least} pipeline ranks or more, and there are {pipeline}",
            f"use --pipeline-model-parallel-size {least} or more, or leave the virtual stages out",
        )
