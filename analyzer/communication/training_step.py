"""Communication of a training step outside modules, pipeline and buckets: the batch, shared gradients, and scalars.

Source: megatron/training/utils.py (`get_batch_on_this_tp_rank`, `calc_params_l2_norm`), training.py (`train_step`),
megatron/core/distributed/finalize_model_grads.py and megatron/core/optimizer/{optimizer,clip_grads}.py, 0.16.1; the
code of 2023 is in `legacy`. Symbols: s sequence, b micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator

from analyzer.communication.calls import Call, Kind, Phase
from analyzer.layout.job_groups import gradient_statistics_group
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Module, Parameter
from analyzer.specs import TrainingJob
from analyzer.states.buffers.matrices import weights
from analyzer.states.buffers.parameter_order import parameter_runs, sum_of_parameters


def batch_calls(job: TrainingJob, stage: StageModel) -> Iterator[Call]:
    """Rank 0 of each tensor-parallel group broadcasts the fields of the batch that its stage needs, for each microbatch.

    Only the first and the last stage read the batch. Context parallelism splits the sequences later.
    """
    if job.model.family != "gpt":
        yield from _fields_of_images(job) if job.model.vision is not None else _fields_in_one_tensor(job)
        return
    shape = (job.batch.micro_batch_size, job.batch.seq_length)
    predicts = any(chunk.mtp_layers for chunk in stage.chunks)  # MTP layers need all fields
    first = predicts or any(chunk.pre_process for chunk in stage.chunks)
    last = predicts or any(chunk.post_process for chunk in stage.chunks)
    fields: list[tuple[str, tuple[int, ...], str]] = []
    if first:
        fields.append(("tokens", shape, "int64"))
    if last:
        fields += [("labels", shape, "int64"), ("loss_mask", shape, "fp32")]
    if (first or last) and job.flags.attention_mask_in_dataloader:
        fields.append(("attention_mask", (shape[0], 1, shape[1], shape[1]), "bool"))
    if first:
        # the number of cumulative lengths of packed sequences, and the lengths: none
        fields += [("position_ids", shape, "int64"), ("cu_seqlens_size", (), "int64"), ("cu_seqlens", (0,), "int32")]
    for name, size, dtype in fields:
        yield Call(
            group="tp",
            kind="broadcast",
            phase="forward",
            module=f"batch.{name}",
            shape=size,
            dtype=dtype,
            per_microbatch=1,
        )


def _fields_in_one_tensor(job: TrainingJob) -> Iterator[Call]:
    """The batch of BERT and T5 on every stage: sizes of the fields, and one tensor with all of them.

    `broadcast_data` (core/tensor_parallel/data.py, 0.16.1): five int64 sizes for each of six fields.
    """
    samples, length, decoder = job.batch.micro_batch_size, job.batch.seq_length, job.model.decoder_seq_length
    # T5: tokens and padding of the encoder; tokens, labels, loss mask and padding of the decoder
    elements = (5 * length + 1) * samples if decoder is None else (2 * length + 4 * decoder) * samples
    for name, size in (("sizes", 5 * 6), ("fields", elements)):
        yield Call(
            group="tp", kind="broadcast", phase="forward", module=f"batch.{name}", shape=(size,), dtype="int64", per_microbatch=1
        )


def _fields_of_images(job: TrainingJob) -> Iterator[Call]:
    """The batch of pretrain_vlm.py on every stage: two groups of fields, each with their sizes and one tensor.

    examples/multimodal/train.py has six groups of one field.

    Tokens, positions and labels are int64; the pixels and the loss mask are fp32.
    """
    vision, samples = job.model.vision, job.batch.micro_batch_size
    assert vision is not None, "the model has images"
    tokens = samples * vision.text_length
    pixels = 3 * vision.image_height * vision.image_width * samples * vision.tiles
    groups: tuple[tuple[str, int, int, str], ...] = (("integers", 3, 3 * tokens, "int64"), ("floats", 2, pixels + tokens, "fp32"))
    if vision.separate_fields:  # labels have one token more; samples that are not packed have lengths of one element
        groups = (
            ("tokens", 1, tokens, "int64"),
            ("labels", 1, tokens + samples, "int64"),
            ("imgs", 1, pixels, "fp32"),
            ("num_tiles", 1, samples, "int32"),
            ("cu_lengths", 1, 1, "int32"),
            ("max_lengths", 1, 1, "int32"),
        )
    for name, fields, size, dtype in groups:
        for part, numel, kind in (("sizes", 5 * fields, "int64"), ("fields", size, dtype)):
            yield Call(
                group="tp",
                kind="broadcast",
                phase="forward",
                module=f"batch.{name}.{part}",
                shape=(numel,),
                dtype=kind,
                per_microbatch=1,
            )


def shared_gradient_calls(job: TrainingJob, stage: StageModel) -> Iterator[Call]:
    """Gradients of replicated weights that each rank computes from a part of the tokens.

    Replicated weights of sequence-parallel regions, and q/k norms always: one all-reduce of a flattened copy over tensor-parallel
    ranks, and another one for those that are averaged. Tied word embedding: an all-reduce between the first and the last pipeline
    rank, at full size also with the distributed optimizer, because it follows the reduce-scatter and works on the full buffer in
    place. With Megatron-FSDP each rank reduces the elements of its shard, after they have been converted to fp32 for the optimizer;
    the size is that of the described replica.
    """
    dtype: str = job.precision.parameters if _uses_torch_fsdp(job) else job.precision.gradients
    if job.fsdp is not None and job.fsdp.implementation == "megatron":
        from analyzer.states.buffers.fsdp import replicated_numel, sharded_buckets

        dtype = "fp32"
        replicated = sum(replicated_numel(job, bucket) for tree in stage.trees for bucket in sharded_buckets(job, tree))
    else:
        replicated = sum(tree.derived(_replicated_numel) for tree in stage.trees)
    averaged = sum(tree.derived(_averaged_numel) for tree in stage.trees) if job.parallel.tensor > 1 else 0
    for name, numel in (("replicated_gradients", replicated), ("averaged_gradients", averaged)):
        if numel:
            yield Call(group="tp", kind="all_reduce", phase="gradient", module=name, shape=(numel,), dtype=dtype, per_iteration=1)
    for embedding in (parameter for tree in stage.trees for parameter in tree.derived(_shared_embeddings)):
        yield Call(
            group="embd",
            kind="all_reduce",
            phase="gradient",
            module="word_embeddings.gradient",
            shape=embedding.shape,
            dtype=job.precision.gradients,
            per_iteration=1,
        )


def _replicated_numel(tree: Module) -> int:
    return sum_of_parameters(tree, lambda parameter: parameter.numel if parameter.sequence_parallel and not parameter.frozen else 0)


def _averaged_numel(tree: Module) -> int:
    return sum_of_parameters(tree, lambda parameter: parameter.numel if parameter.averaged and not parameter.frozen else 0)


def _shared_embeddings(tree: Module) -> list[Parameter]:
    return [each for run in parameter_runs(tree) for each in run.parameters if each.shared_embedding and not each.frozen]


def _has_experts(tree: Module) -> bool:
    return any(parameter.sharding == "expert" for run in parameter_runs(tree) for parameter in run.parameters)


def expert_bias_calls(job: TrainingJob, stage: StageModel) -> Iterator[Call]:
    """Tokens of each expert in all MoE layers of a rank, reduced to update the expert biases (`_update_router_expert_bias`).

    The counts are a buffer of the router, which the model wrapper casts to the type of the weights.
    """
    moe = job.model.moe
    if moe is None or not moe.expert_bias:
        return
    routers = sum(tree.derived(_routers) for tree in stage.trees)
    if routers:
        yield Call(
            group="tp_dp_cp",
            kind="all_reduce",
            phase="gradient",
            module="router.expert_bias",
            shape=(routers, moe.num_experts),
            dtype=job.precision.parameters,
            per_iteration=1,
        )


def _routers(tree: Module) -> int:
    return sum(module.kind is ModuleKind.ROUTER for _, module in tree.walk())


def token_count_calls(job: TrainingJob) -> Iterator[Call]:
    """With `--calculate-per-token-loss` the last stage broadcasts the number of tokens, and replicas sum it."""
    calls: tuple[tuple[str, Kind], ...] = (("pp", "broadcast"), ("dp_cp", "all_reduce"))
    if job.flags.calculate_per_token_loss:
        for group, kind in calls:
            yield Call(
                group=group,
                kind=kind,
                phase="gradient",
                module="loss.num_tokens",
                shape=(),
                dtype="int32",
                per_iteration=1,
            )


def _uses_torch_fsdp(job: TrainingJob) -> bool:
    return job.fsdp is not None and job.fsdp.implementation == "torch"


def _always_counts_zeros(job: TrainingJob, *, groups: int) -> bool:
    """Whether zeros are counted without `--log-num-zeros-in-grad`."""
    return groups == 1 and job.core.chained_optimizers_count_zeros


def scalar_calls(job: TrainingJob, stage: StageModel) -> Iterator[Call]:
    """All-reduces of one number around the optimizer step, and of the loss at the end.

    The norm is computed also without clipping (`ChainedOptimizer.step`). The loss is a pair: its sum and the number of tokens.
    Experts have a separate optimizer: each optimizer checks for overflow, and if their groups differ, computes its own norm and
    number of zeros (`ChainedOptimizer.get_grad_norm`).
    """
    optimizers = tuple(_optimizers(job, stage))
    summing = optimizers if len({group for _, group in optimizers}) > 1 else optimizers[:1]
    scalars: list[tuple[str, str, Phase, int, str]] = []
    if job.precision.parameters == "fp16":
        scalars += [(f"{owner}.found_inf", group, "gradient", 1, "fp32") for owner, group in optimizers]
    if _uses_torch_fsdp(job):  # the gradients are DTensors (`get_data_parallel_group_if_dtensor`)
        scalars.append(("optimizer.grad_norm.shards", "dp_cp", "gradient", 1, "fp32"))
    scalars += [(f"{owner}.grad_norm", group, "gradient", 1, "fp32") for owner, group in summing]
    if job.optimizer.log_num_zeros_in_grad or _always_counts_zeros(job, groups=len({group for _, group in optimizers})):
        scalars += [(f"{owner}.num_zeros_in_grad", group, "gradient", 1, "fp32") for owner, group in summing]
    scalars += [
        ("train_step.update_successful", "mp", "parameter", 1, "int32"),
        ("train_step.grad_norm", "mp", "parameter", 1, "fp32"),
    ]
    if job.optimizer.log_num_zeros_in_grad:
        scalars.append(("train_step.num_zeros_in_grad", "mp", "parameter", 1, "fp32"))
    if any(chunk.post_process for chunk in stage.chunks) and job.model.family != "bert":
        scalars.append(("loss.average", "dp_cp", "forward", 2, "fp32"))
        if job.model.mtp_num_layers:
            scalars.append(("mtp_loss.average", "dp_cp", "forward", job.model.mtp_num_layers, "fp32"))
            if job.core.counts_mtp_predictions:
                counters = ("mtp_loss.correct", "mtp_loss.total")
                scalars += [(name, "dp_cp", "forward", job.model.mtp_num_layers, "fp32") for name in counters]
    if job.optimizer.log_params_norm:
        scalars += [("params_norm.shards", "dp_cp", "parameter", 1, "fp32"), ("params_norm", "mp", "parameter", 1, "fp32")]
    for module, group, phase, numel, dtype in scalars:
        yield Call(
            group=group,
            kind="all_reduce",
            phase=phase,
            module=module,
            shape=(numel,),
            dtype=dtype,
            per_iteration=1,
        )


def loss_calls(job: TrainingJob, stage: StageModel) -> Iterator[Call]:
    """BERT averages its losses over data-parallel ranks for each microbatch (`loss_func` of pretrain_bert.py)."""
    if job.model.family == "bert" and any(chunk.post_process for chunk in stage.chunks):
        yield Call(
            group="dp",
            kind="all_reduce",
            phase="forward",
            module="loss.average",
            shape=(1 + job.model.binary_head,),
            dtype="fp32",
            per_microbatch=1,
        )


def _optimizers(job: TrainingJob, stage: StageModel) -> Iterator[tuple[str, str]]:
    """The optimizers of a rank, by name, and the group of their gradient statistics.

    Experts have their own with expert parallelism, if the rank has experts. Muon is followed by Adam, each with its own of experts
    (`get_megatron_muon_optimizer`), except with the layer-wise optimizer, where all have the same group. With buffers laid out by
    matrices, Adam is the distributed optimizer.
    """
    dense, experts = gradient_statistics_group(job), gradient_statistics_group(job, experts=True)
    muon = job.optimizer.muon
    yield "optimizer", dense
    if muon is not None and muon.aligned:
        yield "optimizer.vectors", "intra_dist_opt"
    elif muon is None:
        if job.parallel.expert > 1 and any(tree.derived(_has_experts) for tree in stage.trees):
            yield "optimizer.experts", experts
    elif not muon.layer_wise and job.parallel.expert > 1:
        of_experts = {weight.orthogonalized for weight in weights(job, stage) if weight.expert}
        yield from [("optimizer.experts", experts)] if True in of_experts else []
        yield "optimizer.vectors", dense
        yield from [("optimizer.experts.vectors", experts)] if False in of_experts else []
