"""Model FLOPs of a hybrid model, as Megatron's `num_floating_point_operations` counts them (megatron/training/training.py).

Source: its function `hybrid_flops`, 0.13 to 0.19. Layers with experts are counted from 0.16 on, and MTP depths with their logits
from 0.17 on. Megatron counts a Mamba layer with a width of twice the hidden size, whatever its heads, and only `--swiglu` as a
gate. It does not count multi-latent and sparse attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from analyzer.specs import ModelSpec, TrainingJob
from analyzer.specs.hybrid import MAMBA_EXPANSION

_PASSES: Final = 3


def hybrid_flops(job: TrainingJob) -> float:
    """FLOPs of all GPUs together in an iteration with the full global batch."""
    model, sequence = job.model, job.batch.seq_length
    hybrid = model.hybrid
    assert hybrid is not None
    depths = model.mtp_num_layers if job.core.flops_of_depths else 0
    letters = hybrid.pattern + hybrid.mtp_pattern * depths
    counted = letters if job.core.flops_of_experts else letters.replace("E", "")
    layers = sum(_OF_LETTER[letter](model, sequence) for letter in counted if letter in _OF_LETTER)
    logits = 2 * model.hidden_size * model.logits * (1 + depths)
    return float(job.batch.global_batch_size * sequence * (layers + logits) * _PASSES)


def _gate(model: ModelSpec) -> float:
    return 3 / 2 if model.activation == "swiglu" else 1


def _mamba(model: ModelSpec, sequence: int) -> float:
    """Forward of a token: input projection, scan, output projection."""
    del sequence
    hybrid, hidden = model.hybrid, model.hidden_size
    assert hybrid is not None
    width = MAMBA_EXPANSION * hidden
    projected = 2 * width + 2 * hybrid.state_width + hybrid.heads
    return 2 * hidden * projected + 7 * width * hybrid.state_dim + 2 * width * hidden


def _attention(model: ModelSpec, sequence: int) -> float:
    hidden = model.hidden_size
    groups = hidden * model.num_query_groups / model.num_attention_heads
    return 4 * model.query_projection_size * (hidden + groups + sequence / 2)


def _feed_forward(model: ModelSpec, sequence: int) -> float:
    del sequence
    return 4 * model.ffn_hidden_size * model.hidden_size * _gate(model)


def _experts(model: ModelSpec, sequence: int) -> float:
    del sequence
    moe, hidden = model.moe, model.hidden_size
    assert moe is not None
    routed = 4 * (moe.latent_size or hidden) * moe.ffn_hidden_size * moe.topk * _gate(model)
    projections = 4 * hidden * moe.latent_size if moe.latent_size else 0
    return routed + projections + 4 * hidden * (moe.shared_ffn_hidden_size or 0) * _gate(model)


def _gated_delta_net(model: ModelSpec, sequence: int) -> float:
    del sequence
    assert model.linear_attention is not None
    return 2 * model.linear_attention.multiplications(model.hidden_size)


_OF_LETTER: Final[dict[str, Callable[[ModelSpec, int], float]]] = {
    "M": _mamba,
    "G": _gated_delta_net,
    "*": _attention,
    "-": _feed_forward,
    "E": _experts,
}
"""FLOPs of a token in the forward of a layer, by the letter of the pattern."""
