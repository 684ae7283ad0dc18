"""An upper bound of the memory that images need on the first pipeline stage of a vision-language model.

The weights of its vision part give the sizes of its layers. A layer stores at most the outputs of its linear layers and of its
activations, the inputs of its norms and linear layers, and queries, keys and values. The tensors that it allocates in all are
those, and rotations and norms in fp32. Attention is a kernel that stores no scores. What the code of transformers stores and
allocates was counted for seven encoders (tests/data/vision_activations.json, by tools/vision_activations.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

from analyzer.layout.stages import chunks
from analyzer.memory.order import equivalent_iteration
from analyzer.program.schedule.pipeline import most_in_flight

if TYPE_CHECKING:
    from analyzer.specs import TrainingJob
    from analyzer.specs.vision_part import VisionWeight

_STORED_OF_OUTPUT: Final = 4
"""Bytes stored for each output of a linear layer: the output and that of the activation after it, in 16 bits."""
_STORED_OF_WIDTH: Final = 6
"""Bytes stored for each element of the residual stream beside these: inputs of the norms in fp32 or in 16 bits."""
_MADE_OF_WIDTH: Final = 84
"""Bytes that a layer allocates for each element of the residual stream beside its outputs: rotations, norms, copies of q, k, v."""
_ENDS_OF_WIDTH: Final = 48
"""Bytes for each element before the first layer and after the last one: patches, interpolated positions, tables of rotations."""
_PIXEL: Final = 12
"""Bytes of each input of a patch: fp32, and copies in fp32 and 16 bits."""
_OF_PROJECTED: Final = 18
"""Bytes for each element of a norm, with copies in fp32."""
_MASK: Final = 4
"""Bytes for each pair of patches in a mask, with a copy."""
_COPIES: Final = 4
"""Copies of the embeddings of a sequence: with images written into them, and transposed before and after."""
_BYTES_OF_TOKEN: Final = 64
"""Masks, indices and positions of a token."""
_PASSES: Final = 3
"""What a trained layer allocates in a forward, in its recomputation and in its backward, as a multiple of the first."""
_QUANTIZED: Final = 3
"""Bytes of a weight that is kept in FP8 or FP4 as well, in both layouts."""


def image_bytes(job: TrainingJob) -> int:
    """The most bytes that images need on a rank of the first stage, at any time of an iteration. `job.images` must be set."""
    images, weights = job.images, job.model.vision_weights
    assert images is not None, "the launch has images"
    tokens = images.tokens * job.batch.micro_batch_size
    patches = images.patches_per_token * tokens
    projected = [each for each in weights if each.name.startswith(images.projection) and not each.adapter]
    encoder = [each for each in weights if not each.name.startswith(images.projection) and not each.adapter]
    layer = of_layer(encoder)
    stored, made = layer.depth * layer.stored * patches, layer.made * patches
    ends = patches * before_layers(encoder, layer.width) + tokens * after_layers(encoder, projected) + _language(job, projected)
    ends += _MASK * patches**2 if images.masked else 0
    trained = any(not each.frozen for each in weights)
    kept = ends + (stored + _adapters(weights, patches) if trained else 0)
    largest = max(each.numel // each.copies for each in weights)
    quantized = _QUANTIZED * sum(each.numel for each in weights if each.linear) if job.precision.fp8 is not None else 0
    return kept * _in_flight(job) + ends + (_PASSES if trained else 1) * made + 4 * largest + quantized


class LayerBytes(NamedTuple):
    """Bytes of a patch in one layer of an encoder."""

    depth: int
    """Layers."""
    width: int
    """Elements of the residual stream."""
    stored: int
    """The most that is stored for the backward."""
    made: int
    """The most that is allocated in a forward, if nothing is freed."""


def of_layer(encoder: Sequence[VisionWeight]) -> LayerBytes:
    """The bounds of a layer. `encoder`: the weights of the encoder."""
    layers = [each for each in encoder if "*" in each.name and each.linear]
    width, outputs = layers[0].shape[1], _STORED_OF_OUTPUT * sum(each.shape[0] for each in layers)
    stored, made = outputs + _STORED_OF_WIDTH * width, outputs + _MADE_OF_WIDTH * width
    return LayerBytes(layers[0].copies, width, stored, made)


def before_layers(encoder: Sequence[VisionWeight], width: int) -> int:
    """The most that is allocated for a patch before the first layer: its pixels, positions and tables of rotations."""
    pixels = max(prod(each.shape[1:]) for each in encoder if "patch" in each.name and each.name.endswith("weight"))
    return _PIXEL * pixels + _ENDS_OF_WIDTH * width


def after_layers(encoder: Sequence[VisionWeight], projected: Sequence[VisionWeight]) -> int:
    """The most that is allocated for a token after the last layer. `projected`: the weights of the projection."""
    others = sum(each.shape[0] for each in encoder if each.name == "downsample.weight")
    outputs = sum(each.copies * each.shape[0] for each in projected if each.linear) + others
    normed = sum(each.copies * each.shape[0] for each in projected if len(each.shape) == 1 and each.name.endswith("weight"))
    read = sum(each.copies * each.shape[1] for each in projected if each.linear)
    return 2 * _STORED_OF_OUTPUT * outputs + _OF_PROJECTED * max(normed, read)


def _language(job: TrainingJob, projected: Sequence[VisionWeight]) -> int:
    """Copies of the embeddings of complete sequences, and of those that layers of the language model add (deepstack)."""
    rows = job.batch.micro_batch_size * job.batch.seq_length
    added = max((each.copies for each in projected if "*" in each.name), default=0)
    return rows * ((1 + added) * _COPIES * 2 * job.model.hidden_size + _BYTES_OF_TOKEN)


def _adapters(weights: Sequence[VisionWeight], patches: int) -> int:
    """The inputs and outputs of both matrices of adapters."""
    return sum(_STORED_OF_OUTPUT * each.copies * sum(each.shape) for each in weights if each.adapter) * patches


def _in_flight(job: TrainingJob) -> int:
    """The most microbatches between their forward and backward in the first chunk of the first stage."""
    parallel = job.parallel
    stage = chunks(job.model.num_layers, parallel, mtp_layers=job.model.mtp_num_layers)[0]
    iteration = equivalent_iteration(job, 0, max(job.batch.microbatches, job.batch.first_microbatches), stage)
    return most_in_flight(iteration.order, [int(each.pre_process) for each in stage])
