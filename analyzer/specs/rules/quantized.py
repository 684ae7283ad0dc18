"""Rules for tensors in FP8 and FP4 that Transformer Engine cannot multiply, gather from tensor-parallel ranks, or recompute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from analyzer.specs.job import TrainingJob
from analyzer.specs.precision import Fp8Spec
from analyzer.specs.rules.violation import Violation, multiple_near

BLOCKS: Final = {"blockwise": 128, "mxfp8": 32, "nvfp4": 16}
"""Elements along each side of a tensor that share a scale, by recipe. The sides are multiples of it if the tensor is gathered."""
_LEADING: Final = 8
_LAST: Final = 16
"""The product of the leading dimensions, and the last one, of a matrix that is multiplied in FP8, are multiples of these."""
_OF_HEADS: Final = ("kv_channels", "v_head_dim")
"""Options whose widths are those of all heads together."""

TE_2_11: Final = "Transformer Engine 2.11"


def quantized_violations(job: TrainingJob) -> Iterator[Violation]:
    """Inputs of linear layers that are gathered in FP8 or FP4, with the releases of Transformer Engine that check them.

    Also sizes of matrices, and copies of weights in FP4 that the recomputation reads.
    """
    fp8, parallel = job.precision.fp8, job.parallel
    if fp8 is None:
        return
    if fp8.recipe == "nvfp4" and job.recompute.granularity == "full":
        yield from _without_columns(job)
    if fp8.recipe == "nvfp4" and fp8.stored_parameters:
        yield from _without_cast(job)
    if fp8.layers_at_start_in_16_bit + fp8.layers_at_end_in_16_bit >= job.model.num_layers:
        return
    if fp8.recipe == "nvfp4" and job.flags.overlap_moe_expert_parallel_comm:  # whose layers run in 16 bit
        return
    yield from _in_matrices(job)
    if parallel.tensor == 1 or not parallel.sequence_parallel or job.software.te_is_before("2.11"):
        return
    block = BLOCKS.get(fp8.recipe)
    if block is not None:
        yield from _in_blocks(job, block)
    if job.flags.tp_comm_overlap and fp8.recipe in ("blockwise", "nvfp4"):
        yield from _in_userbuffers(job)


def _in_matrices(job: TrainingJob) -> Iterator[Violation]:
    """The matrices of linear layers have sizes that FP8 has kernels for. Weights of experts are only quantized.

    Source: `assert_dim_for_fp8_exec` (transformer_engine/pytorch/utils.py, 1.0 to 2.18), and `create_tensor` of the quantizers with
    blocks (pytorch/csrc/quantizer.cpp).
    """
    fp8, parallel, tuning = job.precision.fp8, job.parallel, job.tuning
    assert fp8 is not None
    name = "FP4" if fp8.recipe == "nvfp4" else "FP8"
    block = 1 if fp8.recipe == "blockwise" else BLOCKS.get(fp8.recipe, 1)
    leading, last = max(block, _LEADING), max(block, _LAST)
    for dest, width, ranks in _widths(job, fp8):
        multiple = block if dest == "moe_ffn_hidden_size" else last
        if width // ranks % multiple:
            part = f" on each of {ranks} tensor-parallel ranks" if ranks > 1 else ""
            needed = f"cannot be multiplied in {name}, which needs multiples of {multiple}"
            fault = f"linear layers with {width // ranks} inputs{part} {needed}"
            total = f"{multiple_near(width, multiple * ranks)}{' for all heads' if dest in _OF_HEADS else ''}"
            yield Violation((dest,), fault, f"use {total}, or train in 16 bit")
    split = parallel.context * (parallel.tensor if parallel.sequence_parallel else 1)
    tokens = job.batch.seq_length // split * job.batch.micro_batch_size
    padded = tuning.packed or tuning.longest_counted or tuning.filled or tuning.objective != "language model"
    if tokens % leading and not padded:
        fault = f"{tokens} tokens of a rank cannot be multiplied in {name}, which needs multiples of {leading}"
        yield Violation(("seq_length",), fault, f"use {multiple_near(job.batch.seq_length, leading * split)}, or train in 16 bit")


def _widths(job: TrainingJob, fp8: Fp8Spec) -> Iterator[tuple[str, int, int]]:
    """The widths of the inputs of linear layers in FP8: the option, the elements, and the ranks that split them."""
    model, parallel = job.model, job.parallel
    yield "hidden_size", model.hidden_size, 1
    if model.hybrid is not None or model.linear_attention is not None or model.blocks:
        return
    mla, moe = model.mla, model.moe
    heads = model.num_attention_heads * (model.kv_channels if mla is None else mla.v_head_dim)
    yield "kv_channels" if mla is None else "v_head_dim", heads, parallel.tensor
    if mla is not None:
        yield "kv_lora_rank", mla.kv_lora_rank, 1
        yield "q_lora_rank", mla.q_lora_rank or 0, 1
    layers = range(fp8.layers_at_start_in_16_bit, model.num_layers - fp8.layers_at_end_in_16_bit)
    if moe is None or not all(moe.layers[layer] for layer in layers):
        yield "ffn_hidden_size", model.ffn_hidden_size, parallel.tensor
    if moe is not None and any(moe.layers[layer] for layer in layers):
        yield "moe_shared_expert_intermediate_size", moe.shared_ffn_hidden_size or 0, parallel.tensor
        yield "moe_ffn_hidden_size", moe.ffn_hidden_size, parallel.expert_tensor


def _without_columns(job: TrainingJob) -> Iterator[Violation]:
    """The first forward of a checkpoint has no gradients, and caches copies of the weights without the column-wise part.

    The backward after the recomputation needs this part. The cache of other recipes is replaced then (`get_weight_workspace` in
    transformer_engine/pytorch/module/base.py, 2.11).
    """
    if job.software.te_is_before("2.12"):
        why = "with NVFP4 fails in the first backward: the cached weights have no column-wise copy (Transformer Engine 2.11)"
        yield Violation(("recompute_granularity",), why, "use --recompute-granularity selective, or FP8", TE_2_11)


def _in_blocks(job: TrainingJob, block: int) -> Iterator[Violation]:
    """Each rank's part of an input has whole blocks.

    Source: `assert_dim_for_all_gather` (transformer_engine/pytorch/utils.py, 2.11) and `is_quantizable` of the quantizers.
    """
    model, parallel = job.model, job.parallel
    widths = {"hidden_size": model.hidden_size}
    if model.mla is not None:
        widths |= {"kv_lora_rank": model.mla.kv_lora_rank, "q_lora_rank": model.mla.q_lora_rank or 0}
    for dest, width in widths.items():
        if width % block:
            fault = (
                f"{width} is not a multiple of the {block} elements of a block, in which tensor-parallel ranks gather FP8 inputs"
            )
            yield Violation((dest,), fault, f"use {multiple_near(width, block)}, or FP8 with --fp8-recipe tensorwise", TE_2_11)
    rows = job.batch.seq_length // parallel.context // parallel.tensor * job.batch.micro_batch_size
    if rows % block:
        fault = (
            f"a rank's {rows} tokens are not a multiple of the {block} of a block, in which tensor-parallel ranks gather FP8 inputs"
        )
        yield Violation(("sequence_parallel",), fault, "use FP8 with --fp8-recipe tensorwise", TE_2_11)


def _in_userbuffers(job: TrainingJob) -> Iterator[Violation]:
    """Userbuffers hold tensors in 16 bit, with one scale, and in mxfp8. Latent attention turns them off.

    Source: `fill_userbuffers_buffer_for_all_gather` (transformer_engine/pytorch/module/base.py, 2.11).
    """
    if job.model.mla is None:
        yield Violation(
            ("tp_comm_overlap",),
            "Transformer Engine cannot gather tensors with these scales in userbuffers",
            "leave it out, or use FP8 with --fp8-recipe tensorwise",
            TE_2_11,
        )


def _without_cast(job: TrainingJob) -> Iterator[Violation]:
    """`quantize_nvfp4_param_shard` (core/fp4_utils.py, 0.18 to 0.19) raises RuntimeError without `quantize_master_weights`."""
    if job.software.te_is_before("2.14"):
        fault = "this release cannot cast master weights to weights that are stored in FP4"
        remedy = "use Transformer Engine 2.14 or later (--info-te 2.14), or leave it out"
        yield Violation(("fp4_param_gather",), fault, remedy, f"Transformer Engine {job.software.te}")
