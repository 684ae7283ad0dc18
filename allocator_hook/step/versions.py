"""Passes options to different releases of megatron-core. Options that a release lacks are omitted if they are not needed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

import torch

from analyzer.errors import AnalyzerError

IMPLIED: Final[dict[str, tuple[Any, ...]]] = {
    "transformer_impl": ("transformer_engine", "local"),  # describes the layer spec
    "fp8_recipe": ("delayed", "tensorwise"),  # of the optimizer, which asks for "delayed" from 0.13 on
    "cp_comm_type": ("p2p",),
    "cross_entropy_fusion_impl": ("native",),  # before 0.13 the fused cross entropy is Megatron's own
    "moe_router_score_function": ("softmax",),
    "num_distributed_optimizer_instances": (1,),
    "recompute_modules": (["core_attn"],),
    **dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype", "main_params_dtype"), (torch.float32,)),
    **dict.fromkeys(("pin_cpu_grads", "pin_cpu_params"), (True,)),  # have an effect with optimizer states on the host only
    "overlap_param_gather": (True,),  # of the optimizer, which read the configuration of data parallelism
}
"""By option, the values that releases before 0.14, which lack the option, imply."""


def accepted_by(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Return those `options` that `function` accepts. Releases without the others read their values elsewhere."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in parameters}


def known_to(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Return those `options` that `function` accepts.

    Raises AnalyzerError if an option is not accepted, unless it is not set (not truthy) or its value is that of `IMPLIED`.
    """
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return options
    unknown = sorted(
        name for name, value in options.items() if name not in parameters and value and value not in IMPLIED.get(name, ())
    )
    if unknown:
        raise AnalyzerError(
            f"--info-engine shadow: the installed megatron-core does not support {', '.join(unknown)} "
            f"({getattr(function, '__qualname__', function)}); install a newer megatron-core, or use --info-engine formula"
        )
    return {name: value for name, value in options.items() if name in parameters}
