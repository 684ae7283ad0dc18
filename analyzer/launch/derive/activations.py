"""Activation offloading to the host, and overlapped microbatches.

Megatron: `validate_args` and `TransformerConfig.__post_init__`, 0.16.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.derive.fsdp import sharding_flag
from analyzer.launch.derive.reading import integer, option, since, switched_on
from analyzer.specs import ActivationOffloadSpec

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.specs import Fp8Spec, GraphSpec, ModelSpec, PrecisionSpec

MODULES: Final = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")
"""What `--offload-modules` accepts."""


def activation_offload_spec(
    arguments: Arguments, *, model: ModelSpec, graphs: GraphSpec | None, fp8: Fp8Spec | None = None
) -> ActivationOffloadSpec | None:
    """Which activations are offloaded; None without offloading. Raises InputError for what Megatron refuses."""
    layers = integer(arguments, "cpu_offloading_num_layers") or 0
    fine = switched_on(arguments, "fine_grained_activation_offloading")
    if not layers:
        return _fine_grained(arguments, model=model, fp8=fp8) if fine else None
    named = option(arguments, "cpu_offloading_num_layers")
    if fine:
        raise InputError(named, f"contradicts {option(arguments, 'fine_grained_activation_offloading')}", "keep one of the two")
    if not 0 < layers < model.num_layers:
        raise InputError(named, f"{layers} is not below the {model.num_layers} layers", f"use 1 to {model.num_layers - 1}")
    if model.implementation != "transformer_engine":
        raise InputError(named, "needs the layers of Transformer Engine", "use --transformer-impl transformer_engine")
    if graphs is not None:
        if graphs.scope == ("full_iteration",) and since(arguments, "0.18"):
            raise UnsupportedError(named, "is not modelled with CUDA graphs of full iterations", "leave --cuda-graph-impl out")
        raise InputError(named, "cannot be used with CUDA graphs", "leave --cuda-graph-impl out")
    return ActivationOffloadSpec(layers=layers)


def _fine_grained(arguments: Arguments, *, model: ModelSpec, fp8: Fp8Spec | None) -> ActivationOffloadSpec:
    named, listed = option(arguments, "fine_grained_activation_offloading"), option(arguments, "offload_modules")
    if model.implementation != "transformer_engine":
        raise InputError(named, "needs the layers of Transformer Engine", "use --transformer-impl transformer_engine")
    value = arguments.get("offload_modules")
    asked = [str(each) for each in value] if isinstance(value, list | tuple) else []
    if not asked:
        raise InputError(named, "needs a list of modules", "add --offload-modules core_attn attn_proj, or others")
    for module in asked:
        if module == "fused_group_mlp" and since(arguments, "0.19"):
            raise UnsupportedError(
                f"{listed} {module}", "experts with fused operations are not modelled", "use expert_fc1 or moe_act"
            )
        if module not in MODULES:
            raise InputError(listed, f"{module!r} is not a module", f"use modules of {', '.join(MODULES)}")
    if "attn_proj" in asked and "core_attn" not in asked:
        raise InputError(listed, "attn_proj needs core_attn, whose output it reads", "add core_attn")
    least = integer(arguments, "min_offloaded_tensor_size")
    return ActivationOffloadSpec(
        modules=tuple(module for module in MODULES if module in asked),
        min_elements=1024 * 1024 if least is None else least,
        # stored weights are parameters, which `preprocess_for_fine_grained_offloading` leaves on the GPU
        cached_weights=fp8 is not None and not fp8.stored_parameters and not since(arguments, "0.17"),
    )


def overlaps_microbatches(arguments: Arguments, *, model: ModelSpec, precision: PrecisionSpec) -> bool:
    """`--overlap-moe-expert-parallel-comm`, and options that need it. Raises InputError for what Megatron refuses."""
    if not switched_on(arguments, "overlap_moe_expert_parallel_comm"):
        for dest in ("delay_wgrad_compute", "ep_overlap_early_attn_memory_release"):
            if switched_on(arguments, dest):
                raise InputError(
                    option(arguments, dest),
                    "needs overlapped microbatches",
                    "add --overlap-moe-expert-parallel-comm, or leave it out",
                )
        return False
    named = option(arguments, "overlap_moe_expert_parallel_comm")
    if model.moe is None:
        raise InputError(named, "needs expert parallelism", "add --expert-model-parallel-size 2, or leave it out")
    if model.moe.dispatcher == "allgather":
        raise InputError(named, "needs an all-to-all dispatcher", "add --moe-token-dispatcher-type alltoall")
    if model.moe.shared_overlap:
        raise InputError(named, "contradicts --moe-shared-expert-overlap", "keep one of the two")
    if precision.parameters == "fp32":
        raise InputError(named, "needs 16-bit training", "add --bf16")
    if switched_on(arguments, "delay_wgrad_compute") and model.moe.legacy_grouped_gemm:
        raise InputError(
            option(arguments, "delay_wgrad_compute"),
            "needs the experts of Transformer Engine",
            "leave --moe-use-legacy-grouped-gemm out",
        )
    if model.mtp_num_layers > 1:
        raise InputError(named, "supports one MTP layer at most", "use --mtp-num-layers 1")
    return True


def overlaps_expert_gradients(arguments: Arguments, *, model: ModelSpec, fused: bool) -> bool:
    """`--overlap-dispatch-backward-with-experts-wgrad`, which has an effect on grouped experts of Transformer Engine only.

    `fused`: GEMMs add weight gradients to the gradient buffer. Raises UnsupportedError where it is not modelled.
    """
    dest = "overlap_dispatch_backward_with_experts_wgrad"
    moe = model.moe
    if not switched_on(arguments, dest) or moe is None or not moe.grouped_gemm or moe.legacy_grouped_gemm:
        return False
    not_modelled = {
        "FSDP": sharding_flag(arguments) is not None,
        "weight gradients that are added to the gradient buffer after their GEMMs": not fused,
        "the fused operations of Transformer Engine": moe.fused_operations,
        "pages for saved tensors": moe.page_factor is not None,
    }
    where = next((each for each, applies in not_modelled.items() if applies), None)
    if where is not None:
        raise UnsupportedError(option(arguments, dest), f"is not modelled with {where}", "leave it out")
    return True
