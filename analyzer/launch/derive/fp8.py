"""FP8 and FP4 in Transformer Engine's linear layers: format, recipe, stored parameters, layers kept in 16 bit.

Megatron: `validate_args`, `TransformerConfig.__post_init__` and `OptimizerConfig.__post_init__`, 0.16.1. Support
by GPU: transformer_engine/pytorch/quantization.py check_*_support; by size: utils.py assert_dim_for_fp8_exec (TE 2.11).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal, cast

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.derive.model.attention_backend import attention_in_mxfp8
from analyzer.launch.derive.model.hybrid import is_hybrid
from analyzer.launch.derive.reading import integer, option, positive, since, switched_on, text
from analyzer.specs import Fp8Recipe, Fp8Spec, HardwareSpec, ModelSpec, MoeSpec, OptimizerSpec, ParallelSpec, TrainingJob
from analyzer.specs.precision import ONE_SCALE

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.launch.derive.launch_input import LaunchInput

LEAST_CAPABILITY: Final[dict[str, tuple[int, int]]] = {
    "delayed": (8, 9), "tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0), "nvfp4": (10, 0),
}  # fmt: skip
"""Compute capability from which a recipe runs."""
_NO_MXFP8_FROM: Final = (12, 0)
_FP8_ATTENTION: Final = "fp8_dot_product_attention"
_TOKENS: Final = 128
"""The tokens of a sequence are a multiple of this for attention in MXFP8 (`combine_and_quantize`)."""
_HEAD: Final = 32
"""The elements of a head are a multiple of this."""


def fp8_spec(launch: LaunchInput, *, model: ModelSpec, parallel: ParallelSpec, optimizer: OptimizerSpec) -> Fp8Spec | None:
    """GEMMs and parameters in FP8 or FP4; None without. Raises InputError for what Megatron refuses."""
    arguments, gpu = launch.arguments, launch.gpu
    written = arguments.get("fp8")
    in_4_bit = arguments.get("fp4")
    if in_4_bit is not None:
        if written is not None:
            raise InputError(option(arguments, "fp4"), f"contradicts {option(arguments, 'fp8')}", "keep one of the two")
        written = in_4_bit
    stored = switched_on(arguments, "fp8_param_gather")
    reused = switched_on(arguments, "reuse_grad_buf_for_mxfp8_param_ag")
    if reused and not stored:
        named = option(arguments, "reuse_grad_buf_for_mxfp8_param_ag")
        raise InputError(named, "is for parameters stored in FP8", "add --fp8-param-gather, or leave it out")
    stored_in_4_bit = switched_on(arguments, "fp4_param_gather")
    if stored_in_4_bit and in_4_bit is None:
        raise InputError(option(arguments, "fp4_param_gather"), "FP4 is not on", "add --fp4-format e2m1, or leave it out")
    if written is None:
        if stored:
            raise InputError(option(arguments, "fp8_param_gather"), "FP8 is not on", "add --fp8-format hybrid, or leave it out")
        return None
    named = option(arguments, "fp8")
    if model.implementation != "transformer_engine":
        raise InputError(
            named, f"the {model.implementation} implementation has no FP8", "use --transformer-impl transformer_engine"
        )
    recipe = _recipe(arguments, gpu)
    if stored and recipe == "nvfp4":
        raise InputError(option(arguments, "fp8_param_gather"), "FP8 is not on", "leave it out")
    if stored:
        _check_stored(arguments, recipe=recipe, reused=reused, optimizer=optimizer)
    elif stored_in_4_bit:
        _check_stored_in_4_bit(arguments, optimizer)
    start, end = _layers_in_16_bit(arguments, recipe=recipe, most=model.num_layers // parallel.pipeline)
    _check_recompute(arguments, recipe=recipe)
    if recipe == "nvfp4" and parallel.tensor > 1 and switched_on(arguments, "tp_comm_overlap"):
        named = option(arguments, "tp_comm_overlap")
        launch.warn(f"{named}: userbuffers of Transformer Engine 2.11 gather 16 bit and FP8 only. It is analyzed as given.")
    launch.warn(*_untrained_mtp(arguments))
    launch.assume(*_assumptions(arguments, recipe=recipe, gpu=gpu, moe=model.moe))
    output_layer = switched_on(arguments, "fp8_output_proj")
    if output_layer and is_hybrid(arguments):  # only `GPTModel` builds `TELMHeadColumnParallelLinear`
        launch.assume("--fp8-output-proj has no effect: the output layer of a hybrid model is in 16 bit.")
    return Fp8Spec(
        format=cast(Literal["e4m3", "hybrid", "e2m1"], str(written)),
        recipe=recipe,
        stored_parameters=stored or stored_in_4_bit,
        layers_at_start_in_16_bit=start,
        layers_at_end_in_16_bit=end,
        amax_history_len=positive(arguments, "fp8_amax_history_len") or 1,
        output_layer=output_layer and not is_hybrid(arguments),
    )


def with_fp8_weights(launch: LaunchInput, job: TrainingJob) -> TrainingJob:
    """The job with what only frameworks set of weights in FP8: `ModelParts.fp8_weights` and `fp8_transposes_freed`."""
    fp8, parts = job.precision.fp8, launch.arguments.parts
    if fp8 is None or not (parts.fp8_weights or parts.fp8_transposes_freed):
        return job
    stored = fp8.stored_parameters or parts.fp8_weights
    fp8 = replace(fp8, stored_parameters=stored, keeps_transposes=not parts.fp8_transposes_freed)
    return replace(job, precision=replace(job.precision, fp8=fp8))


def with_fp8_attention(launch: LaunchInput, job: TrainingJob) -> TrainingJob:
    """The job with core attention in FP8, if the launch asks for it (`fp8_dot_product_attention`).

    Raises InputError for sizes that Transformer Engine refuses (`combine_and_quantize`, 2.17).
    """
    fp8, model = job.precision.fp8, job.model
    if fp8 is None or not launch.arguments.parts.fp8_attention:
        return job
    if fp8.recipe == "mxfp8" and not attention_in_mxfp8(launch.arguments):
        launch.assume(f"{_FP8_ATTENTION} has no effect with mxfp8 before core 0.18: attention is in 16 bit.")
        return job
    not_modelled = {
        f"the {fp8.recipe} recipe": fp8.recipe != "mxfp8",
        "context parallelism": job.parallel.context > 1,
        "packed sequences": launch.arguments.tuning.packed,
        "a kernel other than cuDNN's": model.attention_backend != "fused" or model.window_backend not in (None, "fused"),
        "recomputation of it and of its inputs": {"core_attn", "mla_up_proj"} <= set(job.recompute.modules),
        "sparse attention": model.sparse_attention is not None or launch.arguments.parts.compressed is not None,
    }
    where = next((each for each, applies in not_modelled.items() if applies), None)
    if where is not None:
        return replace(job, withheld=(*job.withheld, f"{_FP8_ATTENTION} is not modelled with {where}"))
    widths = (model.kv_channels,) if model.mla is None else (model.mla.query_head_dim, model.mla.v_head_dim)
    refused = next((f"heads of {each} elements" for each in widths if each % _HEAD), None)
    if job.batch.seq_length % _TOKENS:
        refused = f"{job.batch.seq_length} tokens"
    if refused is not None:
        fault = f"attention in MXFP8 needs multiples of {_TOKENS} tokens and of {_HEAD} elements in a head, not {refused}"
        raise InputError(_FP8_ATTENTION, fault, "leave it out, or pad the sequences")
    return replace(job, precision=replace(job.precision, fp8=replace(fp8, attention=True)))


def _untrained_mtp(arguments: Arguments) -> Iterator[str]:
    """`MultiTokenPredictionLayer._checkpointed_forward` gives Transformer Engine's checkpoint its inputs by keyword (0.16.1).

    The checkpoint then has no input with a gradient, so its output has none (transformer_engine/pytorch/distributed.py, 2.11).
    """
    uniform = arguments.get("recompute_granularity") == "full" and arguments.get("recompute_method") == "uniform"
    if uniform and arguments.get("mtp_num_layers") and arguments.get("fp8") is not None and not since(arguments, "0.17"):
        named = option(arguments, "mtp_num_layers")
        yield f"{named}: with FP8 and uniform recomputation this release does not train MTP layers, and the peak is too high."


def _assumptions(arguments: Arguments, *, recipe: Fp8Recipe, gpu: HardwareSpec, moe: MoeSpec | None) -> Iterator[str]:
    if gpu.compute_capability is None and recipe in ONE_SCALE:
        yield "No GPU is given: FP8 tensors are assumed to need a transposed copy, as on Hopper."
    if arguments.get("recompute_granularity") == "full":
        when = "" if recipe == "blockwise" else " of the first iteration"
        yield f"Column-wise FP8 copies of recomputed layers are counted from the first forward on, so the peak{when} is too high."
    if recipe == "nvfp4" and switched_on(arguments, "overlap_moe_expert_parallel_comm"):
        yield "Megatron-LM does not apply FP4 to overlapped microbatches: layers run in 16 bit, and the rows of experts are padded."
    elif recipe == "nvfp4" and arguments.get("mtp_num_layers"):
        yield "Megatron-LM does not apply FP4 to MTP layers, which run in 16 bit."
    if moe is not None and not moe.pad_to_capacity and moe.rank_capacity is None:
        multiple = 256 if moe.fused_operations else {"mxfp8": 32, "nvfp4": 128}.get(recipe, 16)
        yield f"The tokens of each expert are padded to a multiple of {multiple}: {multiple // 2} more are counted for each expert."


def _recipe(arguments: Arguments, gpu: HardwareSpec) -> Fp8Recipe:
    in_4_bit = arguments.get("fp4") is not None
    recipe = text(arguments, "fp4_recipe", "nvfp4") if in_4_bit else text(arguments, "fp8_recipe", "delayed")
    named = option(arguments, "fp4") if in_4_bit else f"{option(arguments, 'fp8_recipe')} {recipe}"
    known = [each for each in LEAST_CAPABILITY if (each == "nvfp4") == in_4_bit]
    if recipe not in known:
        raise UnsupportedError(
            f"{option(arguments, 'fp4_recipe' if in_4_bit else 'fp8_recipe')} {recipe}",
            "custom quantizers are not modelled", f"use {', '.join(known)}",
        )  # fmt: skip
    capability = gpu.compute_capability
    if capability is not None:
        here = gpu.name or "this GPU"
        if capability < LEAST_CAPABILITY[recipe]:
            major, minor = LEAST_CAPABILITY[recipe]
            raise InputError(
                named, f"needs compute capability {major}.{minor} or later, and {here} has {capability[0]}.{capability[1]}",
                "use another recipe, or another GPU",
            )  # fmt: skip
        if recipe == "mxfp8" and capability >= _NO_MXFP8_FROM:
            raise InputError(named, f"Transformer Engine does not run it on {here}", "use --fp8-recipe tensorwise")
    return cast(Fp8Recipe, recipe)


def _check_stored(arguments: Arguments, *, recipe: Fp8Recipe, reused: bool, optimizer: OptimizerSpec) -> None:
    named = option(arguments, "fp8_param_gather")
    if not optimizer.distributed:
        raise InputError(named, "needs the distributed optimizer", "add --use-distributed-optimizer")
    if recipe == "mxfp8" and not reused:  # replace_raw_data (transformer_engine/pytorch/tensor/utils.py) cannot move its parameters
        raise InputError(
            named, "parameters in mxfp8 cannot be stored in a separate buffer", "add --reuse-grad-buf-for-mxfp8-param-ag"
        )
    if recipe != "mxfp8" and reused:
        raise UnsupportedError(
            option(arguments, "reuse_grad_buf_for_mxfp8_param_ag"), f"it is not modelled for {recipe} parameters", "leave it out"
        )


def _check_stored_in_4_bit(arguments: Arguments, optimizer: OptimizerSpec) -> None:
    """Parameters in FP4 have buffers of half as many elements from core 0.18 on (`_compute_nvfp4_packed_layout`)."""
    not_modelled = {
        "before core 0.18": not since(arguments, "0.18"),
        "without the distributed optimizer": not optimizer.distributed,
        "with FSDP": switched_on(arguments, "use_megatron_fsdp") or switched_on(arguments, "use_torch_fsdp2"),
        "with overlapped microbatches, whose layers run in 16 bit": switched_on(arguments, "overlap_moe_expert_parallel_comm"),
    }
    for where, applies in not_modelled.items():
        if applies:
            fault = f"parameters stored in FP4 are not modelled {where}"
            raise UnsupportedError(option(arguments, "fp4_param_gather"), fault, "leave it out")


def _layers_in_16_bit(arguments: Arguments, *, recipe: Fp8Recipe, most: int) -> tuple[int, int]:
    if not switched_on(arguments, "first_last_layers_bf16"):
        return 0, 0
    if recipe == "delayed":
        raise InputError(
            option(arguments, "first_last_layers_bf16"), "the delayed recipe covers all layers", "use --fp8-recipe tensorwise"
        )
    counts = []
    for dest in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        count = integer(arguments, dest)
        count = 1 if count is None else count
        if not 0 <= count <= most:
            raise InputError(option(arguments, dest), f"{count} is not between 0 and the {most} layers of a stage", f"use {most}")
        counts.append(count)
    return counts[0], counts[1]


def _check_recompute(arguments: Arguments, *, recipe: Fp8Recipe) -> None:
    selective = arguments.get("recompute_granularity") == "selective" or switched_on(arguments, "recompute_activations")
    if recipe != "delayed" or not selective:
        return
    asked = arguments.get("recompute_modules")
    for module in ("moe_act", "layernorm"):
        if isinstance(asked, list | tuple) and module in asked:
            raise InputError(
                option(arguments, "recompute_modules"), f"{module} cannot be used with the delayed recipe of FP8",
                "use --fp8-recipe tensorwise",
            )  # fmt: skip
