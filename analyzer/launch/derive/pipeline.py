"""How layers are distributed over pipeline stages and virtual stages.

Megatron: `validate_args`, 0.16.1. Whether the layers divide is checked by `analyzer.specs.rules.stages`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from analyzer.errors import InputError
from analyzer.launch.derive.model.hybrid import check_stages, read_pattern
from analyzer.launch.derive.model.mtp import mtp_layers
from analyzer.launch.derive.pipeline_layout import unroll
from analyzer.launch.derive.reading import option, positive, refuse, switched_on
from analyzer.specs import ParallelSpec, PipelineSpec
from analyzer.specs.rules.stages import counted_layers, even_stage_violations, stage_violations

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments


def with_stages(arguments: Arguments, parallel: ParallelSpec, *, num_layers: int) -> ParallelSpec:
    """`parallel` with the stages of `num_layers` layers. Raises InputError if the layers cannot be distributed in this way."""
    _check_exclusive(arguments)
    parallel = replace(parallel, pipeline_layout=_layout(arguments, pipeline=parallel.pipeline))
    virtual = _virtual(arguments, parallel, num_layers=num_layers)
    overlap = virtual is not None and switched_on(arguments, "overlap_p2p_comm")
    if switched_on(arguments, "overlap_p2p_comm_warmup_flush") and not overlap:
        raise InputError(
            option(arguments, "overlap_p2p_comm_warmup_flush"),
            "there is no overlapped point-to-point communication to extend",
            "add --num-virtual-stages-per-pipeline-rank 2 without --no-overlap-p2p-communication, or leave it out",
        )
    group = positive(arguments, "microbatch_group_size_per_vp_stage")
    parallel = replace(
        parallel, virtual_pipeline=virtual, overlap_p2p=overlap, microbatch_group_size=group if virtual is not None else None
    )
    refuse(arguments, stage_violations(num_layers, parallel, mtp_layers=mtp_layers(arguments)))
    return parallel


def _check_exclusive(arguments: Arguments) -> None:
    """The three ways to give the number of virtual stages exclude each other."""
    ways = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "pipeline_model_parallel_layout")
    given = [option(arguments, dest) for dest in ways if arguments.get(dest) is not None]
    if len(given) > 1:
        raise InputError(given[0], f"contradicts {given[1]}", "keep one of the two")


def _layout(arguments: Arguments, *, pipeline: int) -> PipelineSpec:
    pattern = read_pattern(arguments)
    if pattern is not None:
        check_stages(arguments, pattern, pipeline=pipeline)
        if pattern.layout is not None:
            return PipelineSpec(layout=pattern.layout)
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
    return PipelineSpec(layout=unroll(str(written), option=named))


def _virtual(arguments: Arguments, parallel: ParallelSpec, *, num_layers: int) -> int | None:
    """Model chunks of a pipeline rank, None for one."""
    layout, pipeline = parallel.pipeline_layout, parallel.pipeline
    per_stage = positive(arguments, "num_layers_per_virtual_pipeline_stage")
    virtual = positive(arguments, "num_virtual_stages_per_pipeline_rank") or 1
    if layout.layout is not None:
        virtual = max(1, len(layout.layout) // pipeline)
    if per_stage is not None:
        named = option(arguments, "num_layers_per_virtual_pipeline_stage")
        if layout.num_layers_in_first is not None or layout.num_layers_in_last is not None:
            raise InputError(
                named,
                "cannot be used with uneven first and last stages",
                "use --num-virtual-stages-per-pipeline-rank, or leave out --decoder-first-pipeline-num-layers and "
                "--decoder-last-pipeline-num-layers",
            )
        refuse(arguments, even_stage_violations(num_layers, parallel))
        of_rank = counted_layers(num_layers, parallel) // pipeline
        if of_rank % per_stage:
            raise InputError(
                named,
                f"{of_rank} layers on a pipeline rank cannot be split into virtual stages of {per_stage}",
                f"use a divisor of {of_rank}",
            )
        virtual = of_rank // per_stage
    return None if virtual == 1 else virtual
