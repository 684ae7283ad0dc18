"""The installed release of Transformer Engine, and positional arguments of bindings that differ between releases."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, wraps
from importlib import metadata
from typing import Any, Final

from analyzer.specs.software import version_number

_PARAMETER: Final = re.compile(r"(\w+)(?:(>=|<)([\d.]+))?")


@cache
def release() -> tuple[int, ...]:
    """Return the installed release, such as (2, 11, 0). Without Transformer Engine: (2, 11), whose bindings Apex is given too."""
    try:
        return version_number(metadata.version("transformer-engine"))
    except metadata.PackageNotFoundError:
        return (2, 11)


def is_before(version: str) -> bool:
    """Return whether the installed release is older than `version`, such as '2.12'."""
    return release() < version_number(version)


def parameter_names(parameters: str, installed: tuple[int, ...]) -> tuple[str, ...]:
    """Return those of `parameters` that a release has. A parameter names its releases if not all have it.

    >>> parameter_names("q softmax_type>=2.8 dtype<2.15", (2, 7, 0))
    ('q', 'dtype')
    """
    names = []
    for name, relation, version in _PARAMETER.findall(parameters):
        older = bool(relation) and installed < version_number(version)
        if not relation or older == (relation == "<"):
            names.append(name)
    return tuple(names)


def with_names(kernel: Callable[..., Any], parameters: str) -> Callable[..., Any]:
    """Return `kernel` for calls with positional arguments in the order of the installed release.

    `parameters` has all parameters of the binding in order, up to the last one that the kernel uses. Arguments after them are
    dropped, and so are those that the kernel does not have.
    """
    names = parameter_names(parameters, release())
    wanted = set(kernel.__code__.co_varnames[: kernel.__code__.co_argcount])

    @wraps(kernel)
    def call(*args: Any, **options: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **options}
        return kernel(**{name: value for name, value in given.items() if name in wanted})

    return call
