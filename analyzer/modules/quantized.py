"""Tensors that the three GEMMs of a linear layer read and save: 16-bit tensors, or FP8 or FP4 copies with their scales.

Each GEMM reads its operands along the reduced dimension. The forward GEMM reads the input row-wise, the input-gradient
GEMM reads the output gradient row-wise, and the weight-gradient GEMM reads both column-wise. This takes up to two copies
of one byte per element. Recipes with one scale per tensor (`tensorwise`, `delayed`) need the column-wise copy, a
transpose, only if the GPU supports a single FP8 operand layout. Recipes with block scales (`blockwise` with 128 elements,
`mxfp8` with 32) always need it, because the blocks differ.

Sources (Transformer Engine 2.11): pytorch/module/{linear,layernorm_linear,grouped_linear,base}.py;
pytorch/csrc/quantizer.cpp create_tensor; pytorch/tensor/*_tensor.py get_scale_shape, make_empty;
pytorch/distributed.py gather_along_first_dim; pytorch/utils.py is_non_tn_fp8_gemm_supported.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import prod
from typing import Final, Literal

from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import Collective, Phase, Tensor
from analyzer.specs import Fp8Recipe
from analyzer.specs.precision import ONE_SCALE
from analyzer.units import ceil_div, dtype_bytes, round_up

Axis = Literal["row", "column"]

_AXES: Final[tuple[Axis, ...]] = ("row", "column")
_HOPPER: Final = (9, 0)
_COPY_NAME: Final = re.compile(r" in fp[48]\b")
"""In the names of copies and of their scales (`_copy`)."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """Rows that are quantized separately for each expert."""

    experts: int = 1
    padded_to: int = 1
    """The rows of each expert are a multiple of this. The mean can be halfway between two multiples."""
    in_one_buffer: bool = False
    """Quantized by `split_quantize` (csrc/extensions/cast.cpp): block-scaled data and scales of all experts in one buffer."""


_UNSPLIT: Final = Split()


def reads_any_layout(compute_capability: tuple[int, int] | None) -> bool:
    """Whether the GPU's FP8 GEMMs support all operand layouts, as data-center Blackwell does. Hopper if no GPU is given."""
    capability = compute_capability or _HOPPER
    return (10, 0) <= capability < (12, 0) or capability >= (13, 0)


def is_quantized_copy(tensor: Tensor) -> bool:
    """Whether a tensor is a quantized copy of another one, or the scales of one."""
    return bool(_COPY_NAME.search(tensor.name))


def is_of_columns(tensor: Tensor) -> bool:
    """Whether a tensor is a column-wise quantized copy, or the scales of one."""
    return is_quantized_copy(tensor) and "column-wise" in tensor.name


def reads_one_copy(recipe: Fp8Recipe, compute_capability: tuple[int, int] | None) -> bool:
    """Whether one FP8 copy of a matrix serves row-wise and column-wise reads."""
    return recipe in ONE_SCALE and reads_any_layout(compute_capability)


def copies(shapes: Shapes) -> int:
    """Number of FP8 copies that serve row-wise and column-wise reads."""
    assert shapes.fp8 is not None
    return 1 if reads_one_copy(shapes.fp8.recipe, shapes.inputs.compute_capability) else 2


def saves_original_input(shapes: Shapes) -> bool:
    """Whether a layer can save its 16-bit input, which another module saves anyway, and quantize it again in backward.

    Megatron requests this (`set_save_original_input`) for the attention output projection, for fc1 of the shared experts,
    and if the input is recomputed. The delayed recipe and releases before core 0.14 do not support it.
    """
    return shapes.fp8 is None or (shapes.fp8.recipe != "delayed" and shapes.inputs.core.saves_original_input)


def scales(recipe: Fp8Recipe, rows: int, columns: int, axis: Axis, *, square_blocks: bool = False) -> tuple[tuple[int, ...], str]:
    """Shape and element type of the scales of one copy of [rows, columns]. Weights use `square_blocks`."""
    if recipe in ONE_SCALE:
        return (1,), "fp32"
    if recipe == "blockwise":
        along, across = (columns, rows) if axis == "row" else (rows, columns)
        if square_blocks:
            return (ceil_div(across, 128), round_up(ceil_div(along, 128), 4)), "fp32"
        return (ceil_div(along, 128), round_up(across, 4)), "fp32"
    if recipe == "nvfp4":  # the column-wise copy is a transpose
        across, along = (rows, columns) if axis == "row" else (columns, rows)
        return (round_up(across, 128), round_up(ceil_div(along, 16), 4)), "uint8"
    if axis == "row":
        return (round_up(rows, 128), round_up(ceil_div(columns, 32), 4)), "uint8"
    return (round_up(ceil_div(rows, 32), 4), round_up(columns, 128)), "uint8"


def element(recipe: Fp8Recipe) -> str:
    """Element type of quantized copies."""
    return "fp4" if recipe == "nvfp4" else "fp8"


