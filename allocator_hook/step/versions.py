"""Passes options to different releases of megatron-core. Options that a release lacks are omitted if they are not needed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

from analyzer.errors import AnalyzerError

IMPLIED: Final[dict[str, tuple[Any, ...]]] = {
    "transformer_impl": ("transformer_engine", "local"),  # describes the layer spec
    "fp8_recipe": ("delayed", "tensorwise"),  # of the optimizer, which asks for "delayed" from 0.13 on
    "overlap_param_gather": (True,),  # of the optimizer, which read the configuration of data parallelism
}
"""By option, the values that releases before 0.14, which lack the option, imply."""


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
