"""Megatron's arguments as parsed from the command line, before anything is derived from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from analyzer.specs.fine_tuning import ALL_PARAMETERS, FineTuning
from analyzer.specs.software import SoftwareSpec
from analyzer.specs.vision_part import NO_PARTS, ModelParts


@dataclass(frozen=True, slots=True)
class Arguments:
    """The namespace that Megatron's parser would return for the command line. Lists are tuples."""

    values: Mapping[str, object]
    """The parsed value or the default of every dest of the release."""
    given: frozenset[str]
    """Dests that were set on the command line or by a checkpoint."""
    spelled: Mapping[str, str]
    """For each given dest, the flag as the user wrote it."""
    release: str
    """The release whose options were used: '0.16.1', or '2023' for the code before core 0.3."""
    source: str
    """The source of these options: 'catalogue of Megatron-LM core 0.16.1', or the path of a checkout's arguments.py."""
    entry: str | None
    """The training script as written on the command line."""
    assumptions: tuple[str, ...]
    """Assumptions made while parsing, one sentence each."""
    warnings: tuple[str, ...] = ()
    """Warnings about the reading of options, one sentence each."""
    unknown: tuple[str, ...] = ()
    """What the launch does not say or this program does not know, one sentence each. The report begins with them."""
    withheld: tuple[str, ...] = ()
    """Why there can be no verdict: what the launch trains otherwise than the analysis counts it, a fragment of a sentence each."""

    tuning: FineTuning = ALL_PARAMETERS
    """What is trained beside, or instead of, all parameters of the model."""

    validated: bool = True
    """Whether `validate_args` of Megatron-LM checks the launch (`MegatronWords.validated`)."""

    parts: ModelParts = NO_PARTS
    """What its options do not say of the model of --info-model."""

    words: tuple[str, ...] = ()
    """Megatron's part of the command line, those of the model of --info-model first."""

    fork: str | None = None
    """The fork of Megatron-LM whose options are given, such as 'microsoft' (`forks/fork_options.json`)."""

    software: SoftwareSpec | None = None
    """The versions of libraries; None for those of the container of the release (`software.container_of`)."""
    versions: str = ""
    """The assumption about them, as a sentence."""

    def get(self, dest: str, default: object = None) -> object:
        """The value of `dest`; `default` if the release has no such option."""
        return self.values.get(dest, default)
