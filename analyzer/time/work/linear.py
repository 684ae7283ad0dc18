"""Linear layers: the GEMMs of forward, data gradient and weight gradient, with the casts of quantized layers.

Sources: transformer_engine/pytorch/module/{linear,layernorm_linear,grouped_linear}.py (TE 2.11).
"""

from __future__ import annotations

from typing import Final

from analyzer.modules.kinds import ModuleKind, Parallel
from analyzer.modules.moe.experts import GROUPED_LINEAR
from analyzer.modules.tree import Module, Parameter
from analyzer.specs.precision import ONE_SCALE
from analyzer.time.work.context import WorkContext
from analyzer.time.work.elementwise import norm
from analyzer.time.work.kernels import Gemm, Kernel, MemoryBound, Precision, Work
from analyzer.units import DTYPE_BYTES

CAST_BYTES: Final = {"delayed": 4.0, "tensorwise": 6.0, "blockwise": 5.0, "mxfp8": 4.2, "nvfp4": 6.0}
"""Bytes moved to quantize an element of a 16-bit tensor: it is read, and written in two layouts (for the two GEMMs that use it).

`tensorwise` and `nvfp4` read it twice, because the scale of the tensor is computed first; `mxfp8` has a scale for 32 elements.
"""
SCATTERED_PARTS: Final = 4
"""Parts of a GEMM whose output is reduce-scattered meanwhile (`num_splits` of the method "pipeline")."""


def gathers_outside_userbuffers(module: Module, *, without_gradients: bool) -> bool:
    """Whether a forward gathers its input before its GEMM, and not in userbuffers, because gradients are disabled.

    This applies to layers with a fused norm (`ub_overlap_ag_fprop` in transformer_engine/pytorch/module/layernorm_linear.py).
    """
    return without_gradients and any(each.name == "layer_norm_weight" for each in module.parameters)


def own_weight(module: Module) -> Parameter | None:
    """The weight of a linear layer: a matrix, or one matrix for each local expert. None if it has no weight of its own."""
    return next((each for each in module.parameters if each.name == "weight" and len(each.shape) >= 2), None)


def weight_of(module: Module) -> Parameter:
    """The weight of a linear layer that has one."""
    weight = own_weight(module)
    assert weight is not None, f"{module.name} has a weight"
    return weight


def linear(module: Module, context: WorkContext) -> Work:
    """A dense linear layer, with the norm that is fused in.

    A layer that is not split over tensor-parallel ranks (`TELinear`) works on their tokens of the residual stream.
    """
    weight, shapes, parallel = weight_of(module), context.shapes, module.kind.facts.parallel
    rows = (shapes.s_split if parallel is Parallel.NONE else shapes.s) * shapes.b
    n, k = weight.shape
    vectors = sum(each.name.startswith("layer_norm_") for each in module.parameters)
    rewinds = module.kind in (ModuleKind.Q_PROJECTION, ModuleKind.Q_UP, ModuleKind.KV_UP) and shapes.recomputes("mla_up_proj")
    work = gemms(context, rows=rows, n=n, k=k, precision=context.quantized if weight.quantized else context.precision)
    if context.chunks > 1 and module.overlaps_collectives:
        work = _in_chunks(work, context.chunks, summed=parallel is Parallel.ROW)
    work = joined(Work((), _transposes(module, context)), work)
    if vectors:
        work = joined(norm(shapes.s_split * shapes.b * k, recomputed=False, vectors=vectors), work)
        work = _fused_quantization(work, context, rows * k) if weight.quantized else work
    if any(each.name == "bias" for each in module.parameters):
        summed = (shapes.s if module.kind is ModuleKind.FC1 else shapes.s_split) * shapes.b
        # a bias that a later kernel adds (`skip_bias_add`) has a gradient that sums over tokens; in a GEMM it is summed there
        later = parallel is Parallel.ROW or module.kind is ModuleKind.FC1
        read = 2.0 * summed * n if later else 0.0
        work = joined(Work((), (MemoryBound("bias gradient", read, launches=2),)), work)
    return repeated(work) if rewinds else work


