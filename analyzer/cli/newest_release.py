"""What the newest known release of Megatron-LM would need, for a launch whose release is assumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from analyzer.errors import AnalyzerError
from analyzer.launch.options.catalogue import PREFERRED, load_catalogue
from analyzer.memory.ranks import highest_peak_bytes
from analyzer.results import NewestRelease, Report

if TYPE_CHECKING:
    from analyzer.api import Launch


def with_newest_release(report: Report, launch: Launch, argv: Sequence[str], *, environ: Mapping[str, str], folder: Path) -> Report:
    """The report with the difference of the newest release, if none was given and no checkout was found."""
    release = load_catalogue().releases[-1]
    is_assumed = launch.options.megatron is None and launch.arguments.source.startswith("catalogue")
    if not is_assumed or launch.arguments.release != PREFERRED:
        return report
    from analyzer.api import read_launch

    try:
        newest = read_launch([*argv, "--info-megatron", release], environ=environ, folder=folder).job
        found = NewestRelease(release, highest_peak_bytes(newest) - highest_peak_bytes(launch.job))
    except AnalyzerError as error:
        found = NewestRelease(release, None, refused=getattr(error, "option", ""))
    return replace(report, newest=found)
