"""Memory that libraries keep beside the model: workspaces and caches, and when each first appears.

Sources: PyTorch aten/src/ATen/cuda/CublasHandlePool.cpp (getChosenWorkspaceSize); transformer_engine/pytorch/
cpp_extensions/gemm.py get_cublas_workspace_size_bytes and module/base.py get_dummy_wgrad (TE 2.11);
megatron/core/utils.py GlobalMemoryBuffer (0.16.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from analyzer.memory.passes import Pass
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import Module
from analyzer.specs import TrainingJob
from analyzer.units import BLOCK, KIB, MIB, dtype_bytes, round_up

GROUPED_GEMM_STREAMS = 4
"""Streams over which Transformer Engine spreads a grouped GEMM, each with a workspace (nvte_get_num_compute_streams)."""
ROTARY_TABLES = 32
"""Tables that the cache of `YarnRotaryEmbedding.forward` holds; with latent attention every layer has one of its own."""
YARN_POSITIONS = 4096
"""`MLATransformerConfig.original_max_position_embeddings`, which no option of the training script changes."""
LATENT = ("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj")
LINEAR = ("linear_qkv", *LATENT, "linear_proj", "linear_fc1", "linear_fc2", "eh_proj")
REPLACED = ("self_attention", "mlp")
"""Branches that may be one linear layer themselves, with a weight of their own (`BlockSpec`)."""


@dataclass(frozen=True, slots=True)
class RuntimeItem:
    """Bytes that stay once a module of one of these names has first run in this pass; without names, from the start."""

    name: str
    bytes: int
    modules: tuple[str, ...]
    phase: Pass


def capability(job: TrainingJob) -> tuple[int, int]:
    """Compute capability of the target GPU; Hopper's where it is not known."""
    return job.hardware.compute_capability or (9, 0)


def cublas_workspace_bytes(job: TrainingJob) -> int:
    """Workspace of one cuBLAS handle on one stream: CUBLAS_WORKSPACE_CONFIG, else PyTorch's default.

    The variable lists `:SIZE:COUNT` in KiB. The default is :4096:8 on Hopper and, since pull request 175344 of
    February 2026, on Blackwell; on others :4096:2:16:8.
    """
    config = job.flags.cublas_workspace_config
    if config:
        numbers = [int(part) for part in config.split(":") if part.strip().isdigit()]
        return sum(kib * count for kib, count in zip(numbers[::2], numbers[1::2], strict=False)) * KIB
    return 4096 * 8 * KIB if capability(job)[0] >= 9 else (4096 * 2 + 16 * 8) * KIB


def te_workspace_bytes(job: TrainingJob) -> int:
    """Workspace of Transformer Engine's GEMMs: 32 MiB and 1 KiB from Hopper on, 4 MiB before."""
    return 32 * MIB + KIB if capability(job)[0] >= 9 else 4 * MIB


def runtime_items(job: TrainingJob, trees: Sequence[Module]) -> tuple[RuntimeItem, ...]:
    """Everything that the libraries keep on a rank which holds these chunks."""
    return tuple(item for item in _items(job, trees) if item.bytes)


def _items(job: TrainingJob, trees: Sequence[Module]) -> Iterator[RuntimeItem]:
    shapes = Shapes(job)
    names = {module.name for tree in trees for _, module in tree.walk()}
    te = job.model.implementation == "transformer_engine"
    if te and names.intersection(LINEAR):
        yield RuntimeItem("Transformer Engine GEMM workspace", round_up(te_workspace_bytes(job), BLOCK), LINEAR, "forward")
    moe = job.model.moe
    if te and moe is not None and moe.grouped_gemm and "experts" in names:
        bytes_each = round_up(te_workspace_bytes(job), BLOCK)
        yield RuntimeItem("grouped GEMM workspaces of 4 streams", GROUPED_GEMM_STREAMS * bytes_each, LINEAR, "forward")
    # Megatron's own layers multiply through PyTorch, whose cuBLAS handles belong to a thread: autograd has another
    unfused = job.model.attention_backend == "unfused"
    # the router too: te_general_gemm of core's extensions finds no get_workspace in Transformer Engine 2.11
    torch_products = ("output_layer", "router", *(() if te else LINEAR), *(("core_attention",) if unfused else ()))
    if names.intersection(torch_products) or job.optimizer.muon is not None:  # Muon multiplies in every stage
        yield RuntimeItem("cuBLAS workspace of the main thread", cublas_workspace_bytes(job), torch_products, "forward")
    if names.intersection(torch_products):
        yield RuntimeItem("cuBLAS workspace of the autograd thread", cublas_workspace_bytes(job), torch_products, "backward")
    if te and unfused and job.model.mla is None and job.model.softmax_type == "vanilla":
        from analyzer.modules.attention.core_attention import causal_mask, softmax_is_fused

        if not softmax_is_fused(shapes):
            yield RuntimeItem("Transformer Engine's causal mask", causal_mask(shapes).bytes, ("core_attention",), "forward")
    yield from _global_buffer(shapes, names)
    if job.optimizer.offload is not None and not job.optimizer.offload.collected:
        from analyzer.states.cpu_offload import whole_model_bytes  # a millisecond that most launches need not spend

        yield RuntimeItem("fp32 weights that the optimizer was made of first", whole_model_bytes(job, trees), (), "forward")
    if job.fsdp is not None and job.fsdp.double_buffer:
        yield from _double_buffers(job, trees)
    if job.flags.gradient_accumulation_fusion and job.model.implementation != "legacy":
        yield from _dummy_weight_gradients(shapes, trees)
    if job.precision.fp8 is not None:
        from analyzer.states.fp8_weights import cast_bytes, scaling_bytes  # a millisecond that most launches need not spend

        kind = "FP4" if job.precision.fp8.recipe == "nvfp4" else "FP8"
        yield RuntimeItem(f"{kind} copies of weights", cast_bytes(job, trees), LINEAR, "forward")
        yield RuntimeItem("FP8 scaling factors", scaling_bytes(job, trees), LINEAR, "forward")
    if job.model.position_embedding == "rope" and "linear_qkv" in names:
        width = int(job.model.kv_channels * job.model.rotary_percent)
        table = round_up(4 * shapes.s * width, BLOCK)  # the positions of this context-parallel rank
        yield RuntimeItem("rotary position table", table * len(trees), ("linear_qkv",), "forward")  # every chunk has its own
    yarn = job.model.yarn_positions
    if yarn is not None and job.model.mla is None and "linear_qkv" in names:  # buffers, cast with the weights
        each = round_up(dtype_bytes(shapes.dtype, yarn * job.model.kv_channels), BLOCK)
        yield RuntimeItem("cosines and sines of YaRN", 2 * each * len(trees), ("linear_qkv",), "forward")
    yield from _tables_of_latent_attention(shapes, trees)


