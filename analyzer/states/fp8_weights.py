"""FP8 copies of weights, and the scaling factors that Transformer Engine stores for each layer.

A 16-bit weight is cast in the first microbatch of an iteration, and the copies are never freed
(`TransformerEngineBaseModule.get_weight_workspace`; Megatron's layers pass `is_first_microbatch`). A weight
that is stored in FP8 (`--fp8-param-gather`) has its row-wise data in the parameter buffer. Column-wise data is allocated
separately; for mxfp8 both are.

Sources (TE 2.11): pytorch/module/base.py, pytorch/quantization.py *RecipeState; DotProductAttention.forward in
pytorch/attention/dot_product_attention/dot_product_attention.py, which has quantizers but does not use them;
megatron/core/distributed/param_and_grad_buffer.py `_ParamAndGradBuffer` (0.16.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Final

from analyzer.modules.embedding import vocabulary_weight
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.moe.experts import GROUPED_LINEAR
from analyzer.modules.quantized import Axis, element, reads_one_copy, scales
from analyzer.modules.tree import Module, Parameter, parameters
from analyzer.specs import Fp8Recipe, TrainingJob
from analyzer.specs.precision import ONE_SCALE
from analyzer.states.buffers.parameter_order import sum_of_parameters
from analyzer.units import BLOCK, DTYPE_BYTES, dtype_bytes, round_up

if TYPE_CHECKING:
    from analyzer.modules.shapes import Shapes

FORWARD_QUANTIZERS: Final = 3
"""Quantizers of the input, weight and output of one GEMM."""
BACKWARD_QUANTIZERS: Final = 2
"""Quantizers of the output gradient and input gradient of one GEMM."""
ATTENTION_GEMMS: Final = 3
"""GEMMs that Transformer Engine's attention kernel has quantizers for, even if it runs in 16 bit."""


Counted = Sequence[tuple[Module, int]]
"""Modules with their number."""


def cast_bytes(job: TrainingJob, modules: Counted) -> int:
    """Bytes of the FP8 copies of weights that are stored in 16 bit.

    Without `keeps_transposes` one weight at a time has a copy along its columns. The largest one is counted, as if it were kept.
    Experts of a grouped linear layer keep theirs, as `_GroupedLinear` of Transformer Engine has no such option.
    """
    fp8 = job.precision.fp8
    if fp8 is None or fp8.stored_parameters:
        return 0
    axes = _axes(job, fp8.recipe)
    total = sum(times * module.derived(_copies, fp8.recipe, axes) for module, times in modules)
    if fp8.keeps_transposes or not transposes(job):
        return total
    freed = sum(times * module.derived(_freed_transposes, fp8.recipe) for module, times in modules)
    return total - freed + max((module.derived(_largest_transpose, fp8.recipe) for module, _ in modules), default=0)


def output_layer_bytes(shapes: Shapes) -> int:
    """Bytes of the FP8 copies of the output layer's weight, which is stored in 16 bit; 0 if its GEMMs are not quantized."""
    if shapes.fp8 is None or not shapes.quantizes_output_layer:
        return 0
    weight = replace(vocabulary_weight(shapes, shared=False), quantized=True)
    return _copy_bytes(weight, shapes.fp8.recipe, ("row", "column"))


def outside_buffer_bytes(job: TrainingJob, modules: Counted) -> int:
    """Bytes of stored FP8 weights outside the parameter buffer: column-wise copies and scales; for mxfp8 all copies.

    mxfp8 weights are gathered through the gradient buffer. Up to 0.16 parameters in 16 bit then keep their original allocations in
    addition to their parameter buffer (`reuse_grad_buf_for_mxfp8_param_ag`).
    """
    fp8 = job.precision.fp8
    if fp8 is None or not fp8.stored_parameters:
        return 0
    axes = _axes(job, fp8.recipe)
    total = sum(times * module.derived(_copies, fp8.recipe, axes) for module, times in modules)
    if fp8.recipe == "mxfp8":
        if not job.core.keeps_16_bit_parameters:
            return total
        return total + sum(times * module.derived(_separate_bytes) for module, times in modules)
    return total - sum(times * module.derived(_stored_bytes, fp8.recipe) for module, times in modules)


