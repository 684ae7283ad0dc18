"""Options that Megatron no longer accepts, and their replacements."""

from __future__ import annotations

from typing import Final

from analyzer.errors import InputError

_RECOMPUTE: Final = "use --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

RETIRED: Final[dict[str, tuple[str, str]]] = {
    "--batch-size": ("Megatron refuses it", "use --micro-batch-size"),
    "--warmup": ("Megatron refuses it", "use --lr-warmup-fraction"),
    "--model-parallel-size": ("Megatron refuses it", "use --tensor-model-parallel-size"),
    "--checkpoint-activations": ("Megatron refuses it", _RECOMPUTE),
}
"""Fault and remedy of options that are parsed and then refused by `validate_args` (0.12 to 0.19)."""

UNRECOGNISED: Final[dict[str, str]] = {
    "--activations-checkpoint-method": "use --recompute-granularity full --recompute-method, with uniform or block",
    "--activations-checkpoint-num-layers": "use --recompute-num-layers",
    "--activations-checkpoint-granularity": "use --recompute-granularity",
    "--checkpoint-method": "use --recompute-method",
    "--checkpoint-num-layers": "use --recompute-num-layers",
    "--checkpoint-granularity": "use --recompute-granularity",
    "--distribute-checkpointed-activations": "use --distribute-saved-activations",
    "--fp32-allreduce": "use --accumulate-allreduce-grads-in-fp32",
    "--scaled-upper-triang-masked-softmax-fusion": "leave it out: the fused softmax is on by default",
    "--scaled-masked-softmax-fusion": "leave it out: the fused softmax is on by default",
    "--bias-gelu-fusion": "leave it out: the fusion is on by default",
    "--bias-dropout-fusion": "leave it out: the fusion is on by default",
    "--apply-residual-connection-post-norm": "use --apply-residual-connection-post-layernorm",
    "--expert-parallel": "use --expert-model-parallel-size N",
    "--use-te": "use --transformer-impl transformer_engine",
}
"""Remedy for options of older code that no parser since August 2023 has."""


def refuse_retired(flag: str) -> None:
    """Raises InputError for an option that Megatron no longer accepts."""
    if flag in UNRECOGNISED:
        raise InputError(flag, "Megatron-LM no longer has this option", UNRECOGNISED[flag])
    if flag in RETIRED:
        raise InputError(flag, *RETIRED[flag])
