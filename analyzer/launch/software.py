"""The versions of Transformer Engine and PyTorch that are assumed for a launch.

In this order: `--info-te` and `--info-torch`; what is installed beside this program, if that can train; the NGC PyTorch container
that goes with the release of Megatron-LM:

- 0.5 and 0.6: named in megatron/core/QuickStart.md; 0.13, taken for 0.12 too, and 0.16: named in the README
- 0.7 to 0.11 and 0.17 to 0.19: the container of the CI (.gitlab-ci.yml, .gitlab/stages/01.*.yml, docker/.ngc_version.dev)
- 0.14 and 0.15: the container with the newest Transformer Engine that the extra `dev` of the wheels allows
- earlier code: the container of its month

The versions in a container are those that NVIDIA's release notes and users of the container state, up to the second number.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from analyzer.errors import InputError
from analyzer.specs.model import ModelSpec
from analyzer.specs.release import release_number
from analyzer.specs.software import SoftwareSpec, version_number

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments

NONE: Final = "none"
"""The value of `--info-te` for a training without Transformer Engine."""


class Container(NamedTuple):
    """An NGC PyTorch container."""

    tag: str
    te: str
    torch: str

    @property
    def software(self) -> SoftwareSpec:
        """The versions in the container."""
        return SoftwareSpec(te=self.te, torch=self.torch)


CONTAINERS: Final[dict[str, Container]] = {
    "2023": Container("23.07", "0.10", "2.1"),
    "0.4": Container("23.10", "0.13", "2.1"),
    "0.5": Container("24.02", "1.3", "2.3"),
    "0.7": Container("24.01", "1.2", "2.2"),
    "0.10": Container("24.10", "1.11", "2.5"),
    "0.12": Container("25.04", "2.2", "2.7"),
    "0.14": Container("25.09", "2.7", "2.9"),
    "0.15": Container("25.11", "2.9", "2.10"),
    "0.16": Container("26.01", "2.11", "2.10"),
    "0.17": Container("26.02", "2.12", "2.11"),
    "0.18": Container("26.04", "2.14", "2.12"),
    "0.19": Container("26.06", "2.16", "2.13"),
}
"""By the first release that is used with it, oldest first."""


def container_of(release: str) -> Container:
    """The container of a release of Megatron-LM."""
    number = release_number(release)
    return [each for first, each in CONTAINERS.items() if release_number(first) <= number][-1]


def software_of(
    release: str, *, te: str | None = None, torch: str | None = None, engine: Literal["formula", "shadow", "both"] = "formula"
) -> tuple[SoftwareSpec, str]:
    """The versions for a launch of a release of Megatron-LM, and the assumption as a sentence.

    `te` and `torch` are the values of the options, or None. The shadow engine runs the Transformer Engine that is installed.
    """
    container = container_of(release)
    source = f"the NGC container {container.tag}"
    assumed = {"te": (container.te, source), "torch": (container.torch, source)}
    if te is None or torch is None:
        here = "this installation"
        assumed |= {package: (version, here) for package, version in _installed(with_kernels=engine == "formula").items()}
    if te is not None:
        assumed["te"] = (te, "--info-te")
    if torch is not None:
        assumed["torch"] = (torch, "--info-torch")
    return _spec(assumed), _sentence(*assumed["te"], *assumed["torch"])


def software_in(arguments: Arguments) -> SoftwareSpec:
    """The versions of a launch: those that are given or installed, or those of the container of the release."""
    return arguments.software or container_of(arguments.release).software


def check_software(software: SoftwareSpec, model: ModelSpec) -> None:
    """Raises InputError for a model that needs Transformer Engine if there is none."""
    if software.te is not None:
        return
    remedy = "give the version of Transformer Engine, such as 2.11"
    if model.implementation == "transformer_engine":
        raise InputError("--info-te", "none contradicts --transformer-impl transformer_engine", remedy)
    if model.cross_entropy == "te":
        raise InputError("--info-te", "none contradicts --cross-entropy-fusion-impl te", remedy)


def _spec(assumed: dict[str, tuple[str, str]]) -> SoftwareSpec:
    te, torch = assumed["te"][0], assumed["torch"][0]
    return SoftwareSpec(te=None if te == NONE else te, torch=torch)


def _sentence(te: str, of_te: str, torch: str, of_torch: str) -> str:
    """Such as 'Transformer Engine 2.11 and PyTorch 2.10 are assumed, from the NGC container 26.01.'"""
    first = "no Transformer Engine" if te == NONE else f"Transformer Engine {te}"
    first = first[0].upper() + first[1:]
    if of_te == of_torch:
        return f"{first} and PyTorch {torch} are assumed, from {of_te}."
    return f"{first}, from {of_te}, and PyTorch {torch}, from {of_torch}, are assumed."


def _installed(*, with_kernels: bool) -> dict[str, str]:
    """The versions that are installed beside this program, or nothing: of both packages if Transformer Engine has its kernels.

    Without kernels it cannot train, and the PyTorch beside it is any: then only its own version, unless `with_kernels`. The
    packages are not imported. Metadata are read only if there is a folder of Transformer Engine, which is faster to find.
    """
    folder = next((entry for entry in sys.path if os.path.isdir(os.path.join(entry, "transformer_engine"))), None)
    if folder is None:
        return {}
    trains = any(name.startswith("transformer_engine_torch") for name in os.listdir(folder))
    if with_kernels and not trains:
        return {}
    from importlib import metadata

    packages = {"te": "transformer-engine", "torch": "torch"} if trains else {"te": "transformer-engine"}
    try:
        found = {name: metadata.version(package) for name, package in packages.items()}
    except metadata.PackageNotFoundError:
        return {}
    return found if all(version_number(version) for version in found.values()) else {}
