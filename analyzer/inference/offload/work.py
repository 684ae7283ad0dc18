"""Seconds of the GPU and of the links for one batch in one sub-layer, and for loading a sub-layer's weights.

FlexLLMGen's kernels are those of PyTorch: attention is not fused, and the head computes the logits of every token of the prompt
(flexllmgen/pytorch_backend.py: `mha`, `mha_gen`, `mlp`, `opt_output_embed`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from analyzer.inference.offload.linear import Linear
from analyzer.inference.offload.machine import Machine
from analyzer.inference.offload.policy import Lengths, Schedule
from analyzer.inference.offload.tensors import BYTES, SubLayer, SubLayers
from analyzer.specs.model import ModelSpec

NOTHING: Final = Linear()
SCORE_PASSES: Final = 6
"""Reads and writes of the attention scores: products, mask, softmax, product with the values."""
HIDDEN_PASSES: Final = 20
"""Reads and writes of tensors as large as the hidden states, in attention and in the MLP: norm, bias, transposition, residual."""
CPU_DECOMPRESSION: Final = 2.0
"""Time of attention on the CPU over a compressed cache, relative to 16 bits: it is written once more, in 32 bits. Not measured."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What the formulas depend on, beside the placement."""

    model: ModelSpec
    layers: SubLayers
    schedule: Schedule
    lengths: Lengths
    machine: Machine

    @property
    def hidden_bytes(self) -> float:
        """Of one token of one request."""
        return BYTES * self.model.hidden_size

    def cache_bytes(self, tokens: float) -> float:
        """Of one layer and batch, in 16 bits, compressed or not."""
        return 2 * BYTES * tokens * self.schedule.batch_size * self.model.key_value_projection_size


@dataclass(frozen=True)
class Work:
    """Seconds of one activity on each resource."""

    gpu: Linear = NOTHING
    host: Linear = NOTHING
    """The program waits for it before it starts the kernels of the step."""
    after_host: Linear = NOTHING
    """Copies to the GPU that cannot start before the program has staged them."""
    to_gpu: Linear = NOTHING
    from_gpu: Linear = NOTHING
    read: Linear = NOTHING
    """Of the disk."""
    write: Linear = NOTHING

    def __add__(self, other: Work) -> Work:
        return Work(
            self.gpu + other.gpu,
            self.host + other.host,
            self.after_host + other.after_host,
            self.to_gpu + other.to_gpu,
            self.from_gpu + other.from_gpu,
            self.read + other.read,
            self.write + other.write,
        )


def weights_load(case: Case, layer: SubLayer) -> Work:
    """Loading the weights of a sub-layer, as far as they are not on the GPU."""
    size, machine = layer.bytes(case.schedule), case.machine
    link = size / machine.pcie
    staging = 0.0 if case.schedule.pinned_weights else size / machine.staged
    return Work(
        host=Linear(weights=(0, staging, 0)),
        to_gpu=Linear(weights=(0, link, link)),
        read=Linear(weights=(0, 0, size / machine.disk_read)),
    )


def cache_load(case: Case) -> Work:
    """Loading the cache of a batch and layer for a step of the decode."""
    machine, size = case.machine, case.cache_bytes(case.lengths.mean_attended)
    stored = size * case.schedule.cache_factor
    read = Linear(cache=(0, 0, stored / machine.disk_read))
    if case.schedule.attention_on_cpu:
        return Work(read=read)
    link = stored / machine.pcie
    return Work(
        host=Linear(cache=(0, stored / machine.staged, 0)),
        after_host=Linear(cache=(0, link / 2, 0)),  # the values; the keys are copied while the values are staged
        to_gpu=Linear(cache=(0, link, link)),
        read=read,
    )


def cache_store(case: Case, *, prefill: bool) -> Work:
    """Storing the keys and values of the new tokens of a batch and layer. Threads copy them to host memory, or to a mapped file."""
    size = case.cache_bytes(case.lengths.prompt if prefill else 1) * case.schedule.cache_factor
    copying = size / case.machine.unstaged
    return Work(
        from_gpu=Linear(cache=(0, copying, copying)),
        write=Linear(cache=(0, 0, size / case.machine.disk_write)),
    )


def compute(case: Case, layer: SubLayer, *, prefill: bool) -> Work:
    """The kernels of a batch in a sub-layer, and the transfers of its activations, which precede and follow them."""
    tokens = case.schedule.batch_size * (case.lengths.prompt if prefill else 1)
    machine = case.machine
    seconds = Linear(machine.step if case.schedule.overlapped else 0.0) + _gemms(case, layer, tokens)
    work = Work()
    if layer.name == "attention":
        work = _prefill_attention(case) if prefill else _decode_attention(case)
    if layer.name in ("attention", "mlp"):
        passes = HIDDEN_PASSES * tokens * case.hidden_bytes
        seconds += Linear(passes / machine.hbm)
    if case.schedule.compressed_weights:
        seconds += Linear(BYTES * layer.matrix_elements / machine.decompressed)
    size = tokens * case.hidden_bytes
    moved = size / machine.pcie + size / machine.pcie_from
    hidden = Work(
        gpu=Linear(activations=(0, moved, moved)),
        read=Linear(activations=(0, 0, size / machine.disk_read)),
        write=Linear(activations=(0, 0, size / machine.disk_write)),
    )
    return Work(gpu=seconds) + hidden + work


def _gemms(case: Case, layer: SubLayer, tokens: float) -> Linear:
    """The products with the weights: limited by computation, or by reading the weights."""
    if layer.name == "embedding":
        return Linear()
    computing = 2 * tokens * layer.matrix_elements / case.machine.gemm
    reading = BYTES * layer.matrix_elements / case.machine.hbm
    return Linear(max(computing, reading))


def _prefill_attention(case: Case) -> Work:
    """Attention between the tokens of the prompts, with all scores in memory, and the compression of the new cache."""
    model, machine, prompt = case.model, case.machine, case.lengths.prompt
    pairs = case.schedule.batch_size * prompt**2
    seconds = 4 * pairs * model.query_projection_size / machine.batched_gemm
    seconds += SCORE_PASSES * BYTES * pairs * model.num_attention_heads / machine.hbm
    if case.schedule.compressed_cache:
        seconds += case.cache_bytes(prompt) / machine.compressed
    return Work(gpu=Linear(seconds))


def _decode_attention(case: Case) -> Work:
    """Attention of the new tokens over the cache, where the cache is or on the GPU."""
    machine, size = case.machine, case.cache_bytes(case.lengths.mean_attended)
    on_gpu = size / machine.cache_read
    if case.schedule.compressed_cache:
        on_gpu += size / machine.decompressed
    if not case.schedule.attention_on_cpu:
        return Work(gpu=Linear(on_gpu))
    on_cpu = size / machine.cpu_attention * (CPU_DECOMPRESSION if case.schedule.compressed_cache else 1.0)
    return Work(gpu=Linear(cache=(on_gpu, 0, 0)), host=Linear(cache=(0, on_cpu, on_cpu)))