def align_size(recipe: Fp8Recipe, *, fp4: int = 128) -> int:
    """The rows of each expert are padded to a multiple of this (core/fp8_utils.py, fp4_utils.py get_fp4_align_size, 0.16.1).

    `fp4` is the multiple with NVFP4. Transformer Engine and Megatron-LM can have different ones.
    """
    return {"mxfp8": 32, "nvfp4": fp4}.get(recipe, 16)


def _copy(shapes: Shapes, tensor: Tensor, axis: Axis, split: Split = _UNSPLIT) -> tuple[Tensor, ...]:
    """One quantized copy of a tensor, and its scales."""
    assert shapes.fp8 is not None
    recipe, experts = shapes.fp8.recipe, split.experts
    kind = element(recipe)
    name = f"{tensor.name} in {kind}" + (", column-wise" if axis == "column" else "")
    rows = prod(tensor.shape[:-1]) // experts
    shape, dtype = scales(recipe, rows, tensor.shape[-1], axis)
    scale_count = experts * prod(shape)
    if rows % split.padded_to and experts % 2 == 0:  # half of the experts have the next lower multiple, half the next higher
        lower = rows // split.padded_to * split.padded_to
        both = (scales(recipe, each, tensor.shape[-1], axis) for each in (lower, lower + split.padded_to))
        scale_count = experts // 2 * sum(prod(each) for each, _ in both)
    formula = tensor.formula.replace("2·", "", 1) if tensor.formula.startswith("2·") else tensor.formula
    if split.in_one_buffer and recipe not in ONE_SCALE:
        amax = 16 * experts if recipe == "nvfp4" else 0  # one value each, aligned
        size = dtype_bytes(kind, prod(tensor.shape)) + dtype_bytes(dtype, scale_count) + amax
        return (Tensor(name=f"{name}, with scales", shape=(size,), dtype="uint8", formula=f"{formula}, {recipe} scaling"),)
    if experts > 1:
        shape = (scale_count,)
    return (
        Tensor(name=name, shape=tensor.shape, dtype=kind, formula=formula if kind == "fp8" else f"{formula}/2", pieces=experts),
        Tensor(name=f"scales of {name}", shape=shape, dtype=dtype, formula=f"{recipe} scaling", pieces=experts),
    )


def _both(shapes: Shapes, tensor: Tensor, split: Split = _UNSPLIT) -> tuple[Tensor, ...]:
    """The copies that the GEMMs of this GPU need."""
    by_columns = _copy(shapes, tensor, "column", split) if copies(shapes) == 2 else ()
    return (*_copy(shapes, tensor, "row", split), *by_columns)


def _in_userbuffers(shapes: Shapes, full: Tensor, axis: Axis) -> tuple[Tensor, ...]:
    """What PyTorch allocates for a copy that is gathered in a userbuffer: block scales (`fill_userbuffers_buffer_for_all_gather`).

    Rows with one scale are transposed into a new tensor where a GEMM needs columns.
    """
    copied = _copy(shapes, full, axis)
    assert shapes.fp8 is not None
    if shapes.fp8.recipe not in ONE_SCALE:
        return copied[1:]
    return copied if axis == "column" and copies(shapes) == 2 else ()


def saved_input(
    shapes: Shapes, tensor: Tensor, *, gathered: bool = False, normed: bool = False, split: Split = _UNSPLIT
) -> tuple[Tensor, ...]:
    """What a layer saves of its input for the weight gradient: in FP8 one copy, of the shard if the input is `gathered`.

    A shard with one scale per tensor is saved row-wise, because only rows can be gathered. Of a shard in NVFP4 both copies stay if
    the norm is fused (`normed`; `_LayerNormLinear.forward`: only MXFP8 and blockwise tensors drop their rows).
    """
    if shapes.fp8 is None:
        return (tensor,)
    if gathered and normed and shapes.fp8.recipe == "nvfp4":
        return _both(shapes, tensor, split)
    rows = copies(shapes) == 1 or (gathered and shapes.fp8.recipe in ONE_SCALE)
    return _copy(shapes, tensor, "row" if rows else "column", split)


def forward_input(
    shapes: Shapes,
    tensor: Tensor,
    *,
    gathered: tuple[Tensor, ...] = (),
    in_16_bit: bool = True,
    original: bool = False,
    in_buffers: bool = False,
    split: Split = _UNSPLIT,
) -> tuple[Tensor, ...]:
    """What the forward GEMM reads in addition to what is saved. `gathered`: the full input, if `tensor` is a shard.

    `in_16_bit`: the caller still references the 16-bit input. With a fused norm it does not. `original`: the 16-bit input is saved.
    `in_buffers`: the full input is in userbuffers.
    """
    if shapes.fp8 is None:
        return () if in_buffers else gathered
    referenced = (tensor,) if in_16_bit and not original else ()
    recipes = ONE_SCALE if in_16_bit else (*ONE_SCALE, "nvfp4")
    rows_kept = not original and (copies(shapes) == 1 or (bool(gathered) and shapes.fp8.recipe in recipes))
    rows = () if rows_kept else _copy(shapes, tensor, "row", split)
    copied = _in_userbuffers if in_buffers else _copy
    return (*referenced, *rows, *(copy for full in gathered for copy in copied(shapes, full, "row")))


