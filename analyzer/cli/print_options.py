"""`--info-print-options`: Megatron's options of a launch, quoted for a shell."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from analyzer.cli.output import standard_output
from analyzer.errors import FITS
from analyzer.frameworks.prepare import prepare
from analyzer.launch.argv_parser import options_with_values
from analyzer.launch.parse import parse
from analyzer.report.visible import visible
from analyzer.specs.vision_part import ModelParts

WIDTH: Final = 100
"""Columns of a line, unless a single option is longer."""


def print_options(argv: Sequence[str], *, environ: Mapping[str, str], folder: Path) -> int:
    """Prints Megatron's options, those of --info-model first, and returns the exit status. Raises AnalyzerError.

    An option that is given several times is printed once, with the value that counts. Assumptions go to standard error.
    """
    prepared = prepare(argv, environ=environ, folder=folder)
    arguments, _, _ = parse(prepared.argv, environ=prepared.environ, folder=folder, own=prepared.own)
    with standard_output() as stream:
        for line in lines_of(arguments.words):
            print(line, file=stream)
    for name in _without_options(arguments.parts):
        print(f"No option of Megatron-LM says {name}, so that these options stand for another training.", file=sys.stderr)
    for sentence in arguments.assumptions:
        print(visible(sentence), file=sys.stderr)
    return FITS


def _without_options(parts: ModelParts) -> Iterator[str]:
    """What a configuration sets of weights and attention in FP8, and only frameworks can set."""
    for name, given in (
        ("that core attention runs in FP8", parts.fp8_attention),
        ("that weights are stored in FP8 without the distributed optimizer", parts.fp8_weights),
        ("that transposed copies of weights in FP8 are freed", parts.fp8_transposes_freed),
    ):
        if given:
            yield name


def lines_of(words: Sequence[str]) -> list[str]:
    """The options in lines, without those that a later option of the same name replaces."""
    options = options_with_values(words)
    last = {option[0].partition("=")[0]: position for position, option in enumerate(options)}
    lines: list[str] = []
    for position in sorted(last.values()):
        text = shlex.join(options[position])
        if lines and len(lines[-1]) + 1 + len(text) <= WIDTH:
            lines[-1] += f" {text}"
        else:
            lines.append(text)
    return lines
