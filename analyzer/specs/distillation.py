"""The loss of a student that learns from the logits of a teacher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Divergence = Literal["forward", "reverse", "Jensen-Shannon"]
"""Of the teacher's distribution from the student's: forward KL, reverse KL, or the divergence of both from their mixture."""


@dataclass(frozen=True, kw_only=True)
class DistillationSpec:
    """The loss of generalized knowledge distillation (GKD), as ms-swift computes it in chunks of tokens.

    The teacher computes the logits of all microbatches of an iteration before its first forward, in the dtype of the weights.
    """

    divergence: Divergence = "Jensen-Shannon"
    topk: int | None = None
    """The largest logits of the teacher that are compared; None for those of the whole vocabulary."""
    iterations: int = 1
    """Iterations for which the teacher computes logits at a time (`--steps_per_generation`)."""
    from_server: bool = False
    """A server has the teacher, and sends its largest log-probabilities in fp32."""
    reads_labels: bool = False
    """The loss has a term of the labels, which is not modelled (`--sft_alpha`)."""
