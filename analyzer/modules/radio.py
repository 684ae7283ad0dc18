"""The input of the RADIO encoder: patches through a linear layer, and positions that are cropped and interpolated.

Source: core/models/vision/radio.py (0.16.1), in training and with conditional positions (`has_cpe`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.linear import weight_gradient
from analyzer.modules.reduction import bias_gradient
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import OUTPUT_GRADIENT, Collective, Module, Parameter, Tensor, for_weight, largest
from analyzer.units import DTYPE_BYTES

if TYPE_CHECKING:
    from analyzer.specs import VisionSpec

_LARGEST_IMAGE: Final = 2048
"""Height and width of the largest image, for which there are positions (`max_img_h`, `max_img_w` of llava_model.py)."""
_LARGEST_OF_G: Final = 1792
"""The same of radio-g."""
_CHANNELS: Final = 3


def embedder(vision: VisionSpec, shapes: Shapes) -> Module:
    """A column-parallel linear layer of megatron-core on the pixels of each patch, whose output is gathered.

    Its backward computes the gradient of the pixels too, and sums it over tensor-parallel ranks.
    """
    pixels, width = _CHANNELS * vision.patch**2, shapes.model.hidden_size
    local = width // shapes.t

    def patches(name: str, columns: int) -> Tensor:
        size = f"{DTYPE_BYTES[shapes.dtype]}·n·s·{'3·p²' if columns == pixels else 'h'}"
        return Tensor(name=name, shape=(shapes.b, vision.patches, columns), dtype=shapes.dtype, formula=size)

    biased = vision.kind == "radio-g"
    bias = (Parameter(name="bias", shape=(local,), dtype=shapes.dtype, sharding="tensor", full_shape=(width,)),) if biased else ()
    added = (patches("output without bias", local),) if biased else ()
    summed = bias_gradient(shapes, rows=shapes.b * vision.patches, columns=local) if biased else ()
    gathered = (patches("outputs of all ranks", width), patches("gathered output", width)) if shapes.t > 1 else ()
    return Module(
        name="vision_model.embedder",
        kind=ModuleKind.PATCHES,
        parameters=(
            Parameter(name="weight", shape=(local, pixels), dtype=shapes.dtype, sharding="tensor", full_shape=(width, pixels)),
            *bias,
        ),
        saved=for_weight((replace(patches("pixels of the patches", pixels), made_in="/vision_model"),)),
        forward_workspace=(patches("output", local), *largest(added, gathered)),
        backward_workspace=(
            patches(OUTPUT_GRADIENT, local),
            *for_weight((patches("pixel gradient", pixels),)),
            *weight_gradient(shapes, (local, pixels)),
            *summed,
        ),
        collectives=_collectives(shapes, vision, local, pixels),
        source="megatron.core.tensor_parallel.ColumnParallelLinear",
    )


def _collectives(shapes: Shapes, vision: VisionSpec, local: int, pixels: int) -> tuple[Collective, ...]:
    if shapes.t == 1:
        return ()
    rows = (shapes.b, vision.patches)
    return (
        Collective(kind="all_gather", group="tp", shape=(*rows, local * shapes.t), dtype=shapes.dtype, phase="forward"),
        Collective(kind="all_reduce", group="tp", shape=(*rows, pixels), dtype=shapes.dtype, phase="backward", for_weight=True),
    )


def positions(vision: VisionSpec, shapes: Shapes) -> Module:
    """A random part of all positions for each image, interpolated to its patches in fp32 (`F.grid_sample`).

    The sum of the gradients of all images is allocated when the positions in fp32, which are as large, have been freed.
    """
    largest_image = _LARGEST_OF_G if vision.kind == "radio-g" else _LARGEST_IMAGE
    rows, width = largest_image // vision.patch, shapes.model.hidden_size
    count = rows * rows
    grid = (vision.image_height // vision.patch, vision.image_width // vision.patch)

    def table(name: str, images: int, dtype: str) -> Tensor:
        return Tensor(name=name, shape=(images, width, rows, rows), dtype=dtype, formula=f"{DTYPE_BYTES[dtype]}·h·R²")

    def sampled(name: str, dtype: str) -> Tensor:
        size = f"{DTYPE_BYTES[dtype]}·n·s·h"
        return Tensor(name=name, shape=(shapes.b, vision.patches, width), dtype=dtype, formula=size)

    places = Tensor(name="places of the patches", shape=(shapes.b, *grid, 2), dtype="fp32", formula="8·n·s")
    converted = (table("positions in fp32", 1, "fp32"),) if shapes.dtype != "fp32" else ()
    return Module(
        name="vision_model.positions",
        kind=ModuleKind.VISION_POSITIONS,
        function=True,
        parameters=(Parameter(name="position_embeddings", shape=(1, count, width), dtype=shapes.dtype),),
        saved=for_weight((*converted, places)),
        forward_workspace=(
            sampled("patches", shapes.dtype),
            sampled("sampled positions in fp32", "fp32"),
            sampled("sampled positions", shapes.dtype),
        ),
        backward_workspace=for_weight(
            (
                sampled("gradient of the sampled positions", "fp32"),
                table("gradient of the positions of each image", shapes.b, "fp32"),
            )
        ),
        source="RADIOViTModel.apply_pos_enc",
    )
