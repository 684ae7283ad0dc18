"""Versions and folders of the packages that the shadow engine runs, and the versions that the tests cover."""

from __future__ import annotations

from importlib import metadata
from typing import Final

from allocator_hook.sources import MEGATRON, TRANSFORMER_ENGINE, source_of
from analyzer.errors import AnalyzerError

COVERED: Final = {
    "megatron-core": ("0.10", "0.13", "0.14", "0.15", "0.16"),
    "transformer-engine": ("1.11", "2.6", "2.11", "2.20"),
}
"""Releases of packages that the tests cover. Other releases give a warning."""

CHECKOUTS: Final = {"megatron-core": ("0.17", "0.18", "0.19", "0.20")}
"""Releases that the tests cover with a checkout (`make shadow CHECKOUT=FOLDER`): the package index does not have them."""

_PACKAGES: Final = ("torch", "megatron-core", "transformer-engine")


def installed() -> dict[str, str]:
    """Return the version of each package. Raises AnalyzerError if torch or megatron-core is missing.

    That of megatron-core is the release in the sources that are imported: those of a checkout on PYTHONPATH, or the package.
    """
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = _version(package)
        except metadata.PackageNotFoundError:
            if package != "transformer-engine":
                raise AnalyzerError(
                    f"--info-engine shadow: {package} is not installed; "
                    "run pip install '.[shadow]' in this project's folder, or use --info-engine formula"
                ) from None
    return found


def _version(package: str) -> str:
    source = source_of(MEGATRON) if package == "megatron-core" else None
    return (source and source.release) or metadata.version(package)


def folders() -> dict[str, str]:
    """Return the folder of the Python files of megatron-core and of Transformer Engine, if they are found."""
    sources = {"megatron-core": source_of(MEGATRON), "transformer-engine": source_of(TRANSFORMER_ENGINE)}
    return {package: str(source.folder) for package, source in sources.items() if source is not None}


def warnings(versions: dict[str, str]) -> tuple[str, ...]:
    """Return a sentence for each package whose release the tests do not cover."""
    tested = {package: (*releases, *CHECKOUTS.get(package, ())) for package, releases in COVERED.items()}
    return tuple(
        f"The shadow engine was tested with {package} {', '.join(releases)}, not with {versions[package]}."
        for package, releases in tested.items()
        if package in versions and not versions[package].startswith(tuple(release + "." for release in releases))
    )
