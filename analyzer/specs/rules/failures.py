"""Rules for launches that Megatron's checks accept, and that then fail in the construction of the model or in the first step."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from analyzer.specs.job import TrainingJob
from analyzer.specs.optimizer import FsdpSpec
from analyzer.specs.release_changes import core_failures
from analyzer.specs.rules.stages import counted_layers
from analyzer.specs.rules.violation import Violation


def failure_violations(job: TrainingJob) -> Iterator[Violation]:
    """Combinations of features whose code raises an error."""
    yield from _sharded_stages(job)
    yield from _scaled_shards(job)
    yield from _blockwise_shards(job)
    yield from _outer_shards(job)
    yield from _graphs_of_stages(job)
    yield from _fp32_residual(job)
    yield from _overlapped_mtp(job)
    yield from _recomputed_mtp(job)
    yield from _skipped_final_norm(job)
    yield from _delayed_latent_projections(job)
    yield from _uniform_recompute(job)


def _megatron_fsdp(job: TrainingJob) -> FsdpSpec | None:
    """The settings of Megatron-FSDP; None if the job does not use it."""
    return job.fsdp if job.fsdp is not None and job.fsdp.implementation == "megatron" else None


def _sharded_stages(job: TrainingJob) -> Iterator[Violation]:
    """Megatron-FSDP arranges all ranks as dp × ep × tp, without pipeline ranks.

    Source: `_get_dp_tp_mesh` and `_get_hsdp_tp_mesh` (core/distributed/fsdp/mcore_fsdp_adapter.py), 0.14 to 0.19.
    """
    if _megatron_fsdp(job) is None or job.parallel.pipeline == 1:
        return
    if core_failures(job.megatron).fsdp_of_stages:
        yield Violation(
            ("use_megatron_fsdp",),
            f"cannot be used with {job.parallel.pipeline} pipeline ranks in this release: its device mesh has none",
            "use --pipeline-model-parallel-size 1",
        )


def _scaled_shards(job: TrainingJob) -> Iterator[Violation]:
    """The gradients of parameters that are not in a rank's shard are None, and the loss scaling of fp16 reads the data of each.

    Source: `ParamAndGradBuffer.update_main_grads` (core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py) and
    `DistributedOptimizer._collect_main_grad_data_for_unscaling` (core/optimizer/distrib_optimizer.py), 0.14 to 0.19.
    """
    fsdp = _megatron_fsdp(job)
    if fsdp is None or job.precision.parameters != "fp16":
        return
    ranks = job.parallel.data_with_context // job.parallel.distributed_optimizer_instances
    if fsdp.strategy == "no_shard" or (ranks == 1 and not fsdp.outer_sharding):
        return
    if core_failures(job.megatron).fsdp_in_fp16:
        yield Violation(
            ("use_megatron_fsdp",),
            "fails in the first step with fp16 in this release: loss scaling does not accept parameters of other ranks' shards",
            "use --bf16 instead of --fp16",
        )


def _blockwise_shards(job: TrainingJob) -> Iterator[Violation]:
    """The cast of master weights to stored blockwise FP8 weights compares shards with whole weights unless these are sharded.

    Source: `ParamAndGradBuffer.copy_main_weights_to_model_weights`
    (core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py, 0.16.1).
    """
    fsdp, fp8 = _megatron_fsdp(job), job.precision.fp8
    if fsdp is None or fsdp.strategy == "optim_grads_params":
        return
    if fp8 is None or not fp8.stored_parameters or fp8.recipe != "blockwise" or job.parallel.data_with_context == 1:
        return
    if core_failures(job.megatron).fsdp_blockwise_weights:
        yield Violation(
            ("data_parallel_sharding_strategy",),
            f"{fsdp.strategy} fails in this release with blockwise FP8 weights: their cast expects sharded weights",
            "use optim_grads_params, or leave out --fp8-param-gather",
        )


def _outer_shards(job: TrainingJob) -> Iterator[Violation]:
    """Sharding over optimizer instances works with sharded parameters, several instances and, before 0.17, without experts.

    Source: `ParamAndGradBuffer._init_each_parameter_group_buffers` and `AllGatherPipeline.get_fsdp_buffer`
    (core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py), 0.14 to 0.19. Parts of the experts have the same number of
    ranks in and over instances before 0.17, and those of the second instance are empty.
    """
    fsdp = _megatron_fsdp(job)
    if fsdp is None or not fsdp.outer_sharding:
        return
    faults = (
        (
            job.parallel.distributed_optimizer_instances == 1 and fsdp.strategy != "no_shard",
            "needs several optimizer instances",
            "leave it out, or add --num-distributed-optimizer-instances 2",
        ),
        (
            job.parallel.distributed_optimizer_instances > 1 and fsdp.strategy != "optim_grads_params",
            "needs sharded parameters",
            "use --data-parallel-sharding-strategy optim_grads_params",
        ),
        (
            job.parallel.distributed_optimizer_instances > 1 and job.model.moe is not None and not fsdp.expert_instances,
            "cannot shard experts in this release",
            "leave it out",
        ),
    )
    for fails, fault, remedy in faults:
        if fails and core_failures(job.megatron).fsdp_outer_shards:
            yield Violation(("outer_dp_sharding_strategy",), fault, remedy)


def _graphs_of_stages(job: TrainingJob) -> Iterator[Violation]:
    """The schedule frees the output of a stage, which is a view if Megatron's own graphs record the last layer.

    Source: `deallocate_output_tensor` (core/pipeline_parallel/schedules.py) and `_CudagraphRecordNode` (core/transformer/
    cuda_graphs.py), which returns its input, 0.16 to 0.19. Graphs of parts of a layer and of full iterations are not concerned.
    """
    if job.graphs is None or job.graphs.implementation != "local" or job.graphs.scope or job.parallel.pipeline == 1:
        return
    if core_failures(job.megatron).graphs_of_stages:
        yield Violation(
            ("cuda_graph_impl",),
            f"local graphs of layers cannot be used with {job.parallel.pipeline} pipeline ranks in this release",
            "use --cuda-graph-impl transformer_engine",
        )


def _fp32_residual(job: TrainingJob) -> Iterator[Violation]:
    """A linear layer of Transformer Engine that contains the norm needs inputs in the precision of its weights.

    Source: `TransformerEngineBaseModule.set_activation_dtype` (transformer_engine/pytorch/module/base.py, 2.11), and
    `LanguageModelEmbedding.forward`, which converts the hidden states to fp32. Latent attention and experts have separate norms.
    """
    model = job.model
    if not model.fp32_residual_connection or job.precision.parameters == "fp32" or model.implementation != "transformer_engine":
        return
    without_norms = model.blocks and model.hybrid is None
    if not without_norms and (model.mla is None or model.moe is None or not all(model.moe.layers)):
        yield Violation(
            ("fp32_residual_connection",),
            "the fused norms of Transformer Engine do not accept fp32 hidden states",
            "leave it out",
        )


def _overlapped_mtp(job: TrainingJob) -> Iterator[Violation]:
    """Overlapped microbatches need experts in MTP layers, which are like the last decoder layer.

    Source: `build_mtp_layer_callables` (core/models/gpt/fine_grained_callables.py), 0.14 to 0.18.
    """
    moe = job.model.moe
    if not job.flags.overlap_moe_expert_parallel_comm or not job.model.mtp_num_layers or moe is None:
        return
    if moe.layers and not moe.layers[-1] and core_failures(job.megatron).dense_mtp_overlapped:
        yield Violation(
            ("overlap_moe_expert_parallel_comm",),
            "needs experts in the MTP layers, and they have none, like the last decoder layer",
            "leave it out",
        )


def _recomputed_mtp(job: TrainingJob) -> Iterator[Violation]:
    """With full recomputation an MTP layer stops with a TypeError: `_checkpointed_forward` has no argument `padding_mask`.

    Source: `MultiTokenPredictionLayer.forward` (core/transformer/multi_token_prediction.py), 0.18.
    """
    if job.model.mtp_num_layers and job.recompute.granularity == "full" and core_failures(job.megatron).mtp_recompute:
        yield Violation(
            ("recompute_granularity",),
            "full fails in this release with MTP layers: core 0.18 passes an argument that their checkpoint does not have",
            "use core 0.19 (--info-megatron 0.19.0) or selective, or leave out the MTP layers",
        )


def _skipped_final_norm(job: TrainingJob) -> Iterator[Violation]:
    """Overlapped microbatches do not run the final norm after a dense layer, and overlapped reductions need all gradients.

    Source: `submodule_combine_forward` (core/models/gpt/fine_grained_callables.py) and `_ParamAndGradBucketGroup.reset`
    (core/distributed/param_and_grad_buffer.py), 0.16 to 0.19. With virtual stages the schedule starts the reductions.
    """
    moe = job.model.moe
    overlaps = job.flags.overlap_moe_expert_parallel_comm and job.optimizer.overlap_grad_reduce
    if not overlaps or job.fsdp is not None or job.parallel.pipeline > 1 or moe is None or not moe.layers or moe.layers[-1]:
        return
    if core_failures(job.megatron).final_norm_unreduced:
        yield Violation(
            ("overlap_grad_reduce",),
            "fails after the first step in this release: with overlapped microbatches a dense last layer skips the final norm, "
            "whose gradients are then missing",
            "leave it out",
        )


def _delayed_latent_projections(job: TrainingJob) -> Iterator[Violation]:
    """The weight gradients of the latent projections are delayed and never computed, so their operands stay allocated.

    Source: `MoELayer.backward_dw` (core/transformer/moe/moe_layer.py), 0.16. It computes them from 0.17 on.
    """
    moe = job.model.moe
    if job.flags.delay_wgrad_compute and moe is not None and moe.latent_size and core_failures(job.megatron).latent_gradients_never:
        yield Violation(
            ("delay_wgrad_compute",),
            "this release never computes the weight gradients of the latent projections, whose operands fill the memory",
            "leave it out",
        )


def _uniform_recompute(job: TrainingJob) -> Iterator[Violation]:
    """Uniform recomputation checkpoints whole groups of layers, also at the end of a stage, where layers are missing.

    Source: `TransformerBlock._checkpointed_forward` (core/transformer/transformer_block.py), 0.10 to 0.16.
    """
    size = job.recompute.num_layers or 1
    if job.recompute.granularity != "full" or job.recompute.method != "uniform":
        return
    layers = gcd(*_layers_of_stages(job))
    if layers % size and core_failures(job.megatron).uniform_groups_complete:
        yield Violation(
            ("recompute_num_layers",),
            f"uniform recomputation of {size} layers needs a multiple of {size} layers in each stage in this release",
            f"use a divisor of {layers}",
        )


def _layers_of_stages(job: TrainingJob) -> Iterator[int]:
    """The numbers of layers of the virtual stages, without repetitions of equal stages."""
    split, parallel = job.parallel.pipeline_layout, job.parallel
    if parallel.pipeline == 1:
        yield job.model.num_layers
        return
    if split.layout is not None:
        yield from (stage.count("t") for stage in split.layout)
        return
    uneven = [layers for layers in (split.num_layers_in_first, split.num_layers_in_last) if layers is not None]
    yield from (layers // parallel.chunks for layers in uneven)
    others = parallel.pipeline - len(uneven)
    if others:
        equal = (counted_layers(job.model.num_layers, parallel) - sum(uneven)) // others // parallel.chunks
        yield from (equal - split.account_for_embedding, equal - split.account_for_loss)
        if others * parallel.chunks > split.account_for_embedding + split.account_for_loss:
            yield equal
