"""Flags that change memory or communication and belong to no other spec.

Megatron: `validate_args` and `ModelParallelConfig.__post_init__`, 0.16.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from analyzer.errors import InputError
from analyzer.launch.derive.activations import overlaps_expert_gradients, overlaps_microbatches
from analyzer.launch.derive.fsdp import sharding_flag
from analyzer.launch.derive.reading import RELEASE_2023, integer, option, since, switched_on
from analyzer.launch.options.script_options import script_of
from analyzer.specs import Implementation, ModelSpec, ParallelSpec, PrecisionSpec, TrainingFlags
from analyzer.units import MAX_DIGITS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from analyzer.launch.arguments import Arguments
    from analyzer.launch.derive.launch_input import LaunchInput

_DETERMINISTIC_ALGORITHMS: Final = ("Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS")


def training_flags(launch: LaunchInput, *, model: ModelSpec, parallel: ParallelSpec, precision: PrecisionSpec) -> TrainingFlags:
    """The flags of a launch. Raises InputError for what Megatron refuses."""
    arguments, environ = launch.arguments, launch.environ
    fusion = bool(arguments.get("gradient_accumulation_fusion", True))
    _check_deferred_embedding(arguments, fusion=fusion)
    deferred = switched_on(arguments, "defer_embedding_wgrad_compute")
    connections = _max_connections(launch, parallel)
    _check_deterministic(launch, implementation=model.implementation)
    return TrainingFlags(
        gradient_accumulation_fusion=fusion,
        attention_mask_in_dataloader=bool(arguments.get("create_attention_mask_in_dataloader", True)),
        deterministic=switched_on(arguments, "deterministic_mode"),
        calculate_per_token_loss=switched_on(arguments, "calculate_per_token_loss")
        or script_of(arguments.entry) == "multimodal/train",  # its model provider sets it
        check_for_nan_in_loss_and_grad=_checks_for_nan(arguments),
        tp_comm_overlap=switched_on(arguments, "tp_comm_overlap"),
        defer_embedding_wgrad=deferred,
        wgrad_deferral_limit=max(0, integer(arguments, "wgrad_deferral_limit") or 0) if deferred else 0,
        cublas_workspace_config=environ.get("CUBLAS_WORKSPACE_CONFIG"),
        cuda_device_max_connections=connections,
        allocator_config=_allocator_config(environ),
        use_cpu_initialization=switched_on(arguments, "use_cpu_initialization"),
        empty_unused_memory_level=integer(arguments, "empty_unused_memory_level") or 0,
        data_parallel_random_init=switched_on(arguments, "data_parallel_random_init"),
        early_attention_backward=switched_on(arguments, "ep_overlap_early_attn_memory_release"),
        delay_wgrad_compute=switched_on(arguments, "delay_wgrad_compute"),
        overlap_moe_expert_parallel_comm=overlaps_microbatches(arguments, model=model, precision=precision),
        overlap_expert_gradients=overlaps_expert_gradients(arguments, model=model, fused=fusion),
    )


def _max_connections(launch: LaunchInput, parallel: ParallelSpec) -> str | None:
    """CUDA_DEVICE_MAX_CONNECTIONS of the launch. If Megatron requires 1 and it is not set, 1 is assumed.

    Megatron asserts that it is 1 under tensor or context parallelism on GPUs before Blackwell, except with full sharding and with
    `--overlap-moe-expert-parallel-comm`. A framework that does not use Megatron's `validate_args` has no such check.
    """
    arguments, gpu = launch.arguments, launch.gpu
    value = launch.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    by_context = parallel.context > 1 and arguments.release != RELEASE_2023
    blackwell = gpu.compute_capability is not None and gpu.compute_capability >= (10, 0)
    overlapped = switched_on(arguments, "overlap_moe_expert_parallel_comm")
    exempt = (
        sharding_flag(arguments) is not None or overlapped or (blackwell and (since(arguments, "0.13") or parallel.tensor == 1))
    )
    if exempt or not arguments.validated or not (parallel.tensor > 1 or by_context):
        return value
    if value is None:
        launch.assume(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 is assumed in the launch environment: Megatron requires it, and it is not set here."
        )
        return "1"
    if value != "1":
        why = f"tensor-parallel size {parallel.tensor}" if parallel.tensor > 1 else f"context-parallel size {parallel.context}"
        raise InputError(
            "CUDA_DEVICE_MAX_CONNECTIONS",
            f"is {value}, and with {why} Megatron requires 1 on GPUs before Blackwell",
            "export CUDA_DEVICE_MAX_CONNECTIONS=1, or name a Blackwell GPU with --info-gpu",
        )
    return value


def _checks_for_nan(arguments: Arguments) -> bool:
    """On by default; dynamic loss scaling (fp16 without `--loss-scale`) turns it off."""
    dynamic = switched_on(arguments, "fp16") and arguments.get("loss_scale") is None
    return switched_on(arguments, "check_for_nan_in_loss_and_grad") and not dynamic


def _check_deferred_embedding(arguments: Arguments, *, fusion: bool) -> None:
    if not switched_on(arguments, "defer_embedding_wgrad_compute"):
        return
    named = option(arguments, "defer_embedding_wgrad_compute")
    if not fusion:
        raise InputError(named, "contradicts --no-gradient-accumulation-fusion", "keep one of the two")


def _check_deterministic(launch: LaunchInput, *, implementation: Implementation) -> None:
    """`--deterministic-mode` excludes some kernels and needs two variables (`TEDotProductAttention`, `validate_args`)."""
    arguments, environ = launch.arguments, launch.environ
    if not switched_on(arguments, "deterministic_mode"):
        return
    for dest in ("use_flash_attn", "cross_entropy_loss_fusion"):
        if switched_on(arguments, dest):
            raise InputError("--deterministic-mode", f"contradicts {option(arguments, dest)}", "keep one of the two")
    unset = []
    algorithm = environ.get("NCCL_ALGO")
    if algorithm is None:
        unset.append("NCCL_ALGO=Ring")
    elif algorithm not in _DETERMINISTIC_ALGORITHMS:
        raise InputError(
            "NCCL_ALGO",
            f"{algorithm} is not deterministic",
            f"export one of {', '.join(_DETERMINISTIC_ALGORITHMS)}",
        )
    if implementation == "transformer_engine":
        allowed = environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO")
        if allowed is None:
            unset.append("NVTE_ALLOW_NONDETERMINISTIC_ALGO=0")
        elif allowed != "0":
            raise InputError(
                "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
                f"{allowed} contradicts --deterministic-mode",
                "export NVTE_ALLOW_NONDETERMINISTIC_ALGO=0",
            )
    if unset:
        launch.assume(f"{' and '.join(unset)} is assumed in the launch environment: --deterministic-mode requires it.")


def _allocator_config(environ: Mapping[str, str]) -> str | None:
    """The settings of PyTorch's allocator. Raises InputError for a max_split_size_mb that is not a number."""
    variable = "PYTORCH_ALLOC_CONF" if "PYTORCH_ALLOC_CONF" in environ else "PYTORCH_CUDA_ALLOC_CONF"
    config = environ.get(variable)
    for part in (config or "").replace(" ", "").split(","):
        name, _, value = part.partition(":")
        if name == "max_split_size_mb" and not (value.isdecimal() and len(value) <= MAX_DIGITS):
            fault = f"max_split_size_mb:{value} is not a number of MiB"
            raise InputError(variable, fault, "write a number such as max_split_size_mb:512")
    return config
