"""Kernels bound by memory bandwidth: norms, activations, residual adds, embedding and loss.

Bytes are those that an optimal kernel reads and writes, and for operations that PyTorch runs unfused those of each kernel.
Sources: transformer_engine/common/normalization, megatron/core/fusions (0.16.1), transformer_engine/pytorch/cross_entropy.py (TE
2.11).
"""

from __future__ import annotations

from typing import Final

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import Module
from analyzer.specs.distillation import DistillationSpec, Divergence
from analyzer.time.work.context import WorkContext
from analyzer.time.work.kernels import MemoryBound, Work

_LOSS_BYTES: Final = {"te": (6, 4), "native": (22, 10), "unfused": (38, 14)}
"""Bytes moved for each logit in forward and backward.

`te`: reads 16-bit logits twice and writes their gradient. `native`: a cast to fp32 with the maximum, then compiled kernels on fp32
logits. `unfused`: a cast to fp32 (6), maximum (4), subtraction (8), exponential (8), sum (4) and division (8) as separate kernels;
in backward a product (8) and a cast (6). Sources: core/tensor_parallel/cross_entropy.py and core/fusions/fused_cross_entropy.py
(0.16.1).
"""
_DIVERGENCE_BYTES: Final[dict[Divergence, tuple[int, int]]] = {
    "forward": (70, 40),
    "reverse": (82, 70),
    "Jensen-Shannon": (178, 150),
}
"""The same for the operations of `gkd_loss` of ms-swift 4.6 with all logits of the teacher, without those of the size of all tokens
that the backward of each chunk has."""
_LOSS_LAUNCHES: Final = {"te": (8, 3), "native": (14, 6), "unfused": (24, 9)}
"""Kernels in forward and backward: those of the loss of each token, its mask and the mean."""


def norm(elements: int, *, recomputed: bool, vectors: int = 1) -> Work:
    """A norm of `elements` 16-bit elements: reads and writes them; backward reads the input and its gradient, and writes one.

    The gradient of each of the `vectors` that are its parameters is added to the buffer by a kernel of its own.
    """
    forward = MemoryBound("norm", 4.0 * elements)
    again = (forward,) if recomputed else ()
    backward = MemoryBound("norm gradient", 6.0 * elements, launches=1 + vectors)
    return Work((forward,), (*again, backward))


_UNFUSED_NORM: Final = (36.0, 92.0, 8, 17)
"""Bytes of each 16-bit element in forward and backward of the norm of InternViT, and its kernels.

Casts to fp32 and back (6 each), square (8), mean (4), product with the statistic (8) and with the weight (4). In backward the
products with weight and factor (4, 6) and their sum (2), cast (6), the products with statistic and input (8, 12) and the sum (4),
the gradient of the mean (4), the power, its double and the gradient of the square (8, 8, 12), their sum (12) and a cast (6)."""
_GATHERED_NORM: Final = (46.0, 88.0, 12, 18)
"""The same of its norms of queries and keys: also a copy of a slice (4) and a second cast (6). In backward a second cast (6) and
the sum in 16 bit (6) in place of the gradient of the mean and the sum in fp32 (16)."""


def _unfused(facts: tuple[float, float, int, int], elements: int) -> Work:
    forward, backward, launches, gradient_launches = facts
    return Work(
        (MemoryBound("norm", forward * elements, launches=launches),),
        (MemoryBound("norm gradient", backward * elements, launches=gradient_launches),),
    )


def standalone_norm(module: Module, context: WorkContext) -> Work:
    """A norm as a module of its own."""
    shapes = context.shapes
    elements = shapes.s_split * shapes.b * module.parameters[0].numel
    if shapes.model.norm_modules == "unfused":
        return _unfused(_UNFUSED_NORM, elements)
    recomputed = module.kind is not ModuleKind.FINAL_NORM and shapes.recomputes("layernorm")
    return norm(elements, recomputed=recomputed, vectors=len(module.parameters))


