"""The loss of a student that learns from the logits of a teacher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Divergence = Literal["forward", "reverse", "Jensen-Shannon", "mixed"]
"""Of the teacher's distribution from the student's: forward KL, reverse KL, the divergence of both from their mixture, or the mean
of forward and reverse KL."""


@dataclass(frozen=True, kw_only=True)
class DistillationSpec:
    """The loss of generalized knowledge distillation (GKD), as ms-swift computes it in chunks of tokens, or that of NeMo-RL.

    The teacher of ms-swift computes the logits of all microbatches of an iteration before its first forward, in the dtype of the
    weights. That of NeMo-RL stores its largest logits in fp32 on the host, from which those of a microbatch come to the GPU.
    """

    framework: Literal["ms-swift", "NeMo-RL"] = "ms-swift"
    divergence: Divergence = "Jensen-Shannon"
    topk: int | None = None
    """The largest logits of the teacher that are compared; None for those of the whole vocabulary."""
    iterations: int = 1
    """Iterations for which the teacher computes logits at a time (`--steps_per_generation`)."""
    from_server: bool = False
    """A server has the teacher, and sends its largest log-probabilities in fp32."""
    reads_labels: bool = False
    """The loss has a term of the labels, which is not modelled (`--sft_alpha`)."""
    sequences: int = 0
    """Packed sequences of a microbatch, of which NeMo-RL computes the loss one by one; 0 without packing."""
    whole_vocabulary: bool = False
    """Probabilities of the student are those among the whole vocabulary, not among the chosen logits (`zero_outside_topk`)."""
