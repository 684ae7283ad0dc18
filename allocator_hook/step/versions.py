"""Passing options to a megatron-core of any release that is near: what it does not know and does not need is left out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from analyzer.errors import AnalyzerError


def known_to(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """`options` that `function` takes. One that is set (true, or not None) and unknown to it is an error."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return options
    unknown = sorted(name for name, value in options.items() if name not in parameters and value)
    if unknown:
        raise AnalyzerError(
            f"--info-engine shadow: the installed megatron-core has no {', '.join(unknown)} "
            f"({getattr(function, '__qualname__', function)}); install a newer megatron-core, or use --info-engine formula"
        )
    return {name: value for name, value in options.items() if name in parameters}