def _in_chunks(work: Work, chunks: int, *, summed: bool) -> Work:
    """The work of a layer whose GEMMs overlap with the exchange of its input or output.

    A GEMM whose input is gathered is split by rows, one part for each rank: the forward of layers with a split output, and the data
    gradient of those whose output is `summed`. The forward of the latter is split by columns into a fixed number of parts. The
    others overlap as a whole. The parts run on several streams, so that one part fills the multiprocessors that another leaves.
    Source: the default methods of `initialize_ub` (transformer_engine/pytorch/module/base.py),
    `CommOverlapP2PBase::split_overlap_ag` and `CommOverlapBase::split_overlap_rs` (TE 2.11).
    """

    def split(kernels: tuple[Kernel, ...], name: str, *, columns: bool = False) -> tuple[Kernel, ...]:
        found: list[Kernel] = []
        for each in kernels:
            if not isinstance(each, Gemm) or each.name != name:
                found.append(each)
            elif columns:
                found.append(each._replace(n=max(1, each.n // SCATTERED_PARTS), batch=SCATTERED_PARTS, launches=SCATTERED_PARTS))
            else:
                found.append(each._replace(m=max(1, each.m // chunks), batch=chunks, launches=chunks))
        return tuple(found)

    return work._replace(
        forward=split(work.forward, "forward", columns=summed),
        backward=split(work.backward, "data gradient") if summed else work.backward,
    )


def gemms(context: WorkContext, *, rows: int, n: int, k: int, precision: Precision, adds: bool = True) -> Work:
    """[rows, k] → [rows, n] by a weight [n, k]. `adds`: its gradient is added to the gradient buffer by itself."""
    out = context.element_bytes
    return Work(
        forward=(
            *_casts(context, rows * k, precision),
            Gemm("forward", rows, n, k, precision, output_bytes=out),
        ),
        backward=(
            *_casts(context, rows * n, precision),
            Gemm("data gradient", rows, k, n, precision, output_bytes=out),
            Gemm("weight gradient", n, k, rows, precision, output_bytes=context.accumulated_bytes, depth_is_tokens=True),
            *(_additions(context, n * k) if adds else ()),
        ),
    )


def _additions(context: WorkContext, elements: int, *, tensors: int = 1) -> tuple[MemoryBound, ...]:
    """The weight gradients of so many tensors are added to the gradient buffer by kernels of their own."""
    if context.inputs.gradient_accumulation_fusion:
        return ()
    moved = (context.element_bytes + 2 * DTYPE_BYTES[context.gradients]) * elements * tensors
    return (MemoryBound("weight gradient", moved, launches=tensors),)


def _transposes(module: Module, context: WorkContext) -> tuple[MemoryBound, ...]:
    """A data gradient transposes each weight in FP8 of which no transpose is kept. Grouped linear layers keep them."""
    weight = weight_of(module)
    if not weight.quantized or not context.frees_transposes or module.source == GROUPED_LINEAR:
        return ()
    return (MemoryBound("transposed weight", 2.0 * weight.numel, "cast", launches=local_experts(weight)),)


def local_experts(weight: Parameter) -> int:
    """The matrices of a weight: one, or one for each local expert."""
    return weight.pieces if len(weight.shape) == 2 else weight.shape[0]


def grouped_linear(module: Module, context: WorkContext, *, rows: int) -> Work:
    """The same linear layer of every local expert. `rows`: tokens of all of them.

    The host issues operations for each expert, also if a grouped GEMM multiplies them together (`GroupedLinear`, TE 2.11).
    """
    weight = weight_of(module)
    n, k = weight.shape[-2:]
    experts = local_experts(weight)
    precision = context.quantized if weight.quantized else context.precision
    each = max(1, rows // experts)
    out = context.element_bytes

    def gemm(name: str, m: int, width: int, depth: int, *, of_weight: bool = False) -> Gemm:
        moved = context.accumulated_bytes if of_weight else out
        found = Gemm(name, m, width, depth, precision, experts, grouped=True, output_bytes=moved, depth_is_tokens=of_weight)
        return found._replace(launches=experts)

    return Work(
        forward=(*_casts(context, rows * k, precision, tensors=experts), gemm("forward", each, n, k)),
        backward=(
            *_transposes(module, context),
            *_casts(context, rows * n, precision, tensors=experts),
            gemm("data gradient", each, k, n),
            gemm("weight gradient", n, k, each, of_weight=True),
            *_additions(context, n * k, tensors=experts),
        ),
    )


def quantized_weight_bytes(module: Module, context: WorkContext) -> float:
    """Bytes moved to quantize the weights of a module, once for each iteration."""
    fp8 = context.inputs.fp8
    if fp8 is None:
        return 0.0
    return cast_bytes(context) * sum(each.numel for each in module.parameters if each.quantized)


def joined(*works: Work) -> Work:
    """The work of functions that run one after the other; their backwards run in reverse order."""
    return Work(
        forward=tuple(kernel for each in works for kernel in each.forward),
        backward=tuple(kernel for each in reversed(works) for kernel in each.backward),
        synchronizes=any(each.synchronizes for each in works),
    )


def repeated(work: Work) -> Work:
    """The work of a module whose forward is recomputed in its backward."""
    return work._replace(backward=(*work.forward, *work.backward))


def _fused_quantization(work: Work, context: WorkContext, elements: int) -> Work:
    """The kernel of the norm writes the quantized tensor, if its scale is known before: not with per-tensor current scaling.

    Sequence parallelism gathers the quantized tensor. Source: `apply_normalization` (TE 2.11).
    """
    fp8 = context.inputs.fp8
    if fp8 is None or fp8.recipe not in ("delayed", "mxfp8") or context.shapes.sp:
        return work
    saved = 4.0 * elements  # the 16-bit output is neither written nor read
    kernels = list(work.forward)
    place = next(i for i, each in enumerate(kernels) if each.name == "quantization")
    cast = kernels[place]
    assert isinstance(cast, MemoryBound)
    kernels[place] = cast._replace(bytes=max(0.0, cast.bytes - saved))
    return work._replace(forward=tuple(kernels))


def _casts(context: WorkContext, elements: int, precision: Precision, *, tensors: int = 1) -> tuple[MemoryBound, ...]:
    fp8 = context.inputs.fp8
    if fp8 is None or precision not in ("8", "4"):
        return ()
    return (MemoryBound("quantization", cast_bytes(context) * elements, "cast", launches=tensors),)


def cast_bytes(context: WorkContext) -> float:
    """Bytes moved to quantize an element.

    GPUs before Blackwell multiply factors in one layout only, so that per-tensor recipes also write a transposed copy
    (`is_non_tn_fp8_gemm_supported` of transformer_engine/pytorch/utils.py, TE 2.11).
    """
    fp8 = context.inputs.fp8
    if fp8 is None:
        return 0.0
    one_layout = context.any_layout and fp8.recipe in ONE_SCALE
    return CAST_BYTES[fp8.recipe] - (1.0 if one_layout else 0.0)
