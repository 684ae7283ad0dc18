"""Mixture of experts: which layers have it, its experts, and how tokens reach them.

Megatron: `validate_args`, `TransformerConfig.__post_init__`, `get_gpt_decoder_layer_specs` for the pattern of layers, and
`megatron/core/transformer/moe` for what is refused only when a layer is built or runs, 0.16.1. The grid of expert ranks
is checked in `validate_parallel`, the router in `validate_router`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, cast

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.derive.reading import multiple_near, number, option, positive, since, switched_on, text, whole
from analyzer.specs import FlexSpec, HardwareSpec, ModelSpec, MoeSpec, PrecisionSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from analyzer.launch.arguments import Arguments
    from analyzer.launch.derive.parallel import Grid

IMBALANCE: Final = "--info-moe-imbalance"


def check_moe(
    arguments: Arguments,
    *,
    model: ModelSpec,
    grid: Grid,
    sequence_parallel: bool,
    precision: PrecisionSpec,
    gpu: HardwareSpec,
    environ: Mapping[str, str],
    imbalance: float,
) -> tuple[MoeSpec | None, tuple[str, ...]]:
    """The mixture of `model`, None for a dense one, and what was taken for granted.

    `imbalance` is what `--info-moe-imbalance` says. Raises InputError for what Megatron refuses, UnsupportedError for
    dispatchers and experts that are not modelled.
    """
    num_experts = _num_experts(arguments)
    if num_experts is None:
        _check_dense(arguments, imbalance=imbalance)
        return None, ()
    if model.implementation == "legacy":
        raise UnsupportedError(
            option(arguments, "num_experts"), "experts of the legacy models are not modelled", "analyse a dense GPT, without it"
        )
    from analyzer.launch.derive.model.router import check_router  # only where a launch has experts

    router = check_router(arguments, num_experts=num_experts)
    dispatcher = _dispatcher(arguments)
    capacity_factor, pad = _capacity(arguments, balancing=router.load_balancing)
    flex: FlexSpec | None = None
    if dispatcher == "flex":
        from analyzer.launch.derive.model.flex import check_flex  # a millisecond that most launches need not spend

        flex = check_flex(arguments, model=model, grid=grid, num_experts=num_experts, padded=pad, environ=environ)
    shared = _shared(arguments, dispatcher=dispatcher, bias=model.bias_linear, tensor=grid.tensor)
    grouped = switched_on(arguments, "moe_grouped_gemm")
    legacy = grouped and (model.implementation == "local" or switched_on(arguments, "moe_use_legacy_grouped_gemm"))
    moe = MoeSpec(
        num_experts=num_experts,
        topk=router.topk,
        ffn_hidden_size=_ffn_hidden_size(arguments, dense=model.ffn_hidden_size, expert_tensor=grid.expert_tensor),
        layers=_layers(arguments, num_layers=model.num_layers),
        shared_ffn_hidden_size=shared,
        shared_overlap=shared is not None and switched_on(arguments, "moe_shared_expert_overlap"),
        shared_gate=shared is not None and switched_on(arguments, "moe_shared_expert_gate"),
        grouped_gemm=grouped,
        legacy_grouped_gemm=legacy,
        dispatcher=dispatcher,
        flex=flex,
        permute_fusion=switched_on(arguments, "moe_permute_fusion"),
        adds_by_index=switched_on(arguments, "deterministic_mode") and since(arguments, "0.15"),
        capacity_factor=capacity_factor,
        pad_to_capacity=pad,
        pad_for_quantization=router.pad_for_quantization,
        router_dtype=router.dtype,
        load_balancing=router.load_balancing,
        aux_loss_coeff=router.aux_loss_coeff,
        z_loss_coeff=router.z_loss_coeff,
        score_function=router.score_function,
        pre_softmax=router.pre_softmax,
        expert_bias=router.expert_bias,
        latent_size=positive(arguments, "moe_latent_size"),
        imbalance=imbalance,
    )
    _check_parallel(arguments, model=model, grid=grid, sequence_parallel=sequence_parallel, precision=precision)
    if moe.shared_overlap and moe.latent_size is not None:
        raise InputError(option(arguments, "moe_shared_expert_overlap"), "contradicts --moe-latent-size", "keep one of the two")
    if grouped:
        _check_grouped(arguments, model=model, moe=moe, precision=precision, gpu=gpu)
    _check_imbalance(moe, expert=grid.expert)
    return moe, (*_routing_assumptions(moe), *_fusion_assumptions(arguments, model=model, grouped=grouped))


def _num_experts(arguments: Arguments) -> int | None:
    """None for a dense model; from 0.13 on that is also what 0 says."""
    experts = whole(arguments, "num_experts")
    if experts is None or (experts == 0 and since(arguments, "0.13")):
        return None
    if experts <= 0:
        raise InputError(option(arguments, "num_experts"), f"{experts} is not above 0", "give 1 or more, or leave it out")
    return experts


def _check_dense(arguments: Arguments, *, imbalance: float) -> None:
    """From 0.13 on, a width of experts without experts is refused."""
    if arguments.get("moe_ffn_hidden_size") is not None and since(arguments, "0.13"):
        raise InputError(
            option(arguments, "moe_ffn_hidden_size"), "there are no experts", "use --ffn-hidden-size, or add --num-experts"
        )
    if imbalance != 1:
        raise InputError(IMBALANCE, "there are no experts", "add --num-experts, or leave it out")


def _ffn_hidden_size(arguments: Arguments, *, dense: int, expert_tensor: int) -> int:
    """Width of one expert, that of the dense layers where none is given."""
    width = positive(arguments, "moe_ffn_hidden_size") or dense
    if width % expert_tensor:
        raise InputError(
            option(arguments, "moe_ffn_hidden_size"),
            f"{width} cannot be split over {expert_tensor} expert-tensor-parallel ranks",
            f"use a multiple of {expert_tensor}, for example {multiple_near(width, expert_tensor)}",
        )
    return width


def _layers(arguments: Arguments, *, num_layers: int) -> tuple[bool, ...]:
    """For each layer whether it is a mixture: every N-th, beginning with the first, or as a list of 0 and 1 says."""
    value = arguments.get("moe_layer_freq", 1)
    named = option(arguments, "moe_layer_freq")
    if not isinstance(value, list | tuple):
        every = positive(arguments, "moe_layer_freq") or 1
        return tuple(layer % every == 0 for layer in range(num_layers))
    if len(value) != num_layers:
        raise InputError(
            named,
            f"lists {len(value)} layers and --num-layers is {num_layers}",
            f"write {num_layers} items",
        )
    strange = next((each for each in value if each not in (0, 1)), None)
    if strange is not None:
        raise InputError(named, f"{strange!r} is neither 0 (dense) nor 1 (experts)", "write a list of 0 and 1")
    return tuple(each == 1 for each in value)


def _dispatcher(arguments: Arguments) -> Literal["allgather", "alltoall", "flex"]:
    written = text(arguments, "moe_token_dispatcher_type", "allgather")
    named = option(arguments, "moe_token_dispatcher_type")
    if switched_on(arguments, "moe_enable_deepep") and written != "flex":
        raise InputError(
            option(arguments, "moe_enable_deepep"), f"does not go with {named} {written}", f"leave it out, or use {named} flex"
        )
    if written == "flex":
        return "flex"
    if written not in ("allgather", "alltoall"):
        raise UnsupportedError(f"{named} {written}", "this dispatcher is not modelled", f"use {named} alltoall or allgather")
    return cast(Literal["allgather", "alltoall"], written)


def _capacity(arguments: Arguments, *, balancing: tuple[str, ...]) -> tuple[float | None, bool]:
    """How many times the mean an expert takes, None for all; and whether its input is padded to that."""
    named = option(arguments, "moe_expert_capacity_factor")
    pad = switched_on(arguments, "moe_pad_expert_input_to_capacity")
    factor: float | None = number(arguments, "moe_expert_capacity_factor", -1.0)
    if arguments.get("moe_expert_capacity_factor") is not None:
        from analyzer.launch.derive.model.router import AUXILIARY

        wrong = next((each for each in balancing if each not in (*AUXILIARY, "none")), None)
        if wrong is not None:
            raise InputError(
                named, f"does not go with {wrong} balancing", f"use --moe-router-load-balancing-type {', '.join(AUXILIARY)} or none"
            )
    if factor is not None and factor < 0:
        factor = None
    if pad and factor is None:
        raise InputError(
            option(arguments, "moe_pad_expert_input_to_capacity"),
            "there is no capacity to pad to",
            "add --moe-expert-capacity-factor 1.0, or leave it out",
        )
    return factor, pad


def _shared(arguments: Arguments, *, dispatcher: str, bias: bool, tensor: int) -> int | None:
    """Total width of the shared experts, None without any."""
    width = positive(arguments, "moe_shared_expert_intermediate_size")
    if width is None:
        return None
    named = option(arguments, "moe_shared_expert_intermediate_size")
    if bias:
        raise InputError(named, "shared experts have no biases", "add --disable-bias-linear")
    if width % tensor:
        raise InputError(
            named,
            f"{width} cannot be split over {tensor} tensor-parallel ranks",
            f"use a multiple of {tensor}, for example {multiple_near(width, tensor)}",
        )
    if switched_on(arguments, "moe_shared_expert_overlap") and dispatcher != "alltoall":
        raise InputError(
            option(arguments, "moe_shared_expert_overlap"),
            f"does not go with the {dispatcher} dispatcher",
            "add --moe-token-dispatcher-type alltoall",
        )
    return width


def _check_parallel(
    arguments: Arguments, *, model: ModelSpec, grid: Grid, sequence_parallel: bool, precision: PrecisionSpec
) -> None:
    if grid.tensor > 1 and not sequence_parallel:
        raise InputError(
            option(arguments, "num_experts"),
            f"experts with tensor size {grid.tensor} are trained with sequence parallelism only",
            "add --sequence-parallel",
        )
    if model.bias_linear and grid.expert_tensor != 1:
        raise InputError(
            option(arguments, "expert_tensor_parallel_size"),
            f"experts with biases cannot be split over {grid.expert_tensor} ranks",
            "use --expert-tensor-parallel-size 1, or --disable-bias-linear",
        )
    if grid.expert > 1 and precision.parameters == "fp16" and not since(arguments, "0.16"):
        raise InputError(
            option(arguments, "expert_model_parallel_size"), "does not go with --fp16 before Megatron-LM core 0.16", "use --bf16"
        )


def _fusion_assumptions(arguments: Arguments, *, model: ModelSpec, grouped: bool) -> tuple[str, ...]:
    """Biases and activation in one kernel that multiplies by probabilities: experts have it for gated activations alone.

    Megatron builds the model, and raises when it first runs (`TEGroupedMLP`, `MLP.forward`, `weighted_bias_swiglu_impl`).
    """
    if not (model.bias_linear and model.bias_activation_fusion and since(arguments, "0.14")):
        return ()
    named = option(arguments, "num_experts")
    if model.activation in ("gelu", "squared_relu"):
        fault, remedy = "experts cannot fuse biases with a plain activation", "--no-bias-gelu-fusion"
    elif model.activation == "swiglu" and not grouped:  # grouped ones add their biases before
        fault, remedy = "experts in turn cannot fuse biases with SwiGLU", "--no-bias-swiglu-fusion"
    else:
        return ()
    return (f"{named}: Megatron stops in the first forward pass, since {fault}; add {remedy} or --disable-bias-linear.",)


def _check_grouped(arguments: Arguments, *, model: ModelSpec, moe: MoeSpec, precision: PrecisionSpec, gpu: HardwareSpec) -> None:
    """What `TEGroupedMLP`, or without Transformer Engine `GroupedMLP`, cannot do."""
    named = option(arguments, "moe_grouped_gemm")
    if gpu.compute_capability is not None and gpu.compute_capability < (8, 0):
        raise InputError(named, f"needs Ampere or later, and this is {gpu.name or 'an older GPU'}", "leave it out")
    if precision.parameters != "bf16" and (moe.legacy_grouped_gemm or not since(arguments, "0.16")):
        where = "for experts in two fused weights" if moe.legacy_grouped_gemm else "before Megatron-LM core 0.16"
        raise InputError(named, f"works in bf16 only {where}", "add --bf16, or leave it out")
    if not moe.legacy_grouped_gemm:
        if model.bias_linear and model.bias_dropout_fusion:
            raise InputError(
                named, "experts with biases cannot fuse bias and dropout", "add --no-bias-dropout-fusion, or --disable-bias-linear"
            )
        return
    if model.bias_linear:
        raise InputError(named, "experts in two fused weights have no biases", "add --disable-bias-linear")
    if moe.latent_size is not None:
        raise InputError(named, "experts in two fused weights have no --moe-latent-size", "leave one of the two out")
    if model.activation == "quick_geglu":
        raise InputError(named, "experts in two fused weights do not know --quick-geglu", "leave one of the two out")


def _check_imbalance(moe: MoeSpec, *, expert: int) -> None:
    """The most that a rank can get: every token, as often as the rank has experts for it."""
    most = expert * min(moe.topk, moe.num_experts // expert) / moe.topk
    if moe.imbalance > most:
        raise InputError(
            IMBALANCE,
            f"{moe.imbalance:g} is more than a rank gets if every token goes there, {most:g} times the mean",
            f"use {most:g} or less",
        )


def _routing_assumptions(moe: MoeSpec) -> tuple[str, ...]:
    if moe.pad_to_capacity:
        return ()
    notes = [
        f"Routing is taken to be balanced: every expert gets the mean number of tokens ({IMBALANCE} says otherwise)."
        if moe.imbalance == 1
        else f"The experts of the fullest rank are taken to get {moe.imbalance:g} times the mean number of tokens."
    ]
    if moe.capacity_factor is not None:
        notes.append("No token is taken to be dropped for want of capacity: where some are, the prediction is too high.")
    return tuple(notes)
