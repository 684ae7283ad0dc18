"""A bag of Megatron arguments -> the frozen `Launch` that the analysis reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from analyzer.launch.coverage.ignored import inert_options
from analyzer.launch.coverage.supported import assumptions_of, refuse_unmodelled
from analyzer.launch.derive.activations import check_activation_offload, check_side_by_side
from analyzer.launch.derive.batch import check_batch, check_schedule
from analyzer.launch.derive.cuda_graphs import check_graphs
from analyzer.launch.derive.fp8 import check_fp8
from analyzer.launch.derive.fsdp import check_fsdp, sharding_optimizer
from analyzer.launch.derive.model.gpt import check_fused_activation, check_model
from analyzer.launch.derive.model.mla import check_mla
from analyzer.launch.derive.model.moe import check_moe
from analyzer.launch.derive.model.mtp import check_mtp
from analyzer.launch.derive.model.shape import check_shape
from analyzer.launch.derive.optimizer import check_optimizer
from analyzer.launch.derive.parallel import check_connections, check_context, check_grid
from analyzer.launch.derive.pipeline import check_stages
from analyzer.launch.derive.precision import check_precision
from analyzer.launch.derive.reading import since
from analyzer.launch.derive.recompute import check_recompute
from analyzer.launch.derive.training_flags import check_runtime, check_sequence_parallel
from analyzer.launch.tokenizer.vocabulary import read_vocabulary
from analyzer.specs import HardwareSpec, ParallelSpec, TrainingJob

DIFFERENT_LAYERS: Final = ("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json")
"""Options of a model whose layers differ."""

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.launch.launchers.torchrun import World


def build(
    arguments: Arguments,
    world: World,
    *,
    environ: Mapping[str, str],
    gpu: HardwareSpec,
    folder: Path,
    moe_imbalance: float = 1.0,
) -> TrainingJob:
    """Derive and check everything that Megatron's `validate_args` and configs derive and check.

    `environ` is the environment and `folder` the working folder of the launch; `moe_imbalance` is the tokens of the
    fullest rank's experts over the mean. Raises InputError for what Megatron
    would refuse, UnsupportedError for what it would take and we have no model of.
    """
    refuse_unmodelled(arguments)
    grid = check_grid(arguments, world_size=world.nodes * world.gpus_per_node)
    connections, connections_note = check_connections(arguments, grid, environ=environ, gpu=gpu)
    cp_comm_type, cp_inner_size, context_notes = check_context(arguments, context=grid.context)
    sequence_parallel = check_sequence_parallel(arguments, tensor=grid.tensor)
    shape = check_shape(arguments, tensor=grid.tensor, context=grid.context, sequence_parallel=sequence_parallel)
    stages = check_stages(arguments, num_layers=shape.num_layers, pipeline=grid.pipeline)
    least = 1 if stages.virtual is None else stages.microbatch_group_size or grid.pipeline
    batch, batch_notes = check_batch(arguments, data=grid.data, seq_length=shape.seq_length, least_microbatches=least)
    if stages.virtual is not None:
        check_schedule(arguments, batch=batch, pipeline=grid.pipeline, group=stages.microbatch_group_size)
    precision = check_precision(arguments)
    optimizer = check_optimizer(arguments, virtual_pipeline=stages.virtual, gradients=precision.gradients)
    vocabulary = read_vocabulary(arguments, tensor=grid.tensor, environ=environ, folder=folder)
    model, model_notes = check_model(
        arguments,
        shape=shape,
        vocabulary=vocabulary,
        mla=check_mla(arguments, context=grid.context, cp_comm_type=cp_comm_type),
        half_precision=precision.parameters != "fp32",
        context=grid.context,
        cp_comm_type=cp_comm_type,
        environ=environ,
        gpu=gpu,
    )
    fp8, fp8_notes = check_fp8(
        arguments,
        num_layers=shape.num_layers,
        pipeline=grid.pipeline,
        optimizer=optimizer,
        implementation=model.implementation,
        gpu=gpu,
    )
    precision = replace(precision, fp8=fp8)
    moe, moe_notes = check_moe(
        arguments,
        model=model,
        grid=grid,
        sequence_parallel=sequence_parallel,
        precision=precision,
        gpu=gpu,
        environ=environ,
        imbalance=moe_imbalance,
    )
    model = replace(model, moe=moe, mtp_num_layers=check_mtp(arguments, model=model, context=grid.context))
    check_fused_activation(model)
    recompute = check_recompute(arguments, model=model, tensor=grid.tensor, sequence_parallel=sequence_parallel)
    if any(arguments.get(dest) is not None for dest in DIFFERENT_LAYERS):
        from analyzer.launch.derive.model.heterogeneous import check_layers  # a millisecond that most launches need not spend

        blocks = check_layers(
            arguments,
            model=model,
            tensor=grid.tensor,
            sequence_parallel=sequence_parallel,
            virtual=stages.virtual,
            recompute=recompute,
            folder=folder,
        )
        model = replace(model, blocks=blocks)
    side_by_side = check_side_by_side(
        arguments, model=model, grid=grid, virtual=stages.virtual, recompute=recompute, precision=precision
    )
    graphs = check_graphs(arguments, model=model, recompute=recompute, environ=environ, gpu=gpu)
    activation_offload = check_activation_offload(
        arguments, model=model, pipeline=grid.pipeline, recompute=recompute, graphs=graphs
    )
    flags, runtime_notes = check_runtime(
        arguments, pipeline=grid.pipeline, implementation=model.implementation, connections=connections, environ=environ
    )
    flags = replace(flags, overlap_moe_expert_parallel_comm=side_by_side)
    fsdp = check_fsdp(arguments, grid=grid, model=model, precision=precision, optimizer=optimizer, flags=flags, environ=environ)
    optimizer = sharding_optimizer(optimizer, fsdp, release_switches_overlap=not since(arguments, "0.14"))
    parallel = ParallelSpec(
        world_size=grid.world_size,
        nodes=world.nodes,
        gpus_per_node=world.gpus_per_node,
        tensor=grid.tensor,
        pipeline=grid.pipeline,
        virtual_pipeline=stages.virtual,
        context=grid.context,
        expert=grid.expert,
        expert_tensor=grid.expert_tensor,
        order=grid.order,
        sequence_parallel=sequence_parallel,
        microbatch_group_size=stages.microbatch_group_size,
        distributed_optimizer_instances=grid.distributed_optimizer_instances,
        overlap_p2p=stages.overlap_p2p,
        pipeline_layout=stages.layout,
        cp_comm_type=cp_comm_type,
        cp_inner_size=cp_inner_size,
    )
    notes = (
        *arguments.assumptions,
        *world.assumptions,
        *grid.assumptions,
        *shape.assumptions,
        *vocabulary.assumptions,
        *batch_notes,
        *model_notes,
        *moe_notes,
        *fp8_notes,
        *context_notes,
        *([connections_note] if connections_note else []),
        *runtime_notes,
        *assumptions_of(arguments),
        *inert_options(arguments, tensor=grid.tensor),
    )
    return TrainingJob(
        model=model,
        parallel=parallel,
        batch=batch,
        precision=precision,
        optimizer=optimizer,
        recompute=recompute,
        flags=flags,
        hardware=gpu,
        megatron=arguments.release,
        assumptions=notes,
        fsdp=fsdp,
        graphs=graphs,
        activation_offload=activation_offload,
    )
