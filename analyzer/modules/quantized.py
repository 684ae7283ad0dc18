"""What the three products of a linear layer read and keep: 16-bit tensors, or FP8 or FP4 copies of them with their scales.

Each product reads its operands along the summed dimension. Of x (input), dy (output's gradient) and w, the forward and
the input's gradient want rows, the gradient of the weight columns: up to two copies of one byte an element. Scaling a
tensor as a whole, or its history (`tensorwise`, `delayed`), needs the second copy only where the GPU multiplies FP8 in
one layout: it is a transpose there. Scaling blocks of 128 or 32 elements (`blockwise`, `mxfp8`) always needs it, since
the blocks differ.

Sources (Transformer Engine 2.11): pytorch/module/{linear,layernorm_linear,grouped_linear,base}.py;
pytorch/csrc/quantizer.cpp create_tensor; pytorch/tensor/*_tensor.py get_scale_shape, make_empty;
pytorch/distributed.py gather_along_first_dim; pytorch/utils.py is_non_tn_fp8_gemm_supported.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final, Literal

from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import Collective, Phase, Tensor
from analyzer.specs import Fp8Recipe
from analyzer.units import ceil_div, dtype_bytes, round_up

Way = Literal["row", "column"]

WHOLE_TENSOR: Final = ("delayed", "tensorwise")
"""Recipes with one scale for a tensor."""
_WAYS: Final[tuple[Way, ...]] = ("row", "column")
_HOPPER: Final = (9, 0)


@dataclass(frozen=True, kw_only=True)
class Split:
    """Rows that are quantized expert by expert, each with scales of its own."""

    experts: int = 1
    in_one_buffer: bool = False
    """By `split_quantize` (csrc/extensions/cast.cpp), which puts blocks and their scales of all experts into one."""


_WHOLE: Final = Split()


def reads_any_layout(compute_capability: tuple[int, int] | None) -> bool:
    """Whether the GPU's FP8 products take rows and columns alike: Blackwell of data centres does. Hopper where no GPU is named."""
    capability = compute_capability or _HOPPER
    return (10, 0) <= capability < (12, 0) or capability >= (13, 0)


def copies(shapes: Shapes) -> int:
    """FP8 copies that give rows and columns."""
    assert shapes.fp8 is not None
    return 1 if shapes.fp8.recipe in WHOLE_TENSOR and reads_any_layout(shapes.inputs.compute_capability) else 2


def keeps_original(shapes: Shapes) -> bool:
    """Whether a layer whose input another module keeps in 16 bit anyway keeps that, and quantizes it again in backward.

    Megatron asks for it (`set_save_original_input`) for attention's projection and the first of the shared experts,
    and where the input is recomputed; the delayed recipe cannot.
    """
    return shapes.fp8 is None or shapes.fp8.recipe != "delayed"


def scales(recipe: Fp8Recipe, rows: int, columns: int, way: Way, *, square_blocks: bool = False) -> tuple[tuple[int, ...], str]:
    """Shape and element type of the scales of one copy of [rows, columns]; weights have `square_blocks`."""
    if recipe in WHOLE_TENSOR:
        return (1,), "fp32"
    if recipe == "blockwise":
        along, across = (columns, rows) if way == "row" else (rows, columns)
        if square_blocks:
            return (ceil_div(across, 128), round_up(ceil_div(along, 128), 4)), "fp32"
        return (ceil_div(along, 128), round_up(across, 4)), "fp32"
    if recipe == "nvfp4":  # the copy by columns is a transpose
        across, along = (rows, columns) if way == "row" else (columns, rows)
        return (round_up(across, 128), round_up(ceil_div(along, 16), 4)), "uint8"
    if way == "row":
        return (round_up(rows, 128), round_up(ceil_div(columns, 32), 4)), "uint8"
    return (round_up(ceil_div(rows, 32), 4), round_up(columns, 128)), "uint8"


def element(recipe: Fp8Recipe) -> str:
    """Type of the copies' elements."""
    return "fp4" if recipe == "nvfp4" else "fp8"


def align_size(recipe: Fp8Recipe) -> int:
    """What the rows of each expert are padded to a multiple of (core/fp8_utils.py, fp4_utils.py get_fp4_align_size, 0.16.1)."""
    return {"mxfp8": 32, "nvfp4": 128}.get(recipe, 16)


