"""Checks of CUDA graphs.

Megatron: `validate_args` (megatron/training/arguments.py), 0.16 to 0.19. Other checks are in `analyzer.launch.derive.cuda_graphs`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from analyzer.launch.derive.reading import since, size, switched_on
from analyzer.specs.rules.violation import Violation

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.specs import TrainingJob


def graph_violations(arguments: Arguments, job: TrainingJob) -> Iterator[Violation]:
    """Captured parts of the model that contradict other options."""
    if not since(arguments, "0.16"):
        return
    yield from _parts(arguments)
    yield from _delayed_gradients(arguments, job)
    yield from _full_expert_layers(arguments, job)
    if job.graphs is None or job.graphs.implementation != "local":
        return
    experts = size(arguments, "expert_model_parallel_size")
    padded = switched_on(arguments, "moe_pad_experts_for_cuda_graph_inference")
    if experts > 1 and not padded and not since(arguments, "0.18"):
        yield Violation(
            ("cuda_graph_impl",),
            f"with an expert-parallel size of {experts}, local needs --moe-pad-experts-for-cuda-graph-inference",
            "add it, or use --cuda-graph-impl transformer_engine",
        )


def _full_expert_layers(arguments: Arguments, job: TrainingJob) -> Iterator[Violation]:
    """Experts read the number of their tokens on the host, which a capture does not allow, unless each has a constant number.

    Megatron refuses the part `moe` for this reason, but not full layers. Source: `tokens_per_expert.tolist()` in `TEGroupedMLP` and
    `SequentialMLP` (core/transformer/moe/experts.py), 0.16 to 0.19; the operations of Transformer Engine's fuser do not read it.
    """
    moe = job.model.moe
    if moe is None or job.graphs is None or job.graphs.implementation != "transformer_engine" or job.graphs.scope:
        return
    padded = moe.capacity_factor is not None and moe.pad_to_capacity
    if not padded and not switched_on(arguments, "use_transformer_engine_op_fuser"):
        yield Violation(
            ("cuda_graph_impl",),
            "full MoE layers cannot be captured: their experts read the number of their tokens on the host",
            "name captured parts, such as attn moe_router, or add --moe-expert-capacity-factor 1.0 "
            "--moe-pad-expert-input-to-capacity",
        )


def _parts(arguments: Arguments) -> Iterator[Violation]:
    """The captured parts of a layer are given by one option."""
    if arguments.get("cuda_graph_modules") and arguments.get("cuda_graph_scope_deprecated") is not None:
        yield Violation(("cuda_graph_modules",), "contradicts --cuda-graph-scope", "keep one of the two")


def _delayed_gradients(arguments: Arguments, job: TrainingJob) -> Iterator[Violation]:
    """Delayed weight gradients whose layers are captured (from 0.17 on)."""
    delayed = switched_on(arguments, "delay_wgrad_compute") and switched_on(arguments, "overlap_grad_reduce")
    if not delayed or job.graphs is None or not since(arguments, "0.17"):
        return
    scope = job.graphs.scope
    moe = job.model.moe
    shared = moe is not None and moe.shared_ffn_hidden_size is not None and not moe.shared_overlap
    if ("attn" in scope or ("moe_router" in scope and shared)) and not job.flags.gradient_accumulation_fusion:
        yield Violation(
            ("delay_wgrad_compute",),
            "in CUDA graphs, needs fused gradient accumulation",
            "leave --no-gradient-accumulation-fusion out",
        )
    if "attn" in scope and (job.model.bias_linear or switched_on(arguments, "add_qkv_bias")):
        yield Violation(
            ("delay_wgrad_compute",), "does not support biases of captured attention", "leave attn out of the captured parts"
        )
