"""What the specs of a job are derived from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from analyzer.specs import HardwareSpec

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments


@dataclass(frozen=True, kw_only=True)
class LaunchInput:
    """A launch command, and the assumptions that are made while it is read."""

    arguments: Arguments
    environ: Mapping[str, str]
    folder: Path
    """The working folder of the launch."""
    gpu: HardwareSpec
    strict: bool = False
    """What the launch does not say is an error (--info-strict)."""
    assumptions: list[str] = field(default_factory=list)
    """One sentence each, in the order in which they were made."""
    warnings: list[str] = field(default_factory=list)
    """The assumptions about options that are given: they are not modelled in full, or have no effect."""
    unknown: list[str] = field(default_factory=list)
    """What the launch does not say or this program does not know. The report begins with these sentences."""

    def assume(self, *sentences: str) -> None:
        """Adds to the assumptions that the report lists."""
        self.assumptions.extend(sentences)

    def warn(self, *sentences: str) -> None:
        """Adds to the assumptions that the report lists as warnings."""
        self.assumptions.extend(sentences)
        self.warnings.extend(sentences)

    def state_unknown(self, *sentences: str) -> None:
        """Adds to the statements with which the report begins."""
        self.unknown.extend(sentences)
