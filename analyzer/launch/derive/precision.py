"""Element types of parameters and gradients.

Megatron: `validate_args` (0.16.1) for the types, `get_model` (megatron/training/training.py) for the gradient buffer:
fp32 if gradients are accumulated in fp32, otherwise the type of the parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from analyzer.errors import InputError
from analyzer.launch.derive.reading import RELEASE_2023, option, switched_on, text
from analyzer.specs import PrecisionSpec

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments


def precision_spec(arguments: Arguments) -> PrecisionSpec:
    """Types of parameters and of the gradient buffer. Raises InputError for flags that contradict each other."""
    fp16, bf16 = switched_on(arguments, "fp16"), switched_on(arguments, "bf16")
    if fp16 and bf16:
        raise InputError("--fp16", "contradicts --bf16", "keep one of the two")
    half = fp16 or bf16
    if switched_on(arguments, "fp32_residual_connection") and not half:
        raise InputError(
            option(arguments, "fp32_residual_connection"), "has an effect in 16-bit training only", "add --bf16, or leave it out"
        )
    if switched_on(arguments, "fp16_lm_cross_entropy") and not fp16:
        raise InputError(option(arguments, "fp16_lm_cross_entropy"), "needs --fp16", "add --fp16, or leave it out")
    if not half:
        return PrecisionSpec()
    parameters: Literal["fp16", "bf16"] = "fp16" if fp16 else "bf16"
    return PrecisionSpec(parameters=parameters, gradients="fp32" if _accumulates_in_fp32(arguments, bf16=bf16) else parameters)


def _accumulates_in_fp32(arguments: Arguments, *, bf16: bool) -> bool:
    asked = switched_on(arguments, "accumulate_allreduce_grads_in_fp32")
    if not bf16:
        return asked
    if arguments.release == RELEASE_2023:
        return True
    main_grads = text(arguments, "main_grads_dtype", "fp32")
    if asked and main_grads != "fp32":
        raise InputError(
            option(arguments, "accumulate_allreduce_grads_in_fp32"),
            f"contradicts {option(arguments, 'main_grads_dtype')} {main_grads}",
            "keep one of the two",
        )
    return not switched_on(arguments, "grad_reduce_in_bf16") and main_grads == "fp32"
