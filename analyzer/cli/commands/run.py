"""Runs a command: prints its help, or analyzes the words of the drop-in form that it stands for."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from typing import Final

from analyzer.cli.commands.table import COMMANDS
from analyzer.cli.commands.words import drop_in_words, is_model, split
from analyzer.cli.output import standard_output
from analyzer.errors import FITS, InputError

COMPLETION: Final = "completion"
"""The command that prints the completion of a shell."""

Analysis = Callable[[list[str]], int]
"""Analyzes the words of the drop-in form and returns the exit status. Raises AnalyzerError."""


def run_command(name: str, words: Sequence[str], analyze: Analysis) -> int:
    """Runs a command and returns the exit status. Raises AnalyzerError."""
    if name == COMPLETION:
        return _print_completion(words)
    before = words[: words.index("--")] if "--" in words else words
    if "--help" in before or "-h" in before:
        from analyzer.cli.commands.help import help_text

        return _print(help_text(name))
    if COMMANDS[name].target == "two launches":
        return _compare(name, words, analyze)
    return analyze(drop_in_words(name, words))


def _compare(name: str, words: Sequence[str], analyze: Analysis) -> int:
    """Analyzes the first target, unless it is a JSON report, and then the second one beside it."""
    asked = split(name, words)
    if len(asked.target) < 2:
        raise InputError(name, "needs two launches", f"write get-training-info {name} {COMMANDS[name].example}")
    old, new = asked.target[0], asked.target[1:]
    options = [word for word in words if word not in asked.target]
    if old.endswith(".json") and not is_model(old):
        return analyze(["--info-against", old, *drop_in_words(name, [*options, *new])])
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "old.json")
        with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
            status = analyze(["--info-json", report, *drop_in_words(name, [*options, old])])
        if not os.path.exists(report):
            return status
        return analyze(["--info-against", report, *drop_in_words(name, [*options, *new])])


def _print_completion(words: Sequence[str]) -> int:
    """Prints a script that completes the commands in a shell."""
    shells = ("bash", "zsh", "tcsh")
    if len(words) != 1 or words[0] not in shells:
        raise InputError(COMPLETION, "needs the name of a shell", f"write get-training-info completion {'|'.join(shells)}")
    try:
        import shtab
    except ImportError:
        raise InputError(COMPLETION, "needs the package shtab", "pip install shtab") from None
    from analyzer.cli.commands.help import completion_parser

    return _print(shtab.complete(completion_parser(), shell=words[0]))


def _print(text: str) -> int:
    with standard_output() as stream:
        print(text.rstrip(), file=stream)
    return FITS