def separate_bytes(job: TrainingJob, trees: Sequence[Module]) -> int:
    """Bytes of stored FP8 weights that are in no buffer: rows, columns if the GPU needs them, and scales."""
    fp8 = job.precision.fp8
    if fp8 is None or not fp8.stored_parameters:
        return 0
    axes = _axes(job, fp8.recipe)
    return sum(tree.derived(_copies, fp8.recipe, axes) for tree in trees)


def transposes(job: TrainingJob) -> bool:
    """Whether weights with one scale need a transposed copy."""
    fp8 = job.precision.fp8
    return fp8 is not None and fp8.recipe in ONE_SCALE and not reads_one_copy(fp8.recipe, job.hardware.compute_capability)


def kept_transposes_bytes(job: TrainingJob, modules: Counted) -> int:
    """Bytes of the column-wise copies of stored weights with Megatron-FSDP, which frees them only if it shards parameters.

    `_register_fsdp_hooks` (megatron/core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py, 0.16.1).
    """
    fp8, fsdp = job.precision.fp8, job.fsdp
    if fp8 is None or not fp8.stored_parameters or fsdp is None or fsdp.strategy == "optim_grads_params":
        return 0
    if not transposes(job):
        return 0
    return sum(times * module.derived(_stored_bytes, fp8.recipe) for module, times in modules)


def in_buffer_bytes(job: TrainingJob, modules: Counted) -> int:
    """Bytes of the parameters in the parameter buffers, without padding, of a job that stores weights in FP8."""
    fp8 = job.precision.fp8
    if fp8 is None or not fp8.stored_parameters:
        raise ValueError("weights are not stored in FP8")
    bits = {"mxfp8": 0, "nvfp4": 4}.get(fp8.recipe, 8)
    return sum(times * module.derived(_buffered_bytes, bits) for module, times in modules)


def scaling_bytes(job: TrainingJob, modules: Counted) -> int:
    """Bytes of the scaling factors and amax values of all quantizers, for recipes with one scale per tensor.

    Those with current scaling (tensorwise) depend on the version (`EngineBehavior.tensorwise_scales`).
    """
    fp8 = job.precision.fp8
    if fp8 is None or fp8.recipe not in ONE_SCALE or (fp8.recipe == "tensorwise" and not job.engine.tensorwise_scales):
        return 0
    history = None if fp8.recipe == "tensorwise" else fp8.amax_history_len
    return sum(times * module.derived(_scales_bytes, history) for module, times in modules)


def quantized_gemms(trees: Sequence[Module]) -> int:
    """Number of GEMMs with quantizers."""
    return sum(sum(tree.derived(_gemms)) for tree in trees)


def _copies(module: Module, recipe: Fp8Recipe, axes: tuple[Axis, ...]) -> int:
    return _sum_of_quantized(module, lambda parameter: _copy_bytes(parameter, recipe, axes))


def _freed_transposes(module: Module, recipe: Fp8Recipe) -> int:
    own = sum(_data_bytes(each, recipe) for each in _freed(module))
    return own + sum(child.derived(_freed_transposes, recipe) for child in module.children)


