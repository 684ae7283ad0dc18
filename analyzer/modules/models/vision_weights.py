"""The weights of parts for images and sound, whose activations depend on data that the launch does not tell.

Sources: `HuggingFaceVit` and `MultimodalGPTModel` of mcore-bridge 1.6, `Qwen25VLModel` and `Qwen3VLModel` of Megatron-Bridge,
mcore_adapter/models of ROLL. Gradients of weights that all tensor-parallel ranks have are averaged over these
(`average_gradients_across_tp_domain` in core/distributed/finalize_model_grads.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby

from analyzer.modules.inputs import EndInputs
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.models.parts import CACHED_ENDS
from analyzer.modules.shapes import EndShapes
from analyzer.modules.tree import Module, Parameter
from analyzer.specs.vision_part import Part, VisionWeight


@lru_cache(maxsize=CACHED_ENDS)
def vision_weights(inputs: EndInputs) -> tuple[Module, ...]:
    """The weights of each part, one parameter for each layer that has one."""
    parts = groupby(inputs.model.vision_weights, lambda weight: weight.part)
    return tuple(_part(part, tuple(weights), inputs) for part, weights in parts)


def _part(part: Part, weights: tuple[VisionWeight, ...], inputs: EndInputs) -> Module:
    """A module without trained weights has no backward."""
    trained = any(not each.frozen for each in weights)
    return Module(
        name=f"{part}_model",
        kind=ModuleKind.VISION_WEIGHTS,
        parameters=tuple(each for weight in weights for each in _parameters(weight, EndShapes(inputs))),
        frozen=not trained,
        differentiable=trained,
        source="the module of transformers, or of Megatron-Bridge",
    )


def _parameters(weight: VisionWeight, shapes: EndShapes) -> Iterator[Parameter]:
    shape, tensor = weight.shape, shapes.t
    split = weight.split is not None and tensor > 1
    if weight.split is not None:
        shape = tuple(size // tensor if place == weight.split else size for place, size in enumerate(shape))
    for layer in range(weight.copies):
        yield Parameter(
            name=weight.name.replace("*", str(layer)),
            shape=shape,
            dtype=shapes.dtype,
            sharding="tensor" if split else "replicated",
            full_shape=weight.shape if split else (),
            sequence_parallel=tensor > 1 and not split and not weight.frozen,
            frozen=weight.frozen,
        )
