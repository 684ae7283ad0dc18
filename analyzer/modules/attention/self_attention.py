"""Self-attention: projection to q, k and v, the kernel, projection back. Source: core/transformer/attention.py (0.16.1)."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from analyzer.modules.attention.context_parallel import QKV_TENSOR, works_in_batches
from analyzer.modules.attention.core_attention import (
    ATTENTION,
    QKV_GRADIENTS,
    Heads,
    checkpoint_inputs,
    fused_kernel,
    held_by_caller,
    kernel_under_checkpoint,
    projection_saves_copy,
    query_key_norm,
    returns_saved_output,
)
from analyzer.modules.attention.unfused_attention import reads_copied_gradient, unfused_kernel
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.linear import column_parallel, row_parallel
from analyzer.modules.norm import branch_norm
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import LAYER, STREAM, Module, largest

_GATE: Final = "gate"


def self_attention(shapes: Shapes, *, fused_norm: bool, input_shares: str = "") -> Module:
    """[s, b, h] → [s, b, h]."""
    model = shapes.model
    heads = Heads(shapes)
    full_width = model.query_projection_size + model.gate_projection_size + 2 * model.key_value_projection_size
    qkv = column_parallel(
        shapes,
        "linear_qkv",
        ModuleKind.QKV,
        width=full_width // shapes.t,
        full_width=full_width,
        symbol="(2a+2g)·d/t" if model.output_gate else "(a+2g)·d/t",
        bias=model.bias_qkv,
        fused_norm=fused_norm,
        input_made_in=STREAM if fused_norm or model.norm_modules == "none" else "input_layernorm",
        input_shares=input_shares,
    )
    if heads.gathered:
        qkv = _gathered(shapes, qkv)
    gated = model.output_gate
    projection = row_parallel(
        shapes,
        "linear_proj",
        ModuleKind.ATTENTION_OUTPUT,
        width=heads.query,
        full_width=model.query_projection_size,
        symbol="a·d/t",
        bias=model.bias_linear,
        input_made_in=ATTENTION if gated else _transposed_in(shapes),
        input_shares="" if gated or projection_saves_copy(shapes) else "core_attention output",
        saves_16_bit=True,
    )
    norms = (_query_key_norm(shapes),) if model.qk_layernorm else ()
    kernel = _core_attention(shapes)
    projection = replace(projection, forward_workspace=(*projection.forward_workspace, *held_by_caller(kernel)))
    parts = (qkv, *norms, kernel, projection)
    children = _with_gate(shapes, parts) if gated else parts
    if model.branch_norms:
        name = "linear_proj.post_layernorm" if model.norms_in_projections else "post_self_attn_layernorm"
        children += (branch_norm(shapes, name, input_made_in="self_attention.linear_proj"),)
    return Module(name=ATTENTION, kind=ModuleKind.ATTENTION, children=children)


def _query_key_norm(shapes: Shapes) -> Module:
    if shapes.model.norm_modules != "unfused":
        return query_key_norm(shapes)
    from analyzer.modules.unfused_norm import gathered_norms

    return gathered_norms(shapes)


def _with_gate(shapes: Shapes, parts: tuple[Module, ...]) -> tuple[Module, ...]:
    """The parts of attention with a gate before the output projection. Its gradient waits for that of the qkv tensor."""
    heads = Heads(shapes)
    waiting = (heads.tensor("gate gradient", heads.query),)
    qkv, *between, projection = parts
    concatenated = (replace(heads.projected(), name="concatenated gradient"), heads.tensor(QKV_GRADIENTS, heads.qkv), *waiting)
    qkv = replace(qkv, backward_workspace=largest(qkv.backward_workspace, concatenated))
    between = [replace(each, backward_workspace=(*each.backward_workspace, *waiting)) for each in between]
    product = _output_gate(shapes, between[-1])
    copied = tuple(each for each in product.saved if each.name == _GATE)  # before the kernel
    between[-1] = replace(between[-1], forward_workspace=(*between[-1].forward_workspace, *copied))
    return (qkv, *between, product, projection)


def _output_gate(shapes: Shapes, kernel: Module) -> Module:
    """The product with the sigmoid of the gate, which is compiled: it saves its inputs (`Attention._apply_output_gate`).

    The reshape of grouped gates copies them. Without groups the gate is a slice of the qkv tensor, which stays allocated. The
    `kernel` before it may save that tensor too.
    """
    heads = Heads(shapes)
    output_shares = "" if projection_saves_copy(shapes) else "core_attention output"
    gate = heads.tensor(_GATE, heads.query, made_in=ATTENTION)
    if not heads.regrouped:
        saved = any(tensor.name == QKV_TENSOR for tensor in kernel.saved)
        gate = replace(heads.saved_projected(), name="qkv with the gate", shares=QKV_TENSOR if saved else "")
    return Module(
        name="output_gate",
        kind=ModuleKind.OUTPUT_GATE,
        function=True,
        saved=(heads.tensor("input", heads.query, shares=output_shares, made_in=_transposed_in(shapes)), gate),
        forward_workspace=(*held_by_caller(kernel), heads.tensor("output", heads.query)),
        backward_workspace=tuple(
            heads.tensor(name, heads.query) for name in ("product gradient", "input gradient", "gate gradient")
        ),
        source="_apply_output_gate",
    )


def _gathered(shapes: Shapes, projection: Module) -> Module:
    """The qkv projection with fewer groups than tensor-parallel ranks: its outputs are gathered along the last dimension.

    Each rank takes the slice of its group. The gradient of the slice is padded to that of the whole tensor, which is
    reduce-scattered (core/tensor_parallel/mappings.py `_AllGatherFromTensorParallelRegion`).
    """
    full = Heads(shapes).projected()
    part = next(tensor for tensor in projection.forward_workspace if tensor.name == "output")
    width = full.shape[-1]
    forward = (part, replace(full, name="outputs of all ranks"), replace(full, name="gathered output"))
    backward = (
        replace(full, name="gradient of the gathered output"),
        replace(full, name="gradients for all ranks"),
        replace(part, name="output gradient"),
    )
    return replace(
        projection,
        forward_workspace=largest(projection.forward_workspace, forward),
        backward_workspace=largest(projection.backward_workspace, backward),
        collectives=(
            *projection.collectives,
            *shapes.tp("all_gather", "forward", width=width),
            *shapes.tp("reduce_scatter", "backward", width=width),
        ),
    )


def _transposed_in(shapes: Shapes) -> str:
    """Path of the module that makes the input of the projection: outside the kernel if Megatron transposes it back to [s, b, h]."""
    if not (shapes.inputs.attention_in_batches and shapes.b > 1):
        return "self_attention.core_attention"
    return ATTENTION if shapes.recompute_core_attention else LAYER


def _core_attention(shapes: Shapes) -> Module:
    """The kernel that the job uses, under a checkpoint with `--recompute-modules core_attn`."""
    unfused = shapes.model.attention_backend == "unfused"
    kernel = unfused_kernel(shapes) if unfused else fused_kernel(shapes)
    if not shapes.recompute_core_attention:
        return kernel
    heads = Heads(shapes)
    output = None if returns_saved_output(shapes) else heads.tensor("output", heads.query)
    copies_gradient = reads_copied_gradient(shapes) if unfused else shapes.split.context > 1 and works_in_batches(shapes)
    return kernel_under_checkpoint(kernel, checkpoint_inputs(shapes), output=output, copies_gradient=copies_gradient)
