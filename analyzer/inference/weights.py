"""Bytes of the weights of a rank, by element type, with quantized linear layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from math import ceil
from typing import Final

from analyzer.inference.kv_cache import SCALES_BYTES_4_BIT
from analyzer.modules.kinds import LINEAR, ModuleKind
from analyzer.modules.tree import Module, Parameter
from analyzer.specs import QuantizationSpec
from analyzer.units import dtype_bytes

_NEVER: Final = frozenset({ModuleKind.ROUTER, ModuleKind.SHARED_GATE, ModuleKind.OUTPUT_LAYER, ModuleKind.WORD_EMBEDDINGS})
_ROW_SCALE_BYTES: Final = 4
"""Bytes of the fp32 scale of a row of an 8-bit weight."""


def is_quantized(module: Module, parameter: Parameter) -> bool:
    """Whether `--info-quantize` quantizes a parameter: matrices of linear layers, and the experts."""
    if len(parameter.shape) < 2 or module.kind in _NEVER:
        return False
    return module.kind in LINEAR or parameter.sharding == "expert"


def bytes_per_element(quantization: QuantizationSpec, *, depth: int) -> float:
    """Bytes of an element of a quantized weight with rows of `depth` elements, with its share of the scales."""
    if quantization.weight_bits == 4:
        return 0.5 + SCALES_BYTES_4_BIT / min(quantization.group_size, depth)
    return 1.0 + _ROW_SCALE_BYTES / depth


def weights_by_type(tree: Module, quantization: QuantizationSpec) -> Mapping[str, int]:
    """Bytes of all weights of a tree, by element type: bf16, fp32, or int4 and int8 with their scales."""
    found: Counter[str] = Counter()
    for module, parameter in _parameters(tree):
        if quantization.weight_bits < 16 and is_quantized(module, parameter):
            each = bytes_per_element(quantization, depth=parameter.shape[-1])
            found[f"int{quantization.weight_bits}"] += ceil(each * parameter.numel)
        else:
            found[parameter.dtype] += dtype_bytes(parameter.dtype, parameter.numel)
    return found


def largest_dequantized(tree: Module, quantization: QuantizationSpec) -> int:
    """Bytes of the largest quantized weight in 16 bit: the copy that the GEMMs of prefill read. Of experts, one expert."""
    if quantization.weight_bits >= 16 or quantization.activation_bits <= quantization.weight_bits:
        return 0
    sizes = [2 * _matrix(parameter) for module, parameter in _parameters(tree) if is_quantized(module, parameter)]
    return max(sizes, default=0)


def _matrix(parameter: Parameter) -> int:
    return parameter.shape[-1] * parameter.shape[-2]


def _parameters(tree: Module) -> Iterator[tuple[Module, Parameter]]:
    for _, module in tree.walk():
        for parameter in module.parameters:
            yield module, parameter
