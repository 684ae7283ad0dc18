"""Bytes on the GPU, in host memory and on disk while a block is generated.

On the GPU: the weights, cache and activations that are placed there, the weights of two sub-layers that are loaded, the cache of
two batches, and the intermediate tensors of the sub-layer with the most (flexllmgen/pytorch_backend.py: `mha`, `mlp`,
`opt_output_embed`).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final, NamedTuple

from analyzer.inference.offload.linear import Linear
from analyzer.inference.offload.machine import Machine
from analyzer.inference.offload.policy import Placement
from analyzer.inference.offload.tensors import BYTES, actual_weights, placed_cache
from analyzer.inference.offload.work import Case

COPY_BUFFERS: Final = 4 * 2**30 * BYTES
"""Pinned buffers of FlexLLMGen's four copy threads (`copy_worker_func`): 2^30 elements each."""
FLOAT32: Final = 4
"""Bytes of an element of the workspace of attention on the CPU."""


class Tiers(NamedTuple):
    """Bytes on each tier: linear functions of the placement."""

    gpu: Linear
    host: Linear
    disk: Linear

    def at(self, placement: Placement) -> tuple[float, float, float]:
        """Bytes for a placement."""
        return (self.gpu.at(placement), self.host.at(placement), self.disk.at(placement))


def tiers(case: Case) -> Tiers:
    """Bytes on each tier at the peak, as functions of the placement."""
    schedule, layers = case.schedule, case.layers
    weights = layers.bytes(schedule)
    cached = case.cache_bytes(case.lengths.cached) * schedule.cache_factor
    cache = case.model.num_layers * schedule.batches * cached
    of_batch = schedule.batch_size * case.lengths.prompt * case.hidden_bytes
    activations = schedule.batches * of_batch
    sizes = [layer.bytes(schedule) for layer in (*layers, layers.embedding)]
    loaded = max(one + other for one, other in pairwise(sizes))
    buffered = 0.0 if schedule.attention_on_cpu else 2 * cached
    workspace = 2 * FLOAT32 / BYTES * case.cache_bytes(case.lengths.cached) if schedule.attention_on_cpu else 0.0
    return Tiers(
        gpu=Linear(
            _intermediate(case), (weights, loaded, loaded), (cache, buffered, buffered), (activations, 2 * of_batch, 2 * of_batch)
        ),
        host=Linear(COPY_BUFFERS + workspace, (0, weights, 0), (0, cache, 0), (0, activations, 0)),
        disk=Linear(0.0, (0, 0, weights), (0, 0, cache), (0, 0, activations)),
    )


def limits(machine: Machine) -> tuple[float, float, float]:
    """Bytes that each tier has."""
    return (machine.gpu_memory, machine.host_memory, machine.disk_size)


def actual(case: Case, nominal: Placement) -> Placement:
    """The shares of the bytes on each tier, with weights in whole tensors and the cache in whole requests."""
    return Placement(
        actual_weights(case.layers, nominal.weights, case.schedule), placed_cache(nominal.cache, case.schedule), nominal.activations
    )


def _intermediate(case: Case) -> float:
    """Bytes of the intermediate tensors of one batch in the sub-layer with the most, and of decompressed weights."""
    model, schedule, prompt = case.model, case.schedule, case.lengths.prompt
    tokens = schedule.batch_size * prompt
    hidden = tokens * case.hidden_bytes
    projections = BYTES * tokens * (model.query_projection_size + 2 * model.key_value_projection_size)
    scores = BYTES * schedule.batch_size * model.num_attention_heads * prompt**2
    prefill = 2 * hidden + projections + 2 * scores
    decode = 0.0
    if not schedule.attention_on_cpu:
        decode = case.cache_bytes(case.lengths.cached) * (2 if schedule.compressed_cache else 1)
    mlp = 2 * hidden + BYTES * tokens * model.ffn_hidden_size * (2 if model.gated else 1)
    head = 2 * hidden + BYTES * tokens * model.padded_vocab_size
    found = {"attention": max(prefill, decode), "mlp": mlp, "head": head, "embedding": 2 * hidden}
    if not schedule.compressed_weights:
        return max(found.values())
    return max(found[layer.name] + BYTES * layer.matrix_elements for layer in case.layers)
