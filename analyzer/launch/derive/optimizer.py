"""The optimizer, its states, and how gradients and parameters are communicated between replicas.

Megatron: `validate_args`, `OptimizerConfig.__post_init__`, `DistributedDataParallel` and `DistributedOptimizer`, 0.16.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

from analyzer.errors import InputError
from analyzer.launch.derive.lion import check_lion
from analyzer.launch.derive.muon import muon_spec
from analyzer.launch.derive.optimizer_offload import offload_spec
from analyzer.launch.derive.reading import RELEASE_2023, number, option, positive, switched_on, text
from analyzer.specs import OptimizerSpec

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments

_STATE_DTYPES = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def optimizer_spec(arguments: Arguments, *, gradients: str) -> OptimizerSpec:
    """The optimizer and its collectives, for gradients of this type. Raises InputError for what Megatron refuses.

    Optimizers other than adam, sgd, muon and lion are refused earlier, in `coverage.supported`.
    """
    check_lion(arguments)
    muon = muon_spec(arguments)
    name = "muon" if muon is not None else text(arguments, "optimizer", "adam")
    distributed = muon.aligned if muon is not None else switched_on(arguments, "use_distributed_optimizer")
    if distributed and name not in ("adam", "muon"):
        raise InputError(
            option(arguments, "use_distributed_optimizer"),
            f"needs adam, and --optimizer is {name}",
            "use --optimizer adam, or leave it out",
        )
    _check_precision_aware(arguments, name=name, distributed=distributed, gradients=gradients)
    _check_overlap(arguments, distributed=distributed)
    average = switched_on(arguments, "ddp_average_in_collective")
    if average and switched_on(arguments, "calculate_per_token_loss"):
        raise InputError(
            option(arguments, "ddp_average_in_collective"), "contradicts --calculate-per-token-loss", "keep one of the two"
        )
    return OptimizerSpec(
        name=cast(Literal["adam", "sgd", "muon", "lion"], name),
        muon=muon,
        offload=offload_spec(arguments),
        sgd_momentum=number(arguments, "sgd_momentum", 0.9),
        distributed=distributed,
        precision_aware=switched_on(arguments, "use_precision_aware_optimizer"),
        main_params_dtype=text(arguments, "main_params_dtype", "fp32"),
        exp_avg_dtype=text(arguments, "exp_avg_dtype", "fp32"),
        exp_avg_sq_dtype=text(arguments, "exp_avg_sq_dtype", "fp32"),
        fp8_recipe=text(arguments, "fp8_recipe", "delayed"),
        overlap_grad_reduce=switched_on(arguments, "overlap_grad_reduce"),
        aligned_grad_reduce=arguments.get("align_grad_reduce") is not False,
        overlap_param_gather=switched_on(arguments, "overlap_param_gather"),
        overlap_param_gather_with_optimizer_step=switched_on(arguments, "overlap_param_gather_with_optimizer_step"),
        ddp_bucket_size=positive(arguments, "ddp_bucket_size"),
        ddp_num_buckets=positive(arguments, "ddp_num_buckets"),
        pad_buckets_for_high_nccl_busbw=switched_on(arguments, "ddp_pad_buckets_for_high_nccl_busbw"),
        average_in_collective=average,
        reduce_scatter_with_fp32_accumulation=switched_on(arguments, "ddp_reduce_scatter_with_fp32_accumulation"),
        clip_grad=number(arguments, "clip_grad", 1.0),
        weight_decay=number(arguments, "weight_decay", 0.01),
        log_num_zeros_in_grad=switched_on(arguments, "log_num_zeros_in_grad"),
        log_params_norm=switched_on(arguments, "log_params_norm"),
    )


def _check_precision_aware(arguments: Arguments, *, name: str, distributed: bool, gradients: str) -> None:
    if switched_on(arguments, "use_precision_aware_optimizer"):
        named = option(arguments, "use_precision_aware_optimizer")
        if name != "adam":
            raise InputError(named, f"needs adam, and --optimizer is {name}", "use --optimizer adam, or leave it out")
        if not distributed:
            raise InputError(named, "needs the distributed optimizer", "add --use-distributed-optimizer")
        if gradients == "fp16" and number(arguments, "clip_grad", 1.0) > 0:  # `clip_grad_by_total_norm_fp32`
            raise InputError(named, "cannot clip fp16 gradients", "add --accumulate-allreduce-grads-in-fp32")
        return
    for dest in ("main_grads_dtype", *_STATE_DTYPES):
        dtype = text(arguments, dest, "fp32")
        if dtype != "fp32":
            raise InputError(
                option(arguments, dest),
                f"{dtype} needs the precision-aware optimizer",
                "add --use-precision-aware-optimizer, or use fp32",
            )


def _check_overlap(arguments: Arguments, *, distributed: bool) -> None:
    gather = switched_on(arguments, "overlap_param_gather")
    named = option(arguments, "overlap_param_gather")
    if gather and not distributed:
        raise InputError(
            named, "there are no shards to gather without the distributed optimizer", "add --use-distributed-optimizer"
        )
    if gather and not switched_on(arguments, "overlap_grad_reduce") and arguments.release != RELEASE_2023:
        raise InputError(named, "needs --overlap-grad-reduce", "add --overlap-grad-reduce")
    if not switched_on(arguments, "overlap_param_gather_with_optimizer_step"):
        return
    named = option(arguments, "overlap_param_gather_with_optimizer_step")
    if not distributed or not gather:
        raise InputError(
            named,
            "needs the distributed optimizer and --overlap-param-gather",
            "add --use-distributed-optimizer --overlap-param-gather",
        )
    if text(arguments, "ckpt_format", "torch_dist") != "torch":
        raise InputError(named, "cannot be used with distributed checkpoints", "add --ckpt-format torch")
