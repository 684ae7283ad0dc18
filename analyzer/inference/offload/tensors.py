"""The tensors of a dense model, in the sub-layers that FlexLLMGen loads one after the other (`sep_layer`)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal, NamedTuple

from analyzer.errors import UnsupportedError
from analyzer.inference.offload.policy import Schedule, Shares
from analyzer.specs.model import ModelSpec

BYTES: Final = 2
"""Of an element of weights, cache and activations: 16 bits."""
Name = Literal["embedding", "attention", "mlp", "head"]


class Tensor(NamedTuple):
    """A parameter tensor."""

    elements: int
    is_matrix: bool
    """Matrices can be compressed. Biases and norms are not."""


@dataclass(frozen=True, kw_only=True)
class SubLayer:
    """Tensors that are loaded together, in the order of FlexLLMGen's `init_weight`."""

    name: Name
    count: int
    tensors: tuple[Tensor, ...]

    @property
    def elements(self) -> int:
        """Of all tensors of one sub-layer."""
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def matrix_elements(self) -> int:
        """Of the matrices of one sub-layer."""
        return sum(tensor.elements for tensor in self.tensors if tensor.is_matrix)

    def bytes(self, schedule: Schedule) -> float:
        """Bytes of one sub-layer, compressed if the schedule says so."""
        return sum(_bytes(tensor, schedule) for tensor in self.tensors)


class SubLayers(NamedTuple):
    """All sub-layers, in the order in which they run. The head has its own copy of tied embeddings, as in FlexLLMGen."""

    embedding: SubLayer
    attention: SubLayer
    mlp: SubLayer
    head: SubLayer

    def bytes(self, schedule: Schedule) -> float:
        """Bytes of all weights."""
        return sum(layer.count * layer.bytes(schedule) for layer in self)


def sub_layers(model: ModelSpec) -> SubLayers:
    """The sub-layers of a dense model. Raises UnsupportedError for experts, latent attention and layers that differ."""
    for option, found in (
        ("--num-experts", model.moe),
        ("--multi-latent-attention", model.mla),
        ("layers that differ", model.blocks),
    ):
        if found:
            raise UnsupportedError("--info-offload", f"{option} is not modelled", "give a dense model of equal layers")
    hidden, biased = model.hidden_size, model.bias_linear
    norm = _vectors(hidden, 2 if model.normalization == "LayerNorm" else 1)
    queries, keys = model.query_projection_size, model.key_value_projection_size
    attention: list[Tensor] = []
    for rows in (queries, keys, keys):
        attention += [Tensor(rows * hidden, True), *_vectors(rows, int(model.bias_qkv))]
    attention += [Tensor(hidden * queries, True), *_vectors(hidden, int(biased))]
    mlp: list[Tensor] = []
    for _ in range(2 if model.gated else 1):
        mlp += [Tensor(model.ffn_hidden_size * hidden, True), *_vectors(model.ffn_hidden_size, int(biased))]
    mlp += [Tensor(hidden * model.ffn_hidden_size, True), *_vectors(hidden, int(biased))]
    tokens = Tensor(model.padded_vocab_size * hidden, True)
    positions = [Tensor(model.max_position_embeddings * hidden, True)]
    learned = model.position_embedding == "learned_absolute"
    return SubLayers(
        embedding=SubLayer(name="embedding", count=1, tensors=(tokens, *(positions if learned else []))),
        attention=SubLayer(name="attention", count=model.num_layers, tensors=(*attention, *norm)),
        mlp=SubLayer(name="mlp", count=model.num_layers, tensors=(*mlp, *norm)),
        head=SubLayer(name="head", count=1, tensors=(*norm, tokens)),
    )


def placed(layer: SubLayer, nominal: Shares, schedule: Schedule) -> Shares:
    """The shares of the bytes of a sub-layer on each tier, if whole tensors are placed as FlexLLMGen does (`init_weight_list`).

    The tensors are laid side by side. The first part of them belongs to the disk, the next to the host, the last to the GPU; a
    tensor goes where its middle is.
    """
    ends = list(accumulate(tensor.elements for tensor in layer.tensors))
    on_tier = {"gpu": 0.0, "host": 0.0, "disk": 0.0}
    disk_end, host_end = 100 * nominal.disk, 100 * (nominal.disk + nominal.host)
    for tensor, end in zip(layer.tensors, ends, strict=True):
        middle = 100 * (end - tensor.elements / 2) / ends[-1]
        # rounding of percentages must not move a tensor whose middle is on a boundary
        tier = "disk" if middle < disk_end - 1e-9 else "host" if middle < host_end - 1e-9 else "gpu"
        if tier == "gpu" and nominal.gpu <= 0:
            tier = "host" if nominal.host > 0 else "disk"
        on_tier[tier] += _bytes(tensor, schedule)
    total = layer.bytes(schedule)
    return Shares(**{tier: size / total for tier, size in on_tier.items()})


def actual_weights(layers: SubLayers, nominal: Shares, schedule: Schedule) -> Shares:
    """The shares of the bytes of all weights on each tier."""
    total = layers.bytes(schedule)
    sizes = [(layer.count * layer.bytes(schedule) / total, placed(layer, nominal, schedule)) for layer in layers]
    return Shares(*(sum(part * shares[tier] for part, shares in sizes) for tier in range(3)))


def placed_cache(nominal: Shares, schedule: Schedule) -> Shares:
    """The shares of the cache on each tier: whole requests of a batch (`TorchMixedDevice.init_cache_one_gpu_batch`)."""
    if 1.0 in nominal:
        return nominal
    size = schedule.batch_size
    gpu = int(size * nominal.gpu + 1e-9) / size
    host = int(size * nominal.host + 1e-9) / size if nominal.disk else 1.0 - gpu
    return Shares(gpu, host, 1.0 - gpu - host)


def _vectors(elements: int, count: int) -> list[Tensor]:
    return [Tensor(elements, False)] * count


def _bytes(tensor: Tensor, schedule: Schedule) -> float:
    return BYTES * tensor.elements * (schedule.weight_factor if tensor.is_matrix else 1.0)