def _largest_transpose(module: Module, recipe: Fp8Recipe) -> int:
    freed = (each for _, part in module.walk() for each in _freed(part))
    return max((_data_bytes(each, recipe) // matrices(each)[0] for each in freed), default=0)


def _freed(module: Module) -> Iterator[Parameter]:
    """The weights of a module whose transposes Transformer Engine can free, without those of its children."""
    return (each for each in module.parameters if each.quantized and module.source != GROUPED_LINEAR)


def _stored_bytes(module: Module, recipe: Fp8Recipe) -> int:
    return _sum_of_quantized(module, lambda parameter: _data_bytes(parameter, recipe))


def _sum_of_quantized(module: Module, size: Callable[[Parameter], int]) -> int:
    return sum_of_parameters(module, lambda parameter: size(parameter) if parameter.quantized else 0)


def _separate_bytes(module: Module) -> int:
    """Bytes of the trained parameters in 16 bit, each in an allocation of its own."""

    def size(parameter: Parameter) -> int:
        return 0 if parameter.quantized or parameter.frozen else round_up(dtype_bytes(parameter.dtype, parameter.numel), BLOCK)

    return sum_of_parameters(module, size)


def _buffered_bytes(module: Module, bits: int) -> int:
    """Bytes of the parameters in their buffers. `bits`: those of an element of a quantized weight."""
    return sum_of_parameters(
        module,
        lambda each: each.numel * bits // 8 if each.quantized else each.numel * int(DTYPE_BYTES[each.dtype]),
    )


def _scales_bytes(module: Module, history: int | None) -> int:
    """Bytes of scales and amax values. `history`: the number of amax values of a quantizer; None for separate allocations."""
    gemms = module.derived(_gemms)
    if history is None:  # one scale and one amax per quantizer
        return sum(gemms) * (FORWARD_QUANTIZERS + BACKWARD_QUANTIZERS) * 2 * BLOCK
    return sum(
        round_up(4 * count * quantizers, BLOCK) + round_up(4 * count * quantizers * history, BLOCK)
        for count in gemms
        for quantizers in (FORWARD_QUANTIZERS, BACKWARD_QUANTIZERS)
    )


def _gemms(module: Module) -> tuple[int, ...]:
    """GEMMs of each module with scaling factors: linear layers, grouped linear layers, and attention between linear layers.

    Experts that run sequentially are separate linear layers.
    """
    kernels = (ModuleKind.ATTENTION_KERNEL, ModuleKind.ATTENTION_KERNEL_CHECKPOINT)  # linear attention has neither
    attends = module.kind is ModuleKind.ATTENTION and any(child.kind in kernels for child in module.children)
    attention = attends and any(parameter.quantized for parameter in parameters(module))
    counts = (matrices(parameter)[0] for parameter in module.parameters if parameter.quantized)
    own = tuple(each for count in counts for each in ((count,) if module.source == GROUPED_LINEAR else (1,) * count))
    return (
        *own,
        *((ATTENTION_GEMMS,) if attention else ()),
        *(count for child in module.children for count in child.derived(_gemms)),
    )


def quantized(trees: Sequence[Module]) -> Iterator[Parameter]:
    """Parameters that are used in FP8 GEMMs."""
    return (parameter for tree in trees for parameter in parameters(tree) if parameter.quantized)


def _axes(job: TrainingJob, recipe: Fp8Recipe) -> tuple[Axis, ...]:
    return ("row",) if reads_one_copy(recipe, job.hardware.compute_capability) else ("row", "column")


def matrices(parameter: Parameter) -> tuple[int, int, int]:
    """(matrices, rows, columns). The weight of experts is one matrix per local expert."""
    *count, rows, columns = parameter.shape
    return prod(count), rows, columns


def _data_bytes(parameter: Parameter, recipe: Fp8Recipe) -> int:
    """Bytes of one copy without its scales."""
    count, rows, columns = matrices(parameter)
    return count * round_up(dtype_bytes(element(recipe), rows * columns), BLOCK)


def _copy_bytes(parameter: Parameter, recipe: Fp8Recipe, axes: tuple[Axis, ...]) -> int:
    """Bytes of the copies along `axes`, with scales and, in FP4, amax values. With one scale per tensor the copies share it."""
    count, rows, columns = matrices(parameter)
    total = len(axes) * _data_bytes(parameter, recipe)
    for axis in axes[:1] if recipe in ONE_SCALE else axes:
        shape, dtype = scales(recipe, rows, columns, axis, square_blocks=True)
        total += count * round_up(dtype_bytes(dtype, prod(shape)), BLOCK)
    if recipe == "nvfp4":
        total += count * len(axes) * BLOCK
    return total
