"""Checks of gradient buffers, the distributed optimizer and fully sharded data parallelism.

Megatron: `validate_args` (megatron/training/arguments.py), `OptimizerConfig`, `DistributedDataParallelConfig` and
`DistributedDataParallel` (megatron/core), 0.16 to 0.19.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from analyzer.launch.derive.fsdp import sharding_flag
from analyzer.launch.derive.reading import option, since, size, switched_on, text
from analyzer.specs import OPTIMIZERS, OptimizerSpec
from analyzer.specs.rules.violation import Violation

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.launch.derive.launch_input import LaunchInput

_LEAVE: Final = "leave it out"


def sharding_violations(launch: LaunchInput) -> Iterator[Violation]:
    """Options of data parallelism that contradict each other."""
    arguments = launch.arguments
    if not since(arguments, "0.16"):
        return
    yield from _instances(arguments)
    yield from _buffers(arguments)
    yield from _registration(arguments, launch.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    yield from _torch_fsdp(arguments)
    if switched_on(arguments, "use_megatron_fsdp"):
        yield from _megatron_fsdp(arguments)


def _instances(arguments: Arguments) -> Iterator[Violation]:
    """Several optimizer instances (`DistributedDataParallel.__init__` and `_ParamAndGradBucketGroup.__init__`)."""
    dest = "num_distributed_optimizer_instances"
    if size(arguments, dest) == 1 or sharding_flag(arguments) is not None:
        return
    name = text(arguments, "optimizer", OptimizerSpec.name)
    emerging = OPTIMIZERS[name].emerging
    if not emerging and not switched_on(arguments, "use_distributed_optimizer"):
        yield Violation((dest,), "needs the distributed optimizer", "add --use-distributed-optimizer")
    if emerging and not since(arguments, "0.18"):
        yield Violation((dest,), f"needs the distributed optimizer, which --optimizer {name} does not have", _LEAVE)
    if switched_on(arguments, "ddp_reduce_scatter_with_fp32_accumulation"):
        yield Violation((dest,), "contradicts --ddp-reduce-scatter-with-fp32-accumulation", "keep one of the two")


def _buffers(arguments: Arguments) -> Iterator[Violation]:
    later = switched_on(arguments, "overlap_param_gather_with_optimizer_step")
    if later and switched_on(arguments, "reuse_grad_buf_for_mxfp8_param_ag") and since(arguments, "0.19"):
        yield Violation(
            ("overlap_param_gather_with_optimizer_step",), "contradicts --reuse-grad-buf-for-mxfp8-param-ag", "keep one of the two"
        )
    sizes = ("ddp_num_buckets", "ddp_bucket_size")
    if since(arguments, "0.18") and all(arguments.get(dest) is not None for dest in sizes):
        yield Violation(("ddp_num_buckets",), f"contradicts {option(arguments, 'ddp_bucket_size')}", "keep one of the two")


def _registration(arguments: Arguments, allocator: str) -> Iterator[Violation]:
    """Buffers that are registered with NCCL."""
    registered = switched_on(arguments, "nccl_ub")
    if registered and "expandable_segments:True" in allocator.split(","):
        yield Violation(
            ("nccl_ub",), "cannot be used with expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF", "unset that variable"
        )
    if not switched_on(arguments, "fsdp_manual_registration"):
        return
    for dest, needed in (("use_megatron_fsdp", "--use-megatron-fsdp"), ("nccl_ub", "--use-nccl-ub")):
        if not switched_on(arguments, dest):
            yield Violation(("fsdp_manual_registration",), f"needs {needed}", f"add {needed}, or {_LEAVE}")


def _torch_fsdp(arguments: Arguments) -> Iterator[Violation]:
    if not switched_on(arguments, "use_torch_fsdp2"):
        return
    for dest in ("pipeline_model_parallel_size", "expert_model_parallel_size"):
        if size(arguments, dest) > 1:
            yield Violation(("use_torch_fsdp2",), f"does not support {option(arguments, dest)} {size(arguments, dest)}", "use 1")
    if switched_on(arguments, "use_distributed_optimizer"):
        yield Violation(("use_torch_fsdp2",), "contradicts --use-distributed-optimizer", "keep one of the two")
    if switched_on(arguments, "init_model_with_meta_device"):  # FSDPParamGroup._validate_no_meta_params of PyTorch
        yield Violation(
            ("init_model_with_meta_device",), "leaves the model without memory, which PyTorch FSDP2 refuses to train", _LEAVE
        )


def _megatron_fsdp(arguments: Arguments) -> Iterator[Violation]:
    strategy = text(arguments, "data_parallel_sharding_strategy", "no_shard")
    compared = "check_weight_hash_across_dp_replicas_interval"
    if strategy == "optim_grads_params" and arguments.get(compared) is not None:
        yield Violation((compared,), "there are no replicas of sharded parameters to compare", _LEAVE)
    if switched_on(arguments, "init_model_with_meta_device") and strategy == "no_shard" and since(arguments, "0.18"):
        yield Violation(("init_model_with_meta_device",), "needs sharded parameters", "use --data-parallel-sharding-strategy optim")
    for dest in ("moe_single_grouped_weight", "moe_single_grouped_bias"):
        if switched_on(arguments, dest) and since(arguments, "0.19"):
            yield Violation((dest,), "is not supported with Megatron-FSDP", _LEAVE)
