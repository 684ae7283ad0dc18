"""Checks of offloaded activations: `TransformerConfig.__post_init__` (0.19), and FP8 weights that are offloaded (0.16)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from analyzer.launch.checks.graph_options import recomputed_modules
from analyzer.launch.derive.reading import integer, number, since
from analyzer.specs.rules.violation import Violation

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.specs import TrainingJob


def _quantized_weights(arguments: Arguments, job: TrainingJob) -> Iterator[Violation]:
    """FP8 weights with block scales that are copied to the host come back in 16 bit.

    `on_save_for_backward` of core/pipeline_parallel/fine_grained_activation_offload.py (0.16) copies large tensors with `copy_`.
    `general_gemm` of Transformer Engine then reads `_data_format` of both factors of the input gradient. Weights that are stored in
    FP8 are parameters, which `GPTModel.preprocess_for_fine_grained_offloading` leaves on the GPU.
    """
    offload, fp8 = job.activation_offload, job.precision.fp8
    if offload is None or fp8 is None or fp8.recipe != "blockwise" or fp8.stored_parameters or since(arguments, "0.17"):
        return
    if fp8.layers_at_start_in_16_bit + fp8.layers_at_end_in_16_bit >= job.model.num_layers:
        return
    for name, elements in _weights(job):
        if name in offload.modules and elements >= offload.min_elements:
            fault = f"the backward of {name} fails with --fp8-recipe blockwise: its FP8 weight ({elements:,} elements) is offloaded"
            yield Violation(("offload_modules",), fault, f"leave {name} out, or add --min-offloaded-tensor-size {elements + 1}")
            return


def _weights(job: TrainingJob) -> Iterator[tuple[str, int]]:
    """Names of groups, each with the elements of the largest weight of its projections on a rank."""
    model, tensor, hidden = job.model, job.parallel.tensor, job.model.hidden_size
    heads, mla = model.num_attention_heads // tensor, model.mla
    if mla is None:
        yield "qkv_linear", hidden * (model.query_projection_size + 2 * model.key_value_projection_size) // tensor
        yield "attn_proj", hidden * model.query_projection_size // tensor
        return
    down = max(mla.q_lora_rank or 0, mla.kv_lora_rank + mla.qk_pos_emb_head_dim) * hidden
    queries = (mla.q_lora_rank or hidden) * heads * mla.query_head_dim
    yield "qkv_linear", max(down, queries, mla.kv_lora_rank * heads * (mla.qk_head_dim + mla.v_head_dim))
    yield "attn_proj", hidden * heads * mla.v_head_dim


def _delayed_expert_input(job: TrainingJob) -> Iterator[Violation]:
    """`TEGroupedMLP.__init__` lets fc1 save its 16-bit input for `expert_fc1`, which this recipe does not support."""
    offload, fp8, moe = job.activation_offload, job.precision.fp8, job.model.moe
    if offload is None or fp8 is None or moe is None or fp8.recipe != "delayed" or "expert_fc1" not in offload.modules:
        return
    if moe.grouped_gemm and not moe.legacy_grouped_gemm:
        fault = "expert_fc1 offloads the 16-bit input of the experts, which --fp8-recipe delayed does not support"
        yield Violation(("offload_modules",), fault, "use --fp8-recipe tensorwise, or leave expert_fc1 out")


def offload_violations(arguments: Arguments, job: TrainingJob) -> Iterator[Violation]:
    """The checks of `--fine-grained-activation-offloading` that a launch breaks."""
    yield from _quantized_weights(arguments, job)
    yield from _delayed_expert_input(job)
    if job.activation_offload is None or not job.activation_offload.modules or not since(arguments, "0.19"):
        return
    if job.recompute.granularity == "selective" and "moe" in recomputed_modules(arguments):
        inside = [module for module in job.activation_offload.modules if module in ("moe_act", "expert_fc1")]
        if inside:
            fault = f"{inside[0]} is in the MoE layer, which is recomputed"
            yield Violation(("offload_modules",), fault, f"leave {inside[0]} out, or leave moe out of --recompute-modules")
    for dest in ("min_offloaded_tensor_size", "delta_offload_bytes_across_pp_ranks"):
        size = integer(arguments, dest)
        if size is not None and size < 0:
            yield Violation((dest,), f"{size} is below 0", "give 0 or more")
    fraction = number(arguments, "activation_offload_fraction", 1)
    if not 0 <= fraction <= 1:
        yield Violation(("activation_offload_fraction",), f"{fraction:g} is not between 0 and 1", "give a number between 0 and 1")
