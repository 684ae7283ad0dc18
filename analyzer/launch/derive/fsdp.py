"""Fully sharded data parallelism: Megatron-FSDP and torch's FSDP2, their requirements and the options that they turn on.

Megatron: `validate_args`, and `load_checkpoint` (megatron/training/checkpointing.py), which with the format fsdp_dtensor creates
optimizer states before it looks for a checkpoint, 0.16.1. Differences in later releases: megatron_fsdp.py of 0.17.1 and 0.18.2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, cast

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.derive.reading import option, positive, since, switched_on, text
from analyzer.specs import FsdpSpec, ModelSpec, OptimizerSpec, PrecisionSpec, TrainingFlags
from analyzer.specs.release_changes import core_behavior

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.launch.derive.launch_input import LaunchInput

Strategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]


def sharding_flag(arguments: Arguments) -> str | None:
    """The dest that turns full sharding on, or None."""
    dests = ("use_megatron_fsdp", "use_custom_fsdp", "use_torch_fsdp2")
    return next((dest for dest in dests if switched_on(arguments, dest)), None)


def fsdp_spec(
    launch: LaunchInput, *, model: ModelSpec, precision: PrecisionSpec, optimizer: OptimizerSpec, flags: TrainingFlags
) -> FsdpSpec | None:
    """What is sharded and how; None without full sharding. Raises InputError for what Megatron refuses."""
    arguments = launch.arguments
    dest = sharding_flag(arguments)
    if dest is None:
        return None
    named = option(arguments, dest)
    if launch.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise InputError("CUDA_DEVICE_MAX_CONNECTIONS", f"is 1, which {named} does not support", "unset it")
    if dest == "use_torch_fsdp2":
        _check_torch(arguments, model=model, precision=precision, flags=flags)
        return FsdpSpec(
            implementation="torch",
            reshard_after_forward=bool(arguments.get("torch_fsdp2_reshard_after_forward", True)),
        )
    strategy = cast(Strategy, text(arguments, "data_parallel_sharding_strategy", "no_shard"))
    _check_megatron(arguments, dest=dest, strategy=strategy, optimizer=optimizer, flags=flags)
    if precision.fp8 is not None and precision.fp8.stored_parameters and precision.fp8.recipe == "mxfp8":
        raise UnsupportedError(
            named, "sharded mxfp8 parameters and their transposes are not modelled", "leave out --fp8-param-gather"
        )
    core = core_behavior(arguments.release)
    return FsdpSpec(
        implementation="megatron",
        strategy=strategy,
        outer_sharding=text(arguments, "outer_dp_sharding_strategy", "no_shard") != "no_shard",
        expert_instances=not core.fsdp_meshes_of_instances or core.fsdp_expert_instances,
        main_gradients=_asked_dtype(arguments, "megatron_fsdp_main_grads_dtype"),
        reduced_gradients=_asked_dtype(arguments, "megatron_fsdp_grad_comm_dtype"),
        communication_unit_size=positive(arguments, "suggested_communication_unit_size"),
        double_buffer=switched_on(arguments, "fsdp_double_buffer") or switched_on(arguments, "nccl_ub"),
        starts_from_meta=switched_on(arguments, "init_model_with_meta_device"),
        moments_from_start=_loads_optimizer(arguments),
        outside_layers_prefetches=not core.fsdp_marks_all_modules,
        outside_layers_stay=core.fsdp_marks_all_modules,
    )


def _asked_dtype(arguments: Arguments, dest: str) -> str | None:
    """An element type of gradients; None for auto."""
    dtype = text(arguments, dest, "auto")
    return None if dtype == "auto" else dtype


def sharding_optimizer(optimizer: OptimizerSpec, fsdp: FsdpSpec | None, *, release_switches_overlap: bool) -> OptimizerSpec:
    """The optimizer with the options that Megatron-FSDP turns on.

    From 0.18 on the optimizer is distributed without the flag. In 0.12 and 0.13, strategies that shard gradients turn
    `overlap_grad_reduce` on before the bucket size is chosen; later releases do so afterwards.
    """
    if fsdp is None or fsdp.implementation == "torch":
        return optimizer
    overlaps = release_switches_overlap and fsdp.strategy in ("optim_grads", "optim_grads_params")
    return replace(optimizer, distributed=True, overlap_grad_reduce=optimizer.overlap_grad_reduce or overlaps)


def _loads_optimizer(arguments: Arguments) -> bool:
    """Whether `--load` creates optimizer states before the first iteration."""
    skipped = switched_on(arguments, "finetune") or switched_on(arguments, "no_load_optim")
    return bool(arguments.get("load")) and text(arguments, "ckpt_format", "torch_dist") == "fsdp_dtensor" and not skipped


def _check_megatron(arguments: Arguments, *, dest: str, strategy: Strategy, optimizer: OptimizerSpec, flags: TrainingFlags) -> None:
    named = option(arguments, dest)
    if switched_on(arguments, "use_torch_fsdp2"):
        raise InputError(named, "contradicts --use-torch-fsdp2", "keep one of the two")
    if optimizer.precision_aware:
        raise UnsupportedError(
            named, "sharding with the precision-aware optimizer is not modelled", "leave out --use-precision-aware-optimizer"
        )
    if dest == "use_custom_fsdp":
        if not optimizer.distributed:
            raise InputError(named, "needs the distributed optimizer", "add --use-distributed-optimizer")
        if strategy in ("optim_grads", "optim_grads_params") and flags.gradient_accumulation_fusion:
            raise InputError(
                option(arguments, "data_parallel_sharding_strategy"),
                f"{strategy} cannot be used with fused gradient accumulation",
                "add --no-gradient-accumulation-fusion",
            )
        return
    if text(arguments, "ckpt_format", "torch_dist") != "fsdp_dtensor":
        raise InputError(named, "needs its own checkpoint format", "add --ckpt-format fsdp_dtensor")
    if not optimizer.distributed and not since(arguments, "0.18"):
        raise UnsupportedError(
            named, "without the distributed optimizer Megatron does not update the shards", "add --use-distributed-optimizer"
        )


def _check_torch(arguments: Arguments, *, model: ModelSpec, precision: PrecisionSpec, flags: TrainingFlags) -> None:
    named = option(arguments, "use_torch_fsdp2")
    checkpoint = text(arguments, "ckpt_format", "torch_dist")
    refusals = (
        (
            flags.gradient_accumulation_fusion,
            "cannot be used with fused gradient accumulation",
            "add --no-gradient-accumulation-fusion",
        ),
        (
            checkpoint not in ("torch_dist", "torch_dcp"),
            f"does not save checkpoints as {checkpoint}",
            "use --ckpt-format torch_dist",
        ),
        (model.tied_embeddings, "needs untied embeddings", "add --untie-embeddings-and-output-weights"),
        (precision.parameters == "fp16", "does not train in fp16", "use --bf16"),
    )
    for refused, fault, remedy in refusals:
        if refused:
            raise InputError(named, fault, remedy)
