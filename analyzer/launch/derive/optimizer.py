"""The optimizer, its states, and how gradients and parameters are communicated between replicas.

Megatron: `validate_args`, `OptimizerConfig.__post_init__`, `DistributedDataParallel` and `DistributedOptimizer`, 0.16.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.derive.optimizer_offload import offload_spec
from analyzer.launch.derive.reading import RELEASE_2023, number, option, positive, since, switched_on, text
from analyzer.specs import OPTIMIZERS, MuonSpec, OptimizerFacts, OptimizerSpec
from analyzer.specs.optimizer import names_of_optimizers

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments

_STATE_DTYPES = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def optimizer_spec(arguments: Arguments, *, gradients: str) -> OptimizerSpec:
    """The optimizer and its collectives, for gradients of this type. Raises InputError for what Megatron refuses.

    Optimizers that are not in `OPTIMIZERS` are refused earlier, in `coverage.supported`.
    """
    facts = OPTIMIZERS[text(arguments, "optimizer", OptimizerSpec.name)]
    muon = _muon(arguments) if facts.orthogonalizes else None
    distributed = muon.aligned if muon is not None else switched_on(arguments, "use_distributed_optimizer")
    _check_release(arguments, facts)
    _check_sharding(arguments, facts, distributed=distributed)
    _check_precision_aware(arguments, facts, distributed=distributed, gradients=gradients)
    _check_overlap(arguments, distributed=distributed)
    average = switched_on(arguments, "ddp_average_in_collective")
    if average and switched_on(arguments, "calculate_per_token_loss"):
        raise InputError(
            option(arguments, "ddp_average_in_collective"), "contradicts --calculate-per-token-loss", "keep one of the two"
        )
    return OptimizerSpec(
        name=facts.name,
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


def _muon(arguments: Arguments) -> MuonSpec:
    from analyzer.launch.derive.muon import muon_spec  # imported for Muon only, for a short start-up

    return muon_spec(arguments)


def _check_release(arguments: Arguments, facts: OptimizerFacts) -> None:
    """Raises UnsupportedError for an optimizer that is not modelled in this release."""
    if facts.not_modelled_since is None:
        return
    release, reason = facts.not_modelled_since
    if since(arguments, release):
        raise UnsupportedError(f"--optimizer {facts.name}", reason, f"use {names_of_optimizers(without=facts.name)}")


def _check_sharding(arguments: Arguments, facts: OptimizerFacts, *, distributed: bool) -> None:
    """Raises InputError for an optimizer that Megatron does not shard, UnsupportedError for FSDP that is not modelled with it."""
    if distributed and facts.sharding is None:
        raise InputError(
            option(arguments, "use_distributed_optimizer"),
            f"needs adam, and --optimizer is {facts.name}",
            "use --optimizer adam, or leave it out",
        )
    for dest in ("use_torch_fsdp2", "use_megatron_fsdp"):
        if switched_on(arguments, dest) and not facts.fsdp:
            fault = f"sharding with {facts.title} is not modelled"
            raise UnsupportedError(option(arguments, dest), fault, "use --optimizer adam")


def _check_precision_aware(arguments: Arguments, facts: OptimizerFacts, *, distributed: bool, gradients: str) -> None:
    if switched_on(arguments, "use_precision_aware_optimizer"):
        named = option(arguments, "use_precision_aware_optimizer")
        if not facts.precision_aware:
            raise InputError(named, f"needs adam, and --optimizer is {facts.name}", "use --optimizer adam, or leave it out")
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