def _copy(shapes: Shapes, tensor: Tensor, way: Way, split: Split = _WHOLE) -> tuple[Tensor, ...]:
    """One FP8 copy of a tensor, and its scales."""
    assert shapes.fp8 is not None
    recipe, experts = shapes.fp8.recipe, split.experts
    kind = element(recipe)
    name = f"{tensor.name} in {kind}" + (" by columns" if way == "column" else "")
    shape, dtype = scales(recipe, prod(tensor.shape[:-1]) // experts, tensor.shape[-1], way)
    formula = tensor.formula.replace("2·", "", 1) if tensor.formula.startswith("2·") else tensor.formula
    if split.in_one_buffer and recipe not in WHOLE_TENSOR:
        size = dtype_bytes(kind, prod(tensor.shape)) + experts * dtype_bytes(dtype, prod(shape))
        return (Tensor(name=f"{name}, with scales", shape=(size,), dtype="uint8", formula=f"{formula}, {recipe} scaling"),)
    if experts > 1:
        shape = (experts, *shape)
    return (
        Tensor(name=name, shape=tensor.shape, dtype=kind, formula=formula if kind == "fp8" else f"{formula}/2", pieces=experts),
        Tensor(name=f"scales of {name}", shape=shape, dtype=dtype, formula=f"{recipe} scaling", pieces=experts),
    )


def _both(shapes: Shapes, tensor: Tensor, split: Split = _WHOLE) -> tuple[Tensor, ...]:
    """All copies that the products of this GPU need."""
    by_columns = _copy(shapes, tensor, "column", split) if copies(shapes) == 2 else ()
    return (*_copy(shapes, tensor, "row", split), *by_columns)


def kept_input(shapes: Shapes, tensor: Tensor, *, gathered: bool = False, split: Split = _WHOLE) -> tuple[Tensor, ...]:
    """What stays of a layer's input for the gradient of its weight: in FP8 one copy, of the shard where it is `gathered`.

    Of a shard with one scale the rows stay: only they can be gathered.
    """
    if shapes.fp8 is None:
        return (tensor,)
    rows = copies(shapes) == 1 or (gathered and shapes.fp8.recipe in WHOLE_TENSOR)
    return _copy(shapes, tensor, "row" if rows else "column", split)


def forward_input(
    shapes: Shapes,
    tensor: Tensor,
    *,
    gathered: tuple[Tensor, ...] = (),
    in_16_bit: bool = True,
    original: bool = False,
    split: Split = _WHOLE,
) -> tuple[Tensor, ...]:
    """What the forward product reads beyond what is kept. `gathered`: the whole of it, if `tensor` is a shard.

    `in_16_bit`: the caller still holds the 16-bit input. `original`: that is what is kept.
    """
    if shapes.fp8 is None:
        return gathered
    held = (tensor,) if in_16_bit and not original else ()
    rows_kept = not original and (copies(shapes) == 1 or (bool(gathered) and shapes.fp8.recipe in WHOLE_TENSOR))
    rows = () if rows_kept else _copy(shapes, tensor, "row", split)
    return (*held, *rows, *(copy for whole in gathered for copy in _copy(shapes, whole, "row")))


def backward_input(
    shapes: Shapes, tensor: Tensor, *, gathered: tuple[Tensor, ...] = (), original: bool = False, split: Split = _WHOLE
) -> tuple[Tensor, ...]:
    """What the product for the weight's gradient reads beyond what is kept.

    Gathered rows are transposed; gathered columns with blocks of 128 too, out of place.
    """
    if shapes.fp8 is None:
        return gathered
    recipe = shapes.fp8.recipe
    again: tuple[Tensor, ...] = ()
    if original and recipe in WHOLE_TENSOR:
        again = _copy(shapes, tensor, "row") if gathered else _both(shapes, tensor, split)
    elif original:
        again = _copy(shapes, tensor, "column", split)
    for whole in gathered:
        again += _copy(shapes, whole, "column") if recipe == "mxfp8" else _both(shapes, whole)
    return again


def output_gradient(
    shapes: Shapes, tensor: Tensor, *, gathered: tuple[Tensor, ...] = (), split: Split = _WHOLE
) -> tuple[Tensor, ...]:
    """The gradient of a layer's output, and what the two products of backward read of it, or of the `gathered` whole."""
    if shapes.fp8 is None:
        return (tensor, *gathered)
    return (tensor, *(copy for whole in gathered or (tensor,) for copy in _both(shapes, whole, split)))


def norm_gradient(shapes: Shapes, tensor: Tensor) -> tuple[Tensor, ...]:
    """What the backward of a fused norm needs beyond the products of its layer: its input's gradient, less what they free.

    They free the normalized `tensor`. In 16 bit that is as large, and a gathered one larger; an FP8 copy is half.
    """
    if shapes.fp8 is None or shapes.sp:
        return ()
    kind = element(shapes.fp8.recipe)
    return (Tensor(name="norm's input gradient, beyond the copy freed before", shape=tensor.shape, dtype=kind),)


def gathers(
    shapes: Shapes, phase: Phase, *, width: int | None = None, both: bool = False, quantizes: bool = False
) -> tuple[Collective, ...]:
    """All-gather of [s, b, width] over tensor-parallel ranks before a product, in the type that the product reads.

    `both`: for products along rows and columns. `quantizes`: it is quantized for this, with one scale for all ranks.
    """
    if shapes.fp8 is None or shapes.t == 1:
        return shapes.tp("all_gather", phase, width=width)
    recipe = shapes.fp8.recipe
    if recipe in WHOLE_TENSOR:
        largest = Collective(kind="all_reduce", group="tp", shape=(1,), dtype="fp32", phase=phase)
        data = shapes.tp("all_gather", phase, width=width, dtype="fp8")
        return (largest, *data) if quantizes and recipe == "tensorwise" else data
    found: list[Collective] = []
    for way in _WAYS if both else (("row",) if phase == "forward" else ("column",)):
        rows, columns = shapes.s * shapes.b, width or shapes.model.hidden_size
        scale, dtype = _gathered_scales(recipe, rows, columns, way)
        found.append(Collective(kind="all_gather", group="tp", shape=scale, dtype=dtype, phase=phase))
        found += shapes.tp("all_gather", phase, width=width, dtype=element(recipe))
    return tuple(found)


def _gathered_scales(recipe: Fp8Recipe, rows: int, columns: int, way: Way) -> tuple[tuple[int, int], str]:
    """Scales of blocks as they are sent: of mxfp8 padding is taken off rows alone (`_all_gather_mxfp8`)."""
    if recipe == "blockwise":
        return ((rows, ceil_div(columns, 128)) if way == "row" else (ceil_div(rows, 128), columns)), "fp32"
    block = 16 if recipe == "nvfp4" else 32
    by_row = (rows, round_up(ceil_div(columns, block), 4))
    return (by_row if way == "row" else (ceil_div(rows, block), round_up(columns, 128))), "uint8"
