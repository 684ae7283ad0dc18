"""FP8 copies of weights, and the scaling factors that Transformer Engine keeps for each layer.

A weight in 16 bit is cast in the first microbatch of an iteration, and the copies stay for good
(`TransformerEngineBaseModule.get_weight_workspace`; Megatron's layers pass `is_first_microbatch`). A stored one
(`--fp8-param-gather`) lies in the parameter buffer by rows; what is needed by columns lies beside it, and of mxfp8 both.

Sources (TE 2.11): pytorch/module/base.py, pytorch/quantization.py *RecipeState; DotProductAttention.forward in
pytorch/attention/dot_product_attention/dot_product_attention.py, which has quantizers though it does not use them;
megatron/core/distributed/param_and_grad_buffer.py `_ParamAndGradBuffer` (0.16.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Final

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.quantized import ONE_SCALE, Axis, element, reads_any_layout, scales
from analyzer.modules.tree import Module, Parameter, parameters
from analyzer.specs import Fp8Recipe, TrainingJob
from analyzer.units import BLOCK, dtype_bytes, round_up

FORWARD_QUANTIZERS: Final = 3
"""Of input, weight and output of one product."""
BACKWARD_QUANTIZERS: Final = 2
"""Of the gradients of output and input."""
ATTENTION_PRODUCTS: Final = 3
"""Products that Transformer Engine's attention kernel has quantizers for, also where it runs in 16 bit."""


def cast_bytes(job: TrainingJob, trees: Sequence[Module]) -> int:
    """Copies of the weights that are not stored in FP8."""
    fp8 = job.precision.fp8
    if fp8 is None or fp8.stored_parameters:
        return 0
    axes = _axes(job, fp8.recipe)
    return sum(_copy_bytes(parameter, fp8.recipe, axes) for parameter in quantized(trees))


def beside_the_buffer_bytes(job: TrainingJob, trees: Sequence[Module]) -> int:
    """What stored FP8 weights need outside the parameter buffer: copies by columns and scales; of mxfp8 all.

    The buffer that mxfp8 weights are gathered through is the gradient buffer, and parameters in 16 bit then stay where
    they were made, beside a parameter buffer of their own (`reuse_grad_buf_for_mxfp8_param_ag`).
    """
    fp8 = job.precision.fp8
    if fp8 is None or not fp8.stored_parameters:
        return 0
    axes = _axes(job, fp8.recipe)
    every = sum(_copy_bytes(parameter, fp8.recipe, axes) for parameter in quantized(trees))
    if fp8.recipe == "mxfp8":
        others = (parameter for tree in trees for parameter in parameters(tree) if not parameter.quantized)
        return every + sum(round_up(dtype_bytes(parameter.dtype, parameter.numel), BLOCK) for parameter in others)
    return every - sum(_data_bytes(parameter, fp8.recipe) for parameter in quantized(trees))


def scaling_bytes(job: TrainingJob, trees: Sequence[Module]) -> int:
    """Scaling factors and largest values of the quantizers of all layers: of recipes with one scale for a tensor."""
    fp8 = job.precision.fp8
    if fp8 is None or fp8.recipe not in ONE_SCALE:
        return 0
    products = list(_products(trees))
    if fp8.recipe == "tensorwise":  # a scale and a largest value for each quantizer, in blocks of their own
        return sum(products) * (FORWARD_QUANTIZERS + BACKWARD_QUANTIZERS) * 2 * BLOCK
    return sum(
        round_up(4 * count * quantizers, BLOCK) + round_up(4 * count * quantizers * fp8.amax_history_len, BLOCK)
        for count in products
        for quantizers in (FORWARD_QUANTIZERS, BACKWARD_QUANTIZERS)
    )


def quantized_products(trees: Sequence[Module]) -> int:
    """Products that have quantizers of their own."""
    return sum(_products(trees))


def _products(trees: Sequence[Module]) -> Iterator[int]:
    """Products of each module that keeps scaling factors: linear layers, grouped ones, and attention between such."""
    for parameter in quantized(trees):
        yield matrices(parameter)[0]
    for tree in trees:
        for _, module in tree.walk():
            if module.kind is ModuleKind.ATTENTION and any(parameter.quantized for parameter in parameters(module)):
                yield ATTENTION_PRODUCTS


def quantized(trees: Sequence[Module]) -> Iterator[Parameter]:
    return (parameter for tree in trees for parameter in parameters(tree) if parameter.quantized)


def _axes(job: TrainingJob, recipe: Fp8Recipe) -> tuple[Axis, ...]:
    return ("row",) if recipe in ONE_SCALE and reads_any_layout(job.hardware.compute_capability) else ("row", "column")


def matrices(parameter: Parameter) -> tuple[int, int, int]:
    """(matrices, rows, columns): experts' weights are as many matrices as there are local experts."""
    *count, rows, columns = parameter.shape
    return prod(count), rows, columns


def _data_bytes(parameter: Parameter, recipe: Fp8Recipe) -> int:
    """One copy without its scales."""
    count, rows, columns = matrices(parameter)
    return count * round_up(dtype_bytes(element(recipe), rows * columns), BLOCK)


def _copy_bytes(parameter: Parameter, recipe: Fp8Recipe, axes: tuple[Axis, ...]) -> int:
    """The copies in these ways, with their scales; copies of one scale share it."""
    count, rows, columns = matrices(parameter)
    total = len(axes) * _data_bytes(parameter, recipe)
    for axis in axes[:1] if recipe in ONE_SCALE else axes:
        shape, dtype = scales(recipe, rows, columns, axis, square_blocks=True)
        total += count * round_up(dtype_bytes(dtype, prod(shape)), BLOCK)
    return total
