"""Builds megatron-core's configuration objects for data parallelism and the optimizer, as `get_model` does."""

from __future__ import annotations

from typing import Any, Final

import torch

from allocator_hook.step.config import TORCH_DTYPES, stores_fp8
from allocator_hook.step.muon import muon_options
from allocator_hook.step.versions import known_to
from analyzer.specs import TrainingJob

_FP8: Final = ("delayed", "tensorwise", "blockwise", "mxfp8")


def uses_torch_fsdp(job: TrainingJob) -> bool:
    """Return whether the job uses torch FSDP2."""
    return job.fsdp is not None and job.fsdp.implementation == "torch"


def _fsdp(job: TrainingJob) -> dict[str, Any]:
    """Return the options of Megatron-FSDP."""
    fsdp = job.fsdp
    if fsdp is None:
        return {}
    return {
        "use_megatron_fsdp": True,
        "data_parallel_sharding_strategy": fsdp.strategy,
        "outer_dp_sharding_strategy": "optim" if fsdp.outer_sharding else "no_shard",
        "suggested_communication_unit_size": fsdp.communication_unit_size,
        "fsdp_double_buffer": fsdp.double_buffer,
        "megatron_fsdp_main_grads_dtype": _dtype(fsdp.main_gradients),
        "megatron_fsdp_grad_comm_dtype": _dtype(fsdp.reduced_gradients),
    }


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else TORCH_DTYPES[name]


def ddp_config(job: TrainingJob, *, parameters: int) -> Any:
    """Build the DistributedDataParallelConfig (`get_model`). `parameters` is the parameter count of the rank.

    `--ddp-num-buckets` divides the parameters into that many buckets.
    """
    from megatron.core.distributed import DistributedDataParallelConfig

    if uses_torch_fsdp(job):
        from megatron.core.distributed import TorchFullyShardedDataParallelConfig

        assert job.fsdp is not None
        return TorchFullyShardedDataParallelConfig(reshard_after_forward=job.fsdp.reshard_after_forward)
    optimizer = job.optimizer
    bucket_size = optimizer.ddp_bucket_size
    if optimizer.ddp_num_buckets:
        bucket_size = parameters // optimizer.ddp_num_buckets
    if job.fsdp is not None:  # without FSDP, DistributedDataParallel does the same
        default = max(40_000_000, 1_000_000 * job.parallel.data_with_context)
        bucket_size = (bucket_size or default) if optimizer.overlap_grad_reduce else None
    return DistributedDataParallelConfig(
        **known_to(
            DistributedDataParallelConfig,
            grad_reduce_in_fp32=job.precision.gradients == "fp32",
            overlap_grad_reduce=optimizer.overlap_grad_reduce,
            overlap_param_gather=optimizer.overlap_param_gather,
            align_param_gather=_align_param_gather(job),
            use_distributed_optimizer=optimizer.distributed,
            num_distributed_optimizer_instances=job.parallel.distributed_optimizer_instances,
            check_for_nan_in_grad=job.flags.check_for_nan_in_loss_and_grad,
            delay_wgrad_compute=job.flags.delay_wgrad_compute,
            bucket_size=bucket_size,
            pad_buckets_for_high_nccl_busbw=optimizer.pad_buckets_for_high_nccl_busbw,
            average_in_collective=optimizer.average_in_collective,
            reduce_scatter_with_fp32_accumulation=optimizer.reduce_scatter_with_fp32_accumulation,
            fp8_param_gather=stores_fp8(job, *_FP8),
            **({"fp4_param_gather": True} if stores_fp8(job, "nvfp4") else {}),
            reuse_grad_buf_for_mxfp8_param_ag=stores_fp8(job, "mxfp8"),
            **_fsdp(job),
        )
    )


def _align_param_gather(job: TrainingJob) -> bool:
    """Return `align_param_gather`: `validate_args` sets it with the interleaved schedule and overlapped gathers."""
    return job.optimizer.overlap_param_gather and job.parallel.virtual_pipeline is not None


def optimizer_config(job: TrainingJob) -> Any:
    """Build the OptimizerConfig (`get_megatron_optimizer_config`)."""
    from megatron.core.optimizer import OptimizerConfig

    spec, dtype = job.optimizer, job.precision.parameters
    return OptimizerConfig(
        **known_to(
            OptimizerConfig,
            optimizer=spec.name,
            lr=1e-4,
            min_lr=1e-5,
            weight_decay=spec.weight_decay,
            sgd_momentum=spec.sgd_momentum,
            fp16=dtype == "fp16",
            bf16=dtype == "bf16",
            params_dtype=TORCH_DTYPES[dtype],
            use_distributed_optimizer=spec.distributed and spec.muon is None,
            overlap_param_gather=spec.overlap_param_gather,
            overlap_param_gather_with_optimizer_step=spec.overlap_param_gather_with_optimizer_step,
            use_precision_aware_optimizer=spec.precision_aware,
            main_params_dtype=TORCH_DTYPES[spec.main_params_dtype],
            main_grads_dtype=TORCH_DTYPES[job.precision.gradients if spec.precision_aware else "fp32"],
            exp_avg_dtype=TORCH_DTYPES[spec.exp_avg_dtype],
            exp_avg_sq_dtype=TORCH_DTYPES[spec.exp_avg_sq_dtype],
            optimizer_cpu_offload=spec.offload is not None,
            optimizer_offload_fraction=spec.offload.fraction if spec.offload is not None else 0.0,
            pin_cpu_grads=spec.offload.pinned_gradients if spec.offload is not None else True,
            clip_grad=spec.clip_grad,
            log_num_zeros_in_grad=spec.log_num_zeros_in_grad,
            fp8_recipe=spec.fp8_recipe,
            reuse_grad_buf_for_mxfp8_param_ag=stores_fp8(job, "mxfp8"),
            **muon_options(spec.muon),
        )
    )
