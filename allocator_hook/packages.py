"""Which packages the shadow runs with, and which of them the tests have seen."""

from __future__ import annotations

from importlib import metadata
from typing import Final

from analyzer.errors import AnalyzerError

COVERED: Final = {"megatron-core": ("0.14", "0.15", "0.16"), "transformer-engine": ("2.11",)}
"""Releases that the tests cover; another gives a warning, not a refusal."""

_PACKAGES: Final = ("torch", "megatron-core", "transformer-engine")


def installed() -> dict[str, str]:
    """Versions by package. Raises AnalyzerError where torch or megatron-core is missing."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            if package != "transformer-engine":
                raise AnalyzerError(
                    f"--info-engine shadow: {package} is not installed; "
                    "in this project's folder: pip install '.[shadow]', or use --info-engine formula"
                ) from None
    return found


def warnings(versions: dict[str, str]) -> tuple[str, ...]:
    """A sentence for each package of a release that no test has seen."""
    return tuple(
        f"The shadow engine was tested with {package} {', '.join(releases)}, not with {versions[package]}."
        for package, releases in COVERED.items()
        if package in versions and not versions[package].startswith(tuple(release + "." for release in releases))
    )
