"""Whatever else decides about bytes or messages.

Megatron: `validate_args` and `ModelParallelConfig.__post_init__`, 0.16.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from analyzer.errors import InputError
from analyzer.launch.derive.reading import option, switched_on, whole
from analyzer.specs import Implementation, TrainingFlags

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments

_DETERMINISTIC_ALGORITHMS: Final = ("Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS")


def check_sequence_parallel(arguments: Arguments, *, tensor: int) -> bool:
    """Whether activations are split along the sequence: with one tensor-parallel rank Megatron turns it off itself."""
    sequence_parallel = tensor > 1 and switched_on(arguments, "sequence_parallel")
    if switched_on(arguments, "tp_comm_overlap") and not sequence_parallel:
        raise InputError(
            option(arguments, "tp_comm_overlap"), "needs sequence parallelism", "add --sequence-parallel, or leave it out"
        )
    return sequence_parallel


def check_runtime(
    arguments: Arguments, *, pipeline: int, implementation: Implementation, connections: str | None, environ: Mapping[str, str]
) -> tuple[TrainingFlags, tuple[str, ...]]:
    """Runtime switches, and what was taken for granted. Raises InputError for what Megatron refuses."""
    fusion = bool(arguments.get("gradient_accumulation_fusion", True))
    _check_deferred_embedding(arguments, pipeline=pipeline, fusion=fusion)
    assumptions = _check_deterministic(arguments, implementation=implementation, environ=environ)
    spec = TrainingFlags(
        gradient_accumulation_fusion=fusion,
        attention_mask_in_dataloader=bool(arguments.get("create_attention_mask_in_dataloader", True)),
        deterministic=switched_on(arguments, "deterministic_mode"),
        calculate_per_token_loss=switched_on(arguments, "calculate_per_token_loss"),
        check_for_nan_in_loss_and_grad=_checks_for_nan(arguments),
        tp_comm_overlap=switched_on(arguments, "tp_comm_overlap"),
        defer_embedding_wgrad=switched_on(arguments, "defer_embedding_wgrad_compute"),
        cublas_workspace_config=environ.get("CUBLAS_WORKSPACE_CONFIG"),
        cuda_device_max_connections=connections,
        allocator_config=environ.get("PYTORCH_ALLOC_CONF", environ.get("PYTORCH_CUDA_ALLOC_CONF")),
        use_cpu_initialization=switched_on(arguments, "use_cpu_initialization"),
        empty_unused_memory_level=whole(arguments, "empty_unused_memory_level") or 0,
        data_parallel_random_init=switched_on(arguments, "data_parallel_random_init"),
        early_attention_backward=switched_on(arguments, "ep_overlap_early_attn_memory_release"),
        delay_wgrad_compute=switched_on(arguments, "delay_wgrad_compute"),
    )
    return spec, assumptions


def _checks_for_nan(arguments: Arguments) -> bool:
    """On by default; dynamic loss scaling (fp16 without `--loss-scale`) turns it off."""
    dynamic = switched_on(arguments, "fp16") and arguments.get("loss_scale") is None
    return switched_on(arguments, "check_for_nan_in_loss_and_grad") and not dynamic


def _check_deferred_embedding(arguments: Arguments, *, pipeline: int, fusion: bool) -> None:
    if not switched_on(arguments, "defer_embedding_wgrad_compute"):
        return
    named = option(arguments, "defer_embedding_wgrad_compute")
    if pipeline == 1:
        raise InputError(named, "there is no pipeline to defer it in", "add --pipeline-model-parallel-size 2, or leave it out")
    if not fusion:
        raise InputError(named, "contradicts --no-gradient-accumulation-fusion", "keep one of the two")


def _check_deterministic(arguments: Arguments, *, implementation: Implementation, environ: Mapping[str, str]) -> tuple[str, ...]:
    """`--deterministic-mode` excludes some kernels and wants two variables set (`TEDotProductAttention`, `validate_args`)."""
    if not switched_on(arguments, "deterministic_mode"):
        return ()
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
            f"{algorithm} does not go with --deterministic-mode",
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
    return (f"{' and '.join(unset)} set where the launch runs, as --deterministic-mode demands.",) if unset else ()
