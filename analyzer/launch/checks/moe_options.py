"""Checks of experts, and of microbatches that overlap their communication (`TransformerConfig.__post_init__`, 0.16 to 0.19)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from analyzer.launch.checks.graph_options import recomputed_modules
from analyzer.launch.derive.reading import since, switched_on, text
from analyzer.specs.rules.violation import Violation

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.specs import GraphSpec, TrainingJob


def moe_violations(arguments: Arguments) -> Iterator[Violation]:
    """The checks of experts that a launch breaks. Megatron does them for dense models too."""
    yield from _padded_map(arguments)
    if since(arguments, "0.18"):
        yield from _grouped_parameters(arguments)
        yield from _allocated_rows(arguments)
        yield from _expert_gradients(arguments)
    if since(arguments, "0.19"):
        yield from _dispatcher(arguments)


def _padded_map(arguments: Arguments) -> Iterator[Violation]:
    """`pad_routing_map` changes the routing map that a product saves: with the logits in `sinkhorn_load_balancing`, or with the
    probabilities in `apply_router_token_dropping`."""
    asked = [dest for dest in ("moe_router_padding_for_quantization", "moe_router_padding_for_fp8") if switched_on(arguments, dest)]
    sinkhorn = arguments.get("moe_router_load_balancing_type") in ("sinkhorn", ["sinkhorn"], ("sinkhorn",))
    fused = switched_on(arguments, "enable_experimental") and switched_on(arguments, "moe_permute_fusion")
    if not asked or fused or text(arguments, "moe_token_dispatcher_type", "allgather") != "alltoall":
        return
    if sinkhorn:
        fault = "changes the routing map in place, which the backward of sinkhorn needs"
        yield Violation((asked[0],), fault, "leave it out, or use --moe-router-load-balancing-type none")
    if arguments.get("moe_expert_capacity_factor") is not None:
        fault = "changes the routing map in place, which the backward of the expert capacity needs"
        yield Violation((asked[0],), fault, "leave it out, or leave out --moe-expert-capacity-factor")


def _allocated_rows(arguments: Arguments) -> Iterator[Violation]:
    """A constant number of rows for the experts of a rank, and pages for what they save."""
    limited, paged = arguments.get("moe_expert_rank_capacity_factor") is not None, switched_on(arguments, "moe_paged_stash")
    if paged and not limited:
        fault = "needs a constant number of rows for the experts"
        yield Violation(("moe_paged_stash",), fault, "add --moe-expert-rank-capacity-factor 1.5, or leave it out")
    offloaded = {"expert_fc1", "moe_act", "fused_group_mlp"} & set(_listed(arguments, "offload_modules"))
    if paged and offloaded:
        fault = f"covers {min(offloaded)}, which is offloaded too"
        yield Violation(("moe_paged_stash",), fault, f"remove {min(offloaded)} from --offload-modules")
    if not limited:
        return
    named, backend = ("moe_expert_rank_capacity_factor",), text(arguments, "moe_flex_dispatcher_backend", "deepep")
    if backend not in ("hybridep", "ncclep"):
        yield Violation(named, "is for HybridEP", "add --moe-flex-dispatcher-backend hybridep, or leave it out")
    elif backend == "hybridep" and not switched_on(arguments, "use_transformer_engine_op_fuser"):
        yield Violation(named, "needs fused operations", "add --use-transformer-engine-op-fuser")


def _expert_gradients(arguments: Arguments) -> Iterator[Violation]:
    """Weight gradients of experts that are computed while gradients return from them."""
    dest = "overlap_dispatch_backward_with_experts_wgrad"
    if not switched_on(arguments, dest):
        return
    for other in ("delay_wgrad_compute", "overlap_moe_expert_parallel_comm"):
        if switched_on(arguments, other):
            yield Violation((dest,), f"contradicts --{other.replace('_', '-')}", "keep one of the two")


def _listed(arguments: Arguments, dest: str) -> tuple[str, ...]:
    value = arguments.get(dest)
    return tuple(map(str, value)) if isinstance(value, list | tuple) else ()


def _grouped_parameters(arguments: Arguments) -> Iterator[Violation]:
    """Weights or biases of all experts in one parameter."""
    weight, bias = (switched_on(arguments, dest) for dest in ("moe_single_grouped_weight", "moe_single_grouped_bias"))
    if not (weight or bias):
        return
    named = ("moe_single_grouped_weight" if weight else "moe_single_grouped_bias",)
    if not switched_on(arguments, "moe_grouped_gemm"):
        yield Violation(named, "needs grouped GEMMs", "add --moe-grouped-gemm")
    if weight:
        yield from _grouped_weight(arguments)
    if bias and arguments.get("add_bias_linear") is False:
        yield Violation(("moe_single_grouped_bias",), "contradicts --disable-bias-linear", "keep one of the two")


def _grouped_weight(arguments: Arguments) -> Iterator[Violation]:
    named = ("moe_single_grouped_weight",)
    fp8, fp4 = arguments.get("fp8") is not None, arguments.get("fp4") is not None
    mxfp8 = text(arguments, "fp8_recipe", "delayed") == "mxfp8"
    if not since(arguments, "0.19"):
        if fp4 or not fp8 or not mxfp8:
            yield Violation(named, "needs FP8 with the recipe mxfp8 before 0.19", "add --fp8-format e4m3 --fp8-recipe mxfp8")
        return
    if fp8 and not mxfp8:
        yield Violation(named, "in FP8 needs the recipe mxfp8", "add --fp8-recipe mxfp8")
    if not switched_on(arguments, "use_transformer_engine_op_fuser"):
        yield Violation(named, "needs fused operations", "add --use-transformer-engine-op-fuser")


def _dispatcher(arguments: Arguments) -> Iterator[Violation]:
    """Libraries of the flex dispatcher."""
    written = text(arguments, "moe_token_dispatcher_type", "allgather")
    if text(arguments, "moe_flex_dispatcher_backend", "deepep") == "ncclep" and written != "flex":
        fault = f"ncclep is not for the {written} dispatcher"
        yield Violation(("moe_flex_dispatcher_backend",), fault, "leave it out, or add --moe-token-dispatcher-type flex")
    deepep, hybridep = arguments.get("moe_deepep_num_sms"), arguments.get("moe_hybridep_num_sms")
    differ = deepep is not None and hybridep is not None and deepep != hybridep
    if differ and arguments.get("moe_flex_dispatcher_num_sms") is None:
        fault = f"{deepep} differs from --moe-hybridep-num-sms {hybridep}"
        yield Violation(("moe_deepep_num_sms",), fault, "use --moe-flex-dispatcher-num-sms instead of both")


def overlap_violations(arguments: Arguments, job: TrainingJob) -> Iterator[Violation]:
    """The checks of `--overlap-moe-expert-parallel-comm` that a launch breaks."""
    if not job.flags.overlap_moe_expert_parallel_comm:
        return
    if since(arguments, "0.14") and job.recompute.granularity != "full":  # which a rule of the layout refuses
        for dest in ("recompute_method", "recompute_num_layers"):
            if arguments.get(dest) is not None:
                yield Violation((dest,), "cannot be used with --overlap-moe-expert-parallel-comm", "leave it out")
    if since(arguments, "0.17") and "moe" in recomputed_modules(arguments):
        yield Violation(("recompute_modules",), "moe cannot be recomputed with --overlap-moe-expert-parallel-comm", "leave moe out")
    if since(arguments, "0.16") and not since(arguments, "0.18"):
        yield from _overlap_of_0_16_and_0_17(job)
    if since(arguments, "0.16") and not since(arguments, "0.19") and arguments.get("mtp_num_layers") == 0:
        yield Violation(("mtp_num_layers",), "0 is refused with --overlap-moe-expert-parallel-comm before 0.19", "leave it out")
    if job.flags.delay_wgrad_compute and job.flags.tp_comm_overlap and arguments.get("tp_comm_bulk_wgrad") is not False:
        # WeightGradStore.__init__ (transformer_engine/pytorch/module/_common.py, 2.3 to 2.11)
        fault = "weight gradients that overlap with communication (--tp-comm-overlap) cannot be delayed"
        yield Violation(("delay_wgrad_compute",), fault, "add --disable-tp-comm-bulk-wgrad")
    if job.graphs is not None and since(arguments, "0.16"):
        yield from _overlap_with_graphs(arguments, job.graphs)


def _overlap_of_0_16_and_0_17(job: TrainingJob) -> Iterator[Violation]:
    if job.model.mtp_num_layers == 1 and job.parallel.pipeline == 1:
        yield Violation(
            ("mtp_num_layers",),
            "with --overlap-moe-expert-parallel-comm needs a pipeline",
            "use --pipeline-model-parallel-size 2 with virtual stages",
        )


def _overlap_with_graphs(arguments: Arguments, graphs: GraphSpec) -> Iterator[Violation]:
    named = ("overlap_moe_expert_parallel_comm",)
    if graphs.implementation != "transformer_engine":
        if not since(arguments, "0.18"):
            yield Violation(named, "cannot be used with local CUDA graphs before 0.18", "use --cuda-graph-impl transformer_engine")
        return
    part = next((each for each in ("moe", "mlp") if each in graphs.scope), None)
    if part is not None:
        yield Violation(named, f"cannot be used with CUDA graphs of {part}", f"leave {part} out of the captured parts")