def backward_input(
    shapes: Shapes,
    tensor: Tensor,
    *,
    gathered: tuple[Tensor, ...] = (),
    original: bool = False,
    in_buffers: bool = False,
    split: Split = _UNSPLIT,
) -> tuple[Tensor, ...]:
    """What the weight-gradient GEMM reads in addition to what is saved.

    Gathered rows are transposed. Gathered columns with blocks of 128 elements are transposed too, out of place.
    `in_buffers`: the `gathered` input is in userbuffers.
    """
    if shapes.fp8 is None:
        return () if in_buffers else gathered
    recipe = shapes.fp8.recipe
    copied: tuple[Tensor, ...] = ()
    if original and recipe in ONE_SCALE:
        copied = _copy(shapes, tensor, "row") if gathered else _both(shapes, tensor, split)
    elif original:
        copied = _copy(shapes, tensor, "column", split)
    for full in gathered:
        if in_buffers:
            copied += _in_userbuffers(shapes, full, "column")
            continue
        copied += _copy(shapes, full, "column") if recipe == "mxfp8" else _both(shapes, full)
    return copied


def output_gradient(
    shapes: Shapes,
    tensor: Tensor,
    *,
    gathered: tuple[Tensor, ...] = (),
    in_buffers: bool = False,
    split: Split = _UNSPLIT,
    fused: bool = False,
) -> tuple[Tensor, ...]:
    """The gradient of a layer's output, and the copies of it, or of the `gathered` full gradient, that the backward GEMMs read.

    `in_buffers`: the full gradient is in userbuffers. Block-scaled shards are quantized twice, once for each GEMM. `fused`: a layer
    with a norm, or of all experts. Only `_Linear` makes no column-wise copy for a frozen weight.
    """
    if shapes.fp8 is None:
        return (tensor, *(() if in_buffers else gathered))
    if in_buffers:
        shard = () if shapes.fp8.recipe in ONE_SCALE else _copy(shapes, tensor, "column")
        return (tensor, *shard, *(copy for full in gathered for axis in _AXES for copy in _in_userbuffers(shapes, full, axis)))
    copied = tuple(copy for full in gathered or (tensor,) for copy in _both(shapes, full, split))
    return (tensor, *(copied if fused else (replace(each, for_weight=is_of_columns(each)) for each in copied)))


def gathers(
    shapes: Shapes, phase: Phase, *, width: int | None = None, both: bool = False, quantizes: bool = False, dtype: str = ""
) -> tuple[Collective, ...]:
    """All-gather of [s, b, width] over tensor-parallel ranks before a GEMM, in the element type that the GEMM reads.

    `both`: row-wise and column-wise copies. `quantizes`: the tensor is quantized for this call, with one scale for all ranks.
    `dtype`: the element type in 16 bit, by default that of activations.
    """
    if shapes.fp8 is None or shapes.t == 1:
        return shapes.tp("all_gather", phase, width=width, dtype=dtype or None)
    recipe = shapes.fp8.recipe
    if recipe in ONE_SCALE:
        amax = Collective(kind="all_reduce", group="tp", shape=(1,), dtype="fp32", phase=phase)
        data = shapes.tp("all_gather", phase, width=width, dtype="fp8")
        return (amax, *data) if quantizes and recipe == "tensorwise" else data
    found: list[Collective] = []
    for axis in _AXES if both else (("row",) if phase == "forward" else ("column",)):
        rows, columns = shapes.s * shapes.b, width or shapes.model.hidden_size
        scale, dtype = _gathered_scales(recipe, rows, columns, axis)
        found.append(Collective(kind="all_gather", group="tp", shape=scale, dtype=dtype, phase=phase))
        found += shapes.tp("all_gather", phase, width=width, dtype=element(recipe))
        if both and axis == "column":
            found[-2:] = [replace(each, for_weight=True) for each in found[-2:]]
    return tuple(found)


def _gathered_scales(recipe: Fp8Recipe, rows: int, columns: int, axis: Axis) -> tuple[tuple[int, int], str]:
    """Shape and element type of block scales as they are sent.

    The padding of rows is removed (`_all_gather_mxfp8`), and that of the transposed copy in NVFP4 (`_all_gather_nvfp4`).
    """
    if recipe == "blockwise":
        return ((rows, ceil_div(columns, 128)) if axis == "row" else (ceil_div(rows, 128), columns)), "fp32"
    block = 16 if recipe == "nvfp4" else 32
    by_row = (rows, round_up(ceil_div(columns, block), 4))
    return (by_row if axis == "row" else (ceil_div(rows, block), columns if recipe == "nvfp4" else round_up(columns, 128))), "uint8"
