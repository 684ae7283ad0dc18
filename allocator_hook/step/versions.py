"""Passes options to different releases of megatron-core. Options that a release lacks are omitted if they are not set."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from analyzer.errors import AnalyzerError


def known_to(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Return those `options` that `function` accepts. Raises AnalyzerError if a set (truthy) option is not accepted."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return options
    unknown = sorted(name for name, value in options.items() if name not in parameters and value)
    if unknown:
        raise AnalyzerError(
            f"--info-engine shadow: the installed megatron-core does not support {', '.join(unknown)} "
            f"({getattr(function, '__qualname__', function)}); install a newer megatron-core, or use --info-engine formula"
        )
    return {name: value for name, value in options.items() if name in parameters}
