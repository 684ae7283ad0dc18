"""MoE layers: which layers have experts, the experts, and how tokens are dispatched to them.

Megatron: `validate_args`, `TransformerConfig.__post_init__`, `get_gpt_decoder_layer_specs` for the pattern of layers, and
`megatron/core/transformer/moe` for checks that are made when a layer is built or runs, 0.16.1. Sizes that must divide each other
are checked by `analyzer.specs.rules.model`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, cast

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.derive.model.experts import IMBALANCE
from analyzer.launch.derive.model.flex import flex_spec
from analyzer.launch.derive.model.hybrid import is_hybrid, layers_with_experts
from analyzer.launch.derive.model.router import read_router
from analyzer.launch.derive.reading import finite, integer, option, positive, since, switched_on, text
from analyzer.specs import HardwareSpec, ModelSpec, MoeSpec, ParallelSpec, PrecisionSpec
from analyzer.specs.moe import AUXILIARY_LOSSES
from analyzer.specs.release_changes import core_behavior

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.launch.derive.launch_input import LaunchInput

_CAPACITY: Final = "moe_expert_rank_capacity_factor"
_PAGE_FACTORS: Final = {"moe_paged_stash_buffer_size_factor_cuda": 1.1, "moe_paged_stash_buffer_size_factor_cpu": 0.0}
"""Rows of the pages on the GPU and on the host: the option, and its default."""
_INTERLEAVED: Final = 32
"""Columns of a gate that alternate with those of its other half in fused kernels."""


def moe_spec(
    launch: LaunchInput,
    *,
    num_experts: int,
    model: ModelSpec,
    parallel: ParallelSpec,
    precision: PrecisionSpec,
    imbalance: float,
) -> MoeSpec:
    """The MoE layers of `model`.

    `imbalance` is `--info-moe-imbalance`. Raises InputError for what Megatron refuses, UnsupportedError for dispatchers and experts
    that are not modelled.
    """
    arguments = launch.arguments
    if model.implementation == "legacy":
        raise UnsupportedError(
            option(arguments, "num_experts"), "experts of the legacy models are not modelled", "analyse a dense GPT, without it"
        )
    router = read_router(arguments, num_experts=num_experts)
    dispatcher = _dispatcher(arguments)
    capacity_factor, pad = _capacity(arguments, balancing=router["load_balancing"])
    shared = _shared(arguments, dispatcher=dispatcher, bias=model.bias_linear)
    grouped = switched_on(arguments, "moe_grouped_gemm") or is_hybrid(arguments)
    flex = flex_spec(launch, model=model, parallel=parallel, num_experts=num_experts, padded=pad) if dispatcher == "flex" else None
    limited = flex is not None and flex.backend == "hybridep"
    moe = MoeSpec(
        num_experts=num_experts,
        ffn_hidden_size=positive(arguments, "moe_ffn_hidden_size") or model.ffn_hidden_size,
        layers=layers_with_experts(arguments) or _layers(arguments, num_layers=model.num_layers),
        shared_ffn_hidden_size=shared,
        shared_overlap=shared is not None and switched_on(arguments, "moe_shared_expert_overlap"),
        shared_gate=shared is not None and switched_on(arguments, "moe_shared_expert_gate"),
        grouped_gemm=grouped,
        legacy_grouped_gemm=grouped and (model.implementation == "local" or switched_on(arguments, "moe_use_legacy_grouped_gemm")),
        dispatcher=dispatcher,
        flex=flex,
        permute_fusion=switched_on(arguments, "moe_permute_fusion"),
        adds_by_index=switched_on(arguments, "deterministic_mode") and core_behavior(arguments.release).adds_by_index,
        sorts_positions=core_behavior(arguments.release).sorts_positions,
        fused_operations=switched_on(arguments, "use_transformer_engine_op_fuser") and since(arguments, "0.18"),
        capacity_factor=capacity_factor,
        pad_to_capacity=pad,
        latent_size=positive(arguments, "moe_latent_size"),
        rank_capacity=None if pad else _rank_capacity(launch, limited=limited),
        page_factor=_page_factor(launch, pad=pad, limited=limited),
        imbalance=imbalance,
        **router,
    )
    _check_capacity(arguments, moe)
    _check_together(arguments, model=model, moe=moe, precision=precision, gpu=launch.gpu, expert=parallel.expert)
    launch.assume(*_routing_assumptions(moe))
    launch.warn(*_fusion_warnings(arguments, model=model, grouped=grouped))
    return moe


def _check_together(
    arguments: Arguments, *, model: ModelSpec, moe: MoeSpec, precision: PrecisionSpec, gpu: HardwareSpec, expert: int
) -> None:
    """Options of MoE layers that exclude each other."""
    if expert > 1 and precision.parameters == "fp16" and not since(arguments, "0.16"):
        raise InputError(
            option(arguments, "expert_model_parallel_size"), "is not supported with --fp16 before core 0.16", "use --bf16"
        )
    if moe.shared_overlap and moe.latent_size is not None:
        raise InputError(option(arguments, "moe_shared_expert_overlap"), "contradicts --moe-latent-size", "keep one of the two")
    if moe.grouped_gemm:
        _check_grouped(arguments, model=model, moe=moe, precision=precision, gpu=gpu)
    _check_imbalance(moe, expert=expert)
    _check_allocated_rows(moe)


def _layers(arguments: Arguments, *, num_layers: int) -> tuple[bool, ...]:
    """For each layer whether it is an MoE layer: every N-th, from the first on, or by a list of 0 and 1."""
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
            option(arguments, "moe_enable_deepep"), f"cannot be used with {named} {written}", f"leave it out, or use {named} flex"
        )
    if written == "flex":
        return "flex"
    if written not in ("allgather", "alltoall"):
        raise UnsupportedError(f"{named} {written}", "this dispatcher is not modelled", f"use {named} alltoall or allgather")
    return cast(Literal["allgather", "alltoall"], written)


def _capacity(arguments: Arguments, *, balancing: tuple[str, ...]) -> tuple[float | None, bool]:
    """Capacity of an expert as a multiple of the mean, None without limit; and whether its input is padded to that."""
    named = option(arguments, "moe_expert_capacity_factor")
    pad = switched_on(arguments, "moe_pad_expert_input_to_capacity")
    factor: float | None = finite(arguments, "moe_expert_capacity_factor", -1.0)
    if arguments.get("moe_expert_capacity_factor") is not None:
        wrong = next((each for each in balancing if each not in (*AUXILIARY_LOSSES, "none")), None)
        if wrong is not None:
            raise InputError(
                named,
                f"is not supported with {wrong} balancing",
                f"use --moe-router-load-balancing-type {', '.join(AUXILIARY_LOSSES)} or none",
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


def _rank_capacity(launch: LaunchInput, *, limited: bool) -> float | None:
    """Rows that are allocated for the experts of a rank, relative to their mean number. Checks are in `launch.checks`.

    `limited`: whether HybridEP dispatches. Other dispatchers allocate as many rows as arrive.
    """
    arguments = launch.arguments
    if arguments.get(_CAPACITY) is None:
        return None
    if not limited:
        launch.assume(f"{option(arguments, _CAPACITY)} has no effect: tokens are not dispatched by HybridEP.")
        return None
    factor = finite(arguments, _CAPACITY, 1.0)
    if factor < 1:
        fault = f"{factor:g} allocates fewer rows than the mean, so that tokens are dropped in each step"
        raise UnsupportedError(option(arguments, _CAPACITY), fault, "use 1.5, for example")
    return factor


def _page_factor(launch: LaunchInput, *, pad: bool, limited: bool) -> float | None:
    """Rows of the pages on the GPU, relative to the mean number.

    A negative factor is relative to the largest number of rows of a step, which is counted as the mean.
    Only the fused kernels of Transformer Engine mark what they save for pages (`mark_grouped_tensor` in
    pytorch/ops/fused/grouped_mlp.py, 2.17). They read MXFP8 or NVFP4, of which the latter is not modelled, and a gate whose halves
    are interleaved (`validate_grouped_mlp_dims`).
    """
    arguments = launch.arguments
    if not switched_on(arguments, "moe_paged_stash") or arguments.get(_CAPACITY) is None:
        return None
    asked = arguments.get("recompute_modules")
    recomputed = {"moe", "moe_act"} & set(asked if isinstance(asked, list | tuple) else ())
    gated = switched_on(arguments, "swiglu") or switched_on(arguments, "quick_geglu")
    not_modelled = {
        "without HybridEP": not limited,
        "without MXFP8": arguments.get("fp8") is None or text(arguments, "fp8_recipe", "delayed") != "mxfp8",
        "without --moe-mlp-glu-interleave-size 32": gated and integer(arguments, "moe_mlp_glu_interleave_size") != _INTERLEAVED,
        "with recomputed experts": arguments.get("recompute_granularity") == "full" or bool(recomputed),
        "with adapters": launch.arguments.tuning.adapter is not None,
        "with inputs that are padded to a capacity": pad,
    }
    where = next((each for each, applies in not_modelled.items() if applies), None)
    if where is not None:
        raise UnsupportedError(option(arguments, "moe_paged_stash"), f"pages are not modelled {where}", "leave it out")
    factors = [abs(finite(arguments, dest, default)) for dest, default in _PAGE_FACTORS.items()]
    if sum(factors) < 1:
        fault = f"{factors[0]:g} holds fewer rows than the mean, and nothing on the host holds the others"
        raise UnsupportedError(option(arguments, "moe_paged_stash_buffer_size_factor_cuda"), fault, "use 1.1, for example")
    return factors[0]


def _check_capacity(arguments: Arguments, moe: MoeSpec) -> None:
    """The all-to-all dispatcher splits the rows by the capacity, and an expert gets each token of a rank at most once.

    Sources: `apply_router_token_dropping` (core/transformer/moe/moe_utils.py) and `MoEAlltoAllTokenDispatcher.preprocess`
    (core/transformer/moe/token_dispatcher.py), 0.16. Layers of forks add rows of zeros.
    """
    if arguments.fork is not None or not moe.pad_to_capacity or moe.dispatcher != "alltoall" or moe.capacity_factor is None:
        return
    if moe.capacity_factor * moe.topk > moe.num_experts:
        raise InputError(
            option(arguments, "moe_expert_capacity_factor"),
            "fails in the first step: the inputs of an expert are padded to more tokens than a rank has",
            f"use {moe.num_experts / moe.topk:g} or less",
        )


def _shared(arguments: Arguments, *, dispatcher: str, bias: bool) -> int | None:
    """Total width of the shared experts; None without any."""
    width = positive(arguments, "moe_shared_expert_intermediate_size")
    if width is None:
        return None
    named = option(arguments, "moe_shared_expert_intermediate_size")
    if bias:
        raise InputError(named, "shared experts have no biases", "add --disable-bias-linear")
    overlapped = ("alltoall", "flex") if since(arguments, "0.18") else ("alltoall",)
    if switched_on(arguments, "moe_shared_expert_overlap") and dispatcher not in overlapped:
        raise InputError(
            option(arguments, "moe_shared_expert_overlap"),
            f"is not supported with the {dispatcher} dispatcher",
            "add --moe-token-dispatcher-type alltoall",
        )
    return width


def _fusion_warnings(arguments: Arguments, *, model: ModelSpec, grouped: bool) -> tuple[str, ...]:
    """Fusion of biases and activation in experts is implemented for gated activations only.

    Megatron builds the model, and fails when it first runs (`TEGroupedMLP`, `MLP.forward`, `weighted_bias_swiglu_impl`). Forks of
    Megatron-LM may have experts of their own.
    """
    if arguments.fork is not None or not (model.bias_linear and model.bias_activation_fusion and since(arguments, "0.14")):
        return ()
    named = option(arguments, "num_experts")
    if model.activation in ("gelu", "squared_relu"):
        fault, remedy = "experts cannot fuse biases with a plain activation", "--no-bias-gelu-fusion"
    elif model.activation == "swiglu" and not grouped:  # grouped ones add their biases before
        fault, remedy = "sequential experts cannot fuse biases with SwiGLU", "--no-bias-swiglu-fusion"
    else:
        return ()
    return (f"{named}: Megatron fails in the first forward pass, because {fault}; add {remedy} or --disable-bias-linear.",)


def _check_grouped(arguments: Arguments, *, model: ModelSpec, moe: MoeSpec, precision: PrecisionSpec, gpu: HardwareSpec) -> None:
    """What `TEGroupedMLP`, or `GroupedMLP` without Transformer Engine, does not support."""
    named = option(arguments, "moe_grouped_gemm")
    if gpu.compute_capability is not None and gpu.compute_capability < (8, 0):
        fault = f"needs an Ampere GPU or later, and the GPU is {gpu.name or 'older'}"
        raise InputError(named, fault, "name another GPU, or leave it out")
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
        raise InputError(named, "experts in two fused weights do not support --quick-geglu", "leave one of the two out")


def _check_allocated_rows(moe: MoeSpec) -> None:
    if moe.rank_capacity is not None and moe.imbalance > moe.rank_capacity:
        fault = f"{moe.imbalance:g} times the mean number of tokens are more than the rows for {moe.rank_capacity:g} times the mean"
        raise InputError(IMBALANCE, fault, "use less, or leave out --moe-expert-rank-capacity-factor")


def _check_imbalance(moe: MoeSpec, *, expert: int) -> None:
    """The upper limit of `--info-moe-imbalance`: every token goes to the same rank, once for each of its experts.

    With padding every expert gets its capacity.
    """
    if moe.imbalance != 1 and moe.pad_to_capacity:
        why = "with --moe-pad-expert-input-to-capacity every expert gets the same number of rows"
        raise InputError(IMBALANCE, why, "leave it out")
    most = expert * min(moe.topk, moe.num_experts // expert) / moe.topk
    if moe.imbalance > most:
        raise InputError(
            IMBALANCE,
            f"{moe.imbalance:g} is above {most:g}, the value if every token goes to one rank",
            f"use {most:g} or less",
        )


def _routing_assumptions(moe: MoeSpec) -> tuple[str, ...]:
    if moe.pad_to_capacity:
        return ()
    notes = [
        f"Balanced routing is assumed: every expert gets the mean number of tokens ({IMBALANCE} changes this)."
        if moe.imbalance == 1
        else f"The experts of the highest-memory rank are assumed to get {moe.imbalance:g} times the mean number of tokens."
    ]
    if moe.rank_capacity is not None:
        notes.append(
            f"HybridEP allocates {moe.rank_capacity:g} times the mean number of rows for the experts of a rank. If more arrive, "
            "Megatron repeats the step without this limit, and the prediction is too low."
        )
    if moe.page_factor is not None:
        notes.append(
            f"The experts copy what they save to pages for {moe.page_factor:g} times the mean number of rows "
            "(--moe-paged-stash). What more tokens need is copied to pinned host memory if there is some, and is not counted. "
            "Pages are counted for the microbatches in flight; Megatron keeps them between iterations too."
        )
    if moe.capacity_factor is not None:
        notes.append("No token is assumed to be dropped: if tokens exceed the capacity of an expert, the prediction is too high.")
    return tuple(notes)