def head_norm(module: Module, context: WorkContext) -> Work:
    """A norm of the queries or keys of each head. The copy of its strided input is among those before the attention kernel."""
    shapes, model = context.shapes, context.inputs.model
    heads = model.num_attention_heads if module.kind is ModuleKind.Q_NORM else model.num_query_groups
    elements = shapes.s * shapes.b * max(1, heads // shapes.t) * model.kv_channels
    if model.norm_modules == "unfused":
        return _unfused(_GATHERED_NORM, elements)
    return norm(elements, recomputed=False, vectors=len(module.parameters))


def activation(context: WorkContext, *, rows: int, width: int, in_experts: bool) -> Work:
    """[rows, gates·width] → [rows, width].

    Experts fuse gated activations only (core/transformer/moe/experts.py, 0.16.1). The halves of a gate are clamped by kernels of
    their own, and concatenated again (`weighted_bias_quick_geglu_impl` and `bias_geglu_impl`). Unfused, a gate is an activation (4
    bytes for each element of the output), a sum (4) and a product (6); in backward two products (12), two concatenations of the
    halves (8) and the gradient of the activation (6).
    """
    model, shapes = context.inputs.model, context.shapes
    source = rows * width * (2 if model.gated else 1)
    target = rows * width
    fused = model.bias_activation_fusion and (model.gated or not in_experts)
    if fused:
        clamped = source if model.activation_clamped else 0
        moved, gradient = 2.0 * (source + target) + 8.0 * clamped, 2.0 * (2 * source + target) + 10.0 * clamped
        launches = (3, 9) if clamped else (1, 1)
    else:
        biases = 4.0 * source if model.bias_linear and not in_experts else 0.0
        moved, gradient = (14.0 if model.gated else 4.0) * target + biases, (26.0 if model.gated else 6.0) * target
        launches = (3, 4) if model.gated else (1, 1)
    forward = MemoryBound("activation", moved, launches=launches[0])
    again = (forward,) if in_experts and shapes.recomputes("moe_act") else ()
    return Work((forward,), (*again, MemoryBound("activation gradient", gradient, launches=launches[1])))


def output_gate(context: WorkContext) -> Work:
    """The product of the output of attention with its gate, as one compiled kernel. A reshape of grouped gates copies them."""
    shapes, model = context.shapes, context.inputs.model
    elements = shapes.s * shapes.b * (model.gate_projection_size // shapes.t)
    grouped = model.num_query_groups < model.num_attention_heads
    copied = (MemoryBound("copy of gates", 4.0 * elements),) if grouped else ()
    return Work((*copied, MemoryBound("gate", 6.0 * elements)), (MemoryBound("gate gradient", 10.0 * elements),))


def residual_add(context: WorkContext) -> Work:
    """Bias, dropout and residual add. Without dropout the backward only adds gradients.

    A scaled branch has the sum with the bias (4), dropout (5), a product (4) and the sum with the residual (6). In backward the
    gradients of branch and scale (4, 6), the sum of the latter (2), dropout (5), the sum for the bias (2) and of gradients (6).
    """
    shapes, model = context.shapes, context.inputs.model
    elements = shapes.s_split * shapes.b * model.hidden_size
    dropout = model.hidden_dropout > 0
    if model.layer_scaling:
        masked = 5.0 if dropout else 0.0
        return Work(
            (MemoryBound("residual add", (14.0 + masked) * elements, launches=3 + dropout),),
            (MemoryBound("residual add gradient", (20.0 + masked) * elements, launches=5 + dropout),),
        )
    fused = model.bias_dropout_fusion
    forward = 7.0 if dropout else 6.0
    if not fused:
        forward = (11.0 if dropout else 6.0) + (4.0 if model.bias_linear else 0.0)
    backward = 11.0 if dropout else 6.0
    return Work(
        (MemoryBound("residual add", forward * elements, launches=1 if fused or not dropout else 3),),
        (MemoryBound("residual add gradient", backward * elements, launches=2 if dropout else 1),),
    )


def word_embedding(module: Module, context: WorkContext) -> Work:
    """Rows of the embedding are copied. The backward writes a gradient of the size of the weight, and adds it to the buffer."""
    shapes = context.shapes
    elements = shapes.s * shapes.b * context.inputs.model.hidden_size
    weight = module.parameters[0].numel if module.parameters else 0
    return Work(
        (MemoryBound("embedding", 4.0 * elements),),
        (MemoryBound("embedding gradient", 4.0 * elements + 12.0 * weight, launches=2),),
    )


def divergence(context: WorkContext, spec: DistillationSpec) -> Work:
    """Logits → divergence from the teacher: bytes that the operations of `gkd_loss` read and write.

    The backward of a chunk writes a gradient of all tokens, which is then added to that of the others.
    """
    shapes, model = context.shapes, context.inputs.model
    tokens = shapes.s * shapes.b
    count = float(tokens * (model.padded_vocab_size // shapes.t))
    if spec.framework == "NeMo-RL":
        return _divergence_of_nemo_rl(spec, tokens, count)
    if spec.topk is not None:  # conversion, selection and gather
        backward = (MemoryBound("divergence gradient", 26 * count, launches=80),)
        return Work((MemoryBound("divergence", 14 * count, launches=60),), backward)
    chunks = -(-tokens // 512)
    read, written = _DIVERGENCE_BYTES[spec.divergence]
    return Work(
        (MemoryBound("divergence", read * count, launches=20 * chunks),),
        (MemoryBound("divergence gradient", (written + 16 * chunks) * count, launches=30 * chunks),),
    )


def _divergence_of_nemo_rl(spec: DistillationSpec, tokens: int, count: float) -> Work:
    """The same for `DistillationLossFn` of NeMo-RL. `count`: logits of a rank.

    A conversion (6); in backward zeros (4) and a cast (6). Each packed sequence has a gradient of all logits (4), a copy of its own
    (8), and all but one a sum (12). Probabilities of the whole vocabulary are maxima (4), a difference (8), exponentials (8), sums
    (4) and a difference (8), in backward also exponentials, a negative, a product and a copy (8 each). The entropy has them again,
    exponentials (8), products (12) and sums (4), and in backward a difference (8), products (20), a copy (8) and a sum (12).
    """
    read, written, launches = 6.0, 10.0, 30
    if spec.sequences:
        written += 8 + 4 * spec.sequences + 12 * (spec.sequences - 1)
        launches *= spec.sequences
    if spec.whole_vocabulary:
        entropy = spec.divergence != "forward"
        read, written = read + 32 + 56 * entropy, written + 64 + 104 * entropy
        launches += 20 * -(-tokens // 1024)
    forward = MemoryBound("divergence", read * count, launches=launches)
    return Work((forward,), (MemoryBound("divergence gradient", written * count, launches=launches),))


def cross_entropy(context: WorkContext) -> Work:
    """Logits → loss."""
    if context.inputs.model.distillation is not None:
        return divergence(context, context.inputs.model.distillation)
    shapes, model = context.shapes, context.inputs.model
    count = shapes.s * shapes.b * (model.padded_vocab_size // shapes.t)
    forward, backward = _LOSS_BYTES[model.cross_entropy]
    launches = _LOSS_LAUNCHES[model.cross_entropy]
    return Work(
        (MemoryBound("cross entropy", float(forward * count), launches=launches[0]),),
        (MemoryBound("cross entropy gradient", float(backward * count), launches=launches[1]),),
    )