def _tables_of_latent_attention(shapes: Shapes, trees: Sequence[Module]) -> Iterator[RuntimeItem]:
    """Each layer has positions of its own: angles in a cache, and with YaRN cosines and sines as buffers of its module.

    The buffers are made for YARN_POSITIONS and cast with the weights; the fused rotation makes them anew for its sequence.
    """
    job, mla = shapes.job, shapes.model.mla
    if mla is None:
        return
    layers = sum(module.name == "linear_kv_up_proj" for tree in trees for _, module in tree.walk())
    width = mla.qk_pos_emb_head_dim
    table = round_up(4 * shapes.s * width, BLOCK)
    yield RuntimeItem("rotary position tables of the layers", min(layers, ROTARY_TABLES) * table, ("linear_kv_up_proj",), "forward")
    if mla.yarn:
        positions = shapes.s if job.model.rope_fusion else YARN_POSITIONS // job.parallel.context
        each = round_up(dtype_bytes(shapes.dtype, positions * width), BLOCK)
        yield RuntimeItem("cosines and sines of YaRN", layers * 2 * each, LATENT, "forward")
    if mla.first_angles_stay:
        each = round_up(4 * (YARN_POSITIONS // job.parallel.context) * width, BLOCK)
        yield RuntimeItem("angles of these", min(layers, ROTARY_TABLES) * each, LATENT, "forward")


def _global_buffer(shapes: Shapes, names: set[str]) -> Iterator[RuntimeItem]:
    """Megatron's scratch buffer "mpu", which grows to the largest request and stays."""
    job = shapes.job
    te = job.model.implementation == "transformer_engine"
    gather: tuple[str, ...] = ()
    scratch = 0
    if shapes.sp:
        gather = tuple(sorted(names.intersection(("output_layer",) if te else ("output_layer", "linear_qkv", "linear_fc1"))))
        scratch = shapes.hidden("gathered input", gathered=True).bytes if gather else 0
    if job.model.implementation == "local" and job.model.attention_backend == "unfused" and "core_attention" in names:
        heads = job.model.num_attention_heads // shapes.t
        scores = round_up(dtype_bytes(shapes.dtype, shapes.b * heads * shapes.s * job.batch.seq_length), BLOCK)
        gather, scratch = (*gather, "core_attention"), max(scratch, scores)
    moe = job.model.moe
    if moe is not None and moe.dispatcher == "allgather" and "dispatch" in names:
        from analyzer.modules.moe.allgather import gathered_tokens  # a millisecond that most launches need not spend

        if job.parallel.expert * job.parallel.expert_tensor > 1:
            gather, scratch = (*gather, "dispatch"), max(scratch, gathered_tokens(shapes).bytes)
    if scratch:
        yield RuntimeItem("Megatron's global memory buffer", scratch, gather, "forward")


def _double_buffers(job: TrainingJob, trees: Sequence[Module]) -> Iterator[RuntimeItem]:
    """Two persistent buffers each for the parameters and for the gradients of a layer (`FixedPoolAllocator`)."""
    from analyzer.passes.fsdp_gathering import pool_bytes  # a millisecond that most launches need not spend

    gathered, reduced = map(max, zip(*(pool_bytes(job, tree) for tree in trees), strict=True))
    yield RuntimeItem("double buffer of gathered parameters", gathered, LINEAR, "forward")
    yield RuntimeItem("double buffer of unsharded gradients", reduced, LINEAR, "backward")


def _dummy_weight_gradients(shapes: Shapes, trees: Sequence[Module]) -> Iterator[RuntimeItem]:
    """Fused accumulation hands autograd an empty gradient: one for each distinct shape, kept by Transformer Engine.

    Megatron's own layers take theirs from the same cache (core/tensor_parallel/layers.py, 0.16.1).
    """
    weights: dict[tuple[tuple[int, ...], str], str] = {}
    for tree in trees:
        for _, module in tree.walk():
            if module.name == "output_layer":  # its weight may be the word embedding's
                rows = shapes.model.padded_vocab_size // shapes.t
                weights.setdefault(((rows, shapes.model.hidden_size), shapes.dtype), module.name)
            elif module.name in (*LINEAR, *REPLACED):
                for parameter in module.parameters:
                    if parameter.name == "weight":  # of experts, one each: the last two dimensions
                        weights.setdefault((parameter.shape[-2:], parameter.dtype), module.name)
    for (shape, dtype), name in weights.items():
        size = round_up(dtype_bytes(dtype, prod(shape)), BLOCK)
        yield RuntimeItem(f"dummy weight gradient {list(shape)}", size, (name,), "backward")
