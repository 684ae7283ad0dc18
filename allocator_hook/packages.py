"""Installed versions of the packages that the shadow engine runs, and the versions that the tests cover."""

from __future__ import annotations

from importlib import metadata
from typing import Final

from analyzer.errors import AnalyzerError

COVERED: Final = {
    "megatron-core": ("0.10", "0.13", "0.14", "0.15", "0.16"),
    "transformer-engine": ("1.11", "2.6", "2.11", "2.20"),
}
"""Releases that the tests cover. Other releases give a warning."""

_PACKAGES: Final = ("torch", "megatron-core", "transformer-engine")


def installed() -> dict[str, str]:
    """Return the installed version of each package. Raises AnalyzerError if torch or megatron-core is missing."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            if package != "transformer-engine":
                raise AnalyzerError(
                    f"--info-engine shadow: {package} is not installed; "
                    "run pip install '.[shadow]' in this project's folder, or use --info-engine formula"
                ) from None
    return found


def warnings(versions: dict[str, str]) -> tuple[str, ...]:
    """Return a sentence for each package whose release the tests do not cover."""
    return tuple(
        f"The shadow engine was tested with {package} {', '.join(releases)}, not with {versions[package]}."
        for package, releases in COVERED.items()
        if package in versions and not versions[package].startswith(tuple(release + "." for release in releases))
    )
